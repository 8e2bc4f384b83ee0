"""What goes into tables and comes back: the ids of a batch, and the gradients of their rows."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class IdGroup:
    """The ids of the categorical features that are stored in one integer type, equally many of
    each."""

    features: list[int]
    """Which features, in table order."""
    ids: Tensor
    """[features, B], or [features, B, hotness]: rows of each feature's own table; -1 for none,
    where a feature may have fewer ids than others."""

    def part(self, samples: slice) -> "IdGroup":
        """The ids of some of the samples."""
        return IdGroup(self.features, self.ids[:, samples])


def gradient(rows: Tensor) -> Tensor:
    """What the backward pass left for looked-up rows."""
    if rows.grad is None:
        raise RuntimeError("Rows were looked up in training, but no backward pass reached them.")
    return rows.grad


def joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
