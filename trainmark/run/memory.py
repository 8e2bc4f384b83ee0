"""Bytes per device of a run, from a model built on the meta device: nothing is allocated."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from trainmark.config import AnyRun, Run
from trainmark.errors import InputError
from trainmark.formatting import GIB
from trainmark.hardware.datasheets import ACCELERATORS
from trainmark.hardware.devices import Cluster
from trainmark.hardware.machine import RESERVED
from trainmark.workloads import Workload, smaller_runs

if TYPE_CHECKING:  # `trainmark plan` of a DLRM needs no torch
    from torch import Tensor

    from trainmark.distributed.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes on one device at a step's fullest moment. Exact, except for the activations."""

    weights: int
    gradients: int
    """Those of that moment: none yet, where the backward pass then frees more than it makes."""
    optimizer: int
    activations: int
    """Estimated."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


def plan_memory(cfg: Run, workload: Workload, mesh: "Mesh") -> MemoryPlan:
    """Build this rank's share of the model without memory, and count."""
    import torch

    from trainmark.distributed.mesh import Mesh

    shapes_only = Mesh(torch.device("meta"), mesh.axes, mesh.device_mesh)
    parts = workload.parallelize(workload.build_model(cfg), shapes_only, cfg)
    trainer = workload.build_trainer(parts, shapes_only, cfg)
    if hasattr(trainer, "device_bytes"):
        return MemoryPlan(**trainer.device_bytes(), activations=workload.activation_bytes(cfg))
    return MemoryPlan(
        weights=_bytes(trainer.weights().values()),
        gradients=_bytes(p for part in parts for p in part.parameters()),
        optimizer=_bytes(trainer.state_dict().values()),
        activations=workload.activation_bytes(cfg),
    )


def _bytes(tensors: Iterable["Tensor"]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def sum_of(plans: Iterable[MemoryPlan]) -> MemoryPlan:
    """What several devices need together."""
    plans = list(plans)
    kinds = [field.name for field in fields(MemoryPlan)]
    return MemoryPlan(**{kind: sum(getattr(plan, kind) for plan in plans) for kind in kinds})


# --- what does not fit


def card_bytes(cluster: Cluster) -> int | None:
    """Memory of one device of a cluster, nominal; None where it is not known beforehand."""
    device = ACCELERATORS.get(cluster.hardware)
    return device.memory_bytes if device else None


def what_fits(cfg: AnyRun, needed: Callable[[AnyRun], MemoryPlan], available: float) -> str:
    """A sentence (after a space) with the flags that make a run fit; none, if there are none.

    Args:
        needed: the plan of a run as the caller would make it; `InputError` for what cannot be.
    """
    for flags, run in smaller_runs(cfg):
        try:
            total = needed(run).total
        except InputError:
            continue
        if total <= available:
            return f" With {flags} it would fit ({total / GIB:.1f} GiB)."
    return ""


def misfit(
    cfg: AnyRun, plan: MemoryPlan, cluster: Cluster, needed: Callable[[AnyRun], MemoryPlan]
) -> str | None:
    """What to say of a run that a cluster's devices are too small for; None if they are not."""
    card = card_bytes(cluster)
    if card is None or plan.total <= card:
        return None
    return (
        f"{cfg.name} does not fit {cluster}: a device needs {plan.total / GIB:.1f} GiB of "
        f"{card / GIB:.1f}. Use more devices or a smaller micro_batch."
        f"{what_fits(cfg, needed, card * (1 - RESERVED))}"
    )


def check_fits(
    plan: MemoryPlan,
    available: int,
    name: str,
    where: str,
    *,
    ranks: int = 1,
    advice: Callable[[int], str] = lambda available: "",
) -> None:
    """Refuse, before anything is allocated, a run that cannot fit.

    Args:
        advice: what else to say of a run that has so many bytes.
    """
    if plan.total > available:
        who = "it needs" if ranks == 1 else f"its {ranks} ranks need"
        raise InputError(
            f"{name} does not fit: {who} {plan.total / GIB:.1f} GiB (weights "
            f"{plan.weights / GIB:.1f}, gradients {plan.gradients / GIB:.1f}, optimiser "
            f"{plan.optimizer / GIB:.1f}, activations about {plan.activations / GIB:.1f}), and "
            f"{where} has {available / GIB:.1f} GiB free. Use more or larger devices, a "
            f"smaller micro_batch or a smaller model.{advice(available)}"
        )


def check_host_fits(needed: int, available: int, name: str) -> None:
    """Likewise for tables in host memory, of all devices of this machine."""
    if needed > available:
        raise InputError(
            f"{name} does not fit: its tables in host memory need {needed / GIB:.1f} GiB on this "
            f"machine, which has {max(available, 0) / GIB:.1f} GiB free for them. Use fewer "
            "--host-tables, more machines or smaller tables (a higher frequency threshold)."
        )
