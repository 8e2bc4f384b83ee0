"""Standard errors of AUCs and of differences of AUCs on the same rows, after DeLong.

The AUC is `trainmark.metrics.auc`; this is how much it would vary with other rows.
"""

import torch
from torch import Tensor

Placements = tuple[Tensor, Tensor]
"""Of clicks among the others, and of the others among the clicks."""


def placements(scores_N: Tensor, labels_N: Tensor) -> Placements:
    """For each click, the share of others below it; for each other, that of clicks above it."""
    ranks_N = _mid_ranks(scores_N)
    is_click_N = labels_N.bool()
    clicks, others = int(is_click_N.sum()), int((~is_click_N).sum())
    below = (ranks_N[is_click_N] - _mid_ranks(scores_N[is_click_N])) / others
    above = 1 - (ranks_N[~is_click_N] - _mid_ranks(scores_N[~is_click_N])) / clicks
    return below, above


def _mid_ranks(scores_N: Tensor) -> Tensor:
    """Ranks from 1 on, in float64; equal scores share the mean of theirs."""
    _, place_N, counts = torch.unique(scores_N, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[place_N]


def standard_error(a: Placements, b: Placements | None = None) -> float:
    """DeLong's, of an AUC or of the difference of two on the same rows, from their placements."""
    parts = a if b is None else tuple(x - y for x, y in zip(a, b, strict=True))
    return sum(part.var().item() / len(part) for part in parts) ** 0.5
