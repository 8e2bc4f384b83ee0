"""`--check-every`: what ends a run on a device that does not give the same bits twice."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainmark.config import Run
from trainmark.contract import AnyWorkload, Trainer
from trainmark.distributed.mesh import Mesh, of_all_ranks
from trainmark.errors import InputError
from trainmark.training.checking import fingerprints

_MOST_NAMED = 5


def can_check(cfg: Run, workload: AnyWorkload) -> None:
    """Refuse --check-every for a workload without checked steps."""
    if cfg.check_every is not None and workload.checked_step is None:
        raise InputError(f"check_every: {cfg.workload} has no checked steps. Leave it out.")


def check(
    step: int,
    differ: dict[str, Tensor],
    trainer: Trainer[Any, Any],
    mesh: Mesh,
    last_checkpoint: Callable[[], str],
) -> None:
    """Stop if a step's two computations differ on any rank, or if replicated weights differ between
    ranks.

    Args:
        step: the step that was computed twice.
        differ: by name, whether the bits differ.
        last_checkpoint: says which checkpoint is the last one.
    """
    flags = torch.stack(list(differ.values())).tolist()
    found = [name for name, differs in zip(differ, flags, strict=True) if differs]
    by_rank = {rank: names for rank, names in enumerate(of_all_ranks(found)) if names}
    if by_rank:
        where = "; ".join(_on_rank(rank, names, len(by_rank)) for rank, names in by_rank.items())
        raise InputError(
            f"Step {step} was computed twice, and not to the same bits: {where}. {_ADVICE} "
            f"Nothing was saved since; {last_checkpoint()}."
        )
    if mesh.world_size > 1 and (unlike := _unlike(trainer)):
        raise InputError(
            f"After step {step} ranks have different bits of what they should have alike: "
            f"{_listed(unlike)}. {_ADVICE} Nothing was saved since; {last_checkpoint()}."
        )


_ADVICE = (
    "Memory or arithmetic of a device is faulty: test it, and continue on another one with the "
    "same command."
)


def _unlike(trainer: Trainer[Any, Any]) -> list[str]:
    """Replicated tensors whose bits are not the same on all ranks."""
    whole = {name: held for name, held in trainer.weights().items() if type(held) is Tensor}
    sums = torch.stack(list(fingerprints(whole).values())).tolist() if whole else []
    seen: dict[str, set[int]] = {}
    for of_rank in of_all_ranks(dict(zip(whole, sums, strict=True))):
        for name, value in of_rank.items():
            seen.setdefault(name, set()).add(value)
    return [name for name, values in seen.items() if len(values) > 1]


def _on_rank(rank: int, names: list[str], ranks: int) -> str:
    return _listed(names) if ranks == 1 and rank == 0 else f"on rank {rank}, {_listed(names)}"


def _listed(names: list[str]) -> str:
    others = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + others
