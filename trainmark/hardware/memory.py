"""Bytes that a run needs of a device, against what the device has."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import TypeVar

from trainmark.errors import InputError
from trainmark.formatting import readable_size
from trainmark.hardware.devices import Cluster
from trainmark.hardware.known import lookup

T = TypeVar("T")

# What a device has beside tables, weights and activations: driver and library contexts, buffers of
# the collectives, fragments between allocations, and the 2 % that a driver reports less.
RESERVED = 0.05

# Bytes that cuBLAS works with on the streams of a step, and small buffers, on an H200.
LIBRARIES = 330 * 2**20


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes on one device at a step's fullest moment. Exact, except for the activations."""

    weights: int
    gradients: int
    """0 if memory peaks before the backward pass."""
    optimizer: int
    activations: int
    """Estimated."""

    @property
    def total(self) -> int:
        return sum(getattr(self, part) for part in MEMORY_PARTS)


MEMORY_PARTS = tuple(part.name for part in fields(MemoryPlan))


def sum_of(plans: Iterable[MemoryPlan]) -> MemoryPlan:
    """What several devices need together."""
    plans = list(plans)
    return MemoryPlan(**{part: sum(getattr(p, part) for p in plans) for part in MEMORY_PARTS})


# --- what does not fit


def card_bytes(cluster: Cluster) -> int | None:
    """Memory of one device of a cluster, nominal; None where it is not known beforehand."""
    device = lookup(cluster.hardware)
    memory = device.shared(cluster.devices).memory if device else None
    return None if memory is None else int(memory.value)


def what_fits(
    smaller: Iterable[tuple[str, T]], needed: Callable[[T], MemoryPlan], available: float
) -> str:
    """A sentence (after a space) with the flags that make a run fit; none, if there are none.

    Args:
        smaller: flags, each with the run that they make.
        needed: the plan of a run as the caller would make it; `InputError` for what cannot be.
    """
    for flags, run in smaller:
        try:
            total = needed(run).total
        except InputError:
            continue
        if total <= available:
            return f" With {flags} it would fit ({readable_size(total)})."
    return ""


def misfit(
    name: str, plan: MemoryPlan, cluster: Cluster, advice: Callable[[float], str]
) -> str | None:
    """The message for a run that a cluster's devices are too small for; None if they are not.

    Args:
        advice: what else to say of a run that may take so many bytes.
    """
    card = card_bytes(cluster)
    if card is None or plan.total <= card:
        return None
    return (
        f"{name} does not fit {cluster}: a device needs {readable_size(plan.total)} of "
        f"{readable_size(card)}. Use more devices or a smaller micro_batch."
        f"{advice(card * (1 - RESERVED))}"
    )


def check_fits(
    plan: MemoryPlan,
    available: int,
    name: str,
    where: str,
    *,
    ranks: int = 1,
    advice: Callable[[float], str],
) -> None:
    """Refuse, before anything is allocated, a run that cannot fit.

    Args:
        advice: what else to say of a run that has so many bytes.
    """
    if plan.total > available:
        who = "it needs" if ranks == 1 else f"its {ranks} ranks need"
        parts = ", ".join(f"{name} {readable_size(getattr(plan, name))}" for name in MEMORY_PARTS)
        raise InputError(
            f"{name} does not fit: {who} {readable_size(plan.total)} ({parts}, the last estimated),"
            f" and {where} has {readable_size(available)} free. Use more or larger devices, a "
            f"smaller micro_batch or a smaller model.{advice(available)}"
        )


def check_host_fits(needed: int, available: int, name: str) -> None:
    """The same for tables in host memory, of all devices of this machine."""
    if needed > available:
        raise InputError(
            f"{name} does not fit: its tables in host memory need {readable_size(needed)} on this "
            f"machine, which has {readable_size(max(available, 0))} free for them. Use fewer "
            "--host-tables, more machines or smaller tables (a higher frequency threshold)."
        )
