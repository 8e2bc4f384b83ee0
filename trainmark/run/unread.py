"""The scalars that steps leave on the device, until the loop reads them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainmark.run.curves import Step


@dataclass(frozen=True, kw_only=True)
class _Left:
    """What one step has left."""

    known: dict[str, Any]
    scalars: Mapping[str, Tensor | float]
    differ: dict[str, Tensor]


class Unread:
    """The scalars of steps that nobody has read yet.

    They stay on a device until then: reading one would make the host wait. On a CPU they are read
    at once: kept, each would split the block of memory that the next step's largest gradient needs,
    and the process would grow by that gradient every step.
    """

    def __init__(self, device: torch.device) -> None:
        self._at_once = device.type == "cpu"
        self._left: list[_Left] = []

    def add(
        self, scalars: Mapping[str, Tensor], differ: dict[str, Tensor], **known: int | float
    ) -> None:
        """Add a step.

        Args:
            scalars: by their names in `Step`; the same names for every step.
            differ: of a checked step, by name whether its two computations differ.
            known: the fields of `Step` that the host knows.
        """
        kept = {name: value.item() if self._at_once else value for name, value in scalars.items()}
        self._left.append(_Left(known=known, scalars=kept, differ=differ))

    def read(self) -> list[tuple[Step, dict[str, Tensor]]]:
        """Every step since the last call, with its `differ`."""
        left, self._left = self._left, []
        if not left:
            return []
        read = {
            name: torch.stack([torch.as_tensor(at.scalars[name]) for at in left]).float().tolist()
            for name in left[0].scalars
        }
        read["skipped"] = list(map(bool, read["skipped"]))
        rows = [dict(zip(read, row, strict=True)) for row in zip(*read.values(), strict=True)]
        return [(Step(**at.known, **row), at.differ) for at, row in zip(left, rows, strict=True)]
