"""How well scores order two classes. Rows are sorted once, and counted per distinct score (a
level): how many positives and how many others have it. All metrics follow from these counts.

L: levels of scores, N: rows, P: positives, O: others, G: groups
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Z95 = 1.959963984540054  # standard errors on either side of a 95 % interval


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number, and where it would lie with other rows of the same kind: its 95 % interval."""

    value: float
    low: float | None = None
    """None where there are too few rows to tell."""
    high: float | None = None


def estimate(
    value: float, error: float | None, lowest: float = -math.inf, highest: float = math.inf
) -> Estimate:
    """The interval of a number that is nearly normal, within what is possible."""
    if error is None:
        return Estimate(value=value)
    low, high = value - Z95 * error, value + Z95 * error
    return Estimate(value=value, low=max(low, lowest), high=min(high, highest))


# --- levels


@dataclass(frozen=True)
class Levels:
    """The distinct scores in rising order, and how many rows of either class have each."""

    scores_L: Tensor
    positives_L: Tensor
    others_L: Tensor

    @cached_property
    def positives(self) -> int:
        return int(self.positives_L.sum())

    @cached_property
    def others(self) -> int:
        return int(self.others_L.sum())


def levels(scores_N: Tensor, labels_N: Tensor) -> Levels:
    """Sort and count the rows, on the tensors' device."""
    ordered, order = scores_N.sort()
    distinct, rows_L = ordered.unique_consecutive(return_counts=True)
    upto_L = labels_N.bool()[order].long().cumsum(0)[rows_L.cumsum(0) - 1]
    positives_L = upto_L.diff(prepend=upto_L.new_zeros(1))
    return Levels(distinct, positives_L, rows_L - positives_L)


# --- AUC


def auc(scores: Tensor, labels: Tensor) -> float | None:
    """Exact area under the ROC curve, on the tensors' device.

    None if there is one class only, or if a score is NaN, which is neither above nor below others.

    It is the chance that a random click scores above a random non-click, ties counting half.
    Counted in integers (in half pairs), so that no rounding depends on the order of samples.
    """
    return None if scores.isnan().any() else auc_of(levels(scores, labels))


def auc_of(found: Levels) -> float | None:
    """The AUC from counts."""
    if not found.positives or not found.others:
        return None
    below_L = found.others_L.cumsum(0) - found.others_L
    half_pairs = int((found.positives_L * (2 * below_L + found.others_L)).sum())
    return half_pairs / (2 * found.positives * found.others)


Placements = tuple["Tensor", "Tensor"]
"""Where positives lie among the others, and others among the positives. The mean of either is the
AUC; their variance tells how much the AUC would vary with other rows."""


def placements(found: Levels) -> Placements:
    """For each level, the share of others below a positive of that level, and the share of
    positives above an other of that level."""
    twice_below_L = 2 * found.others_L.cumsum(0) - found.others_L
    twice_below_or_equal_L = 2 * found.positives_L.cumsum(0) - found.positives_L
    below_L = twice_below_L.double() / (2 * found.others)
    return below_L, 1 - twice_below_or_equal_L.double() / (2 * found.positives)


def row_placements(found: Levels, scores_N: Tensor, labels_N: Tensor) -> Placements:
    """The placement of every positive and of every other, in the order of the rows."""
    import torch

    below_L, above_L = placements(found)
    level_N = torch.searchsorted(found.scores_L, scores_N.contiguous())
    is_positive_N = labels_N.bool()
    return below_L[level_N[is_positive_N]], above_L[level_N[~is_positive_N]]


def auc_error(found: Levels) -> float | None:
    """DeLong's standard error of an AUC; None with fewer than two rows of a class, or where scores
    part the classes without fault: other rows may overlap, and these do not say how far."""
    if min(found.positives, found.others) < 2:
        return None
    below_L, above_L = placements(found)
    error = math.sqrt(
        _variance_of_mean(below_L, found.positives_L) + _variance_of_mean(above_L, found.others_L)
    )
    return None if error == 0 and len(found.scores_L) > 1 else error


def paired_error(a: Placements, b: Placements) -> float | None:
    """DeLong's standard error of the difference of two AUCs, from the placements of all rows."""
    if min(map(len, a)) < 2:
        return None
    differences = [x - y for x, y in zip(a, b, strict=True)]
    return math.sqrt(sum(_variance_of_mean(d, d.new_ones(len(d))) for d in differences))


def _variance_of_mean(values: Tensor, counts: Tensor) -> float:
    """The variance of the mean of values that occur `counts` times each."""
    rows = counts.sum().item()
    mean = (values * counts).sum() / rows
    spread = (values - mean).square_().mul_(counts).sum().item()
    return spread / ((rows - 1) * rows)


# --- precision and recall


def average_precision(found: Levels) -> float | None:
    """The area under the precision-recall curve, in steps: each positive's precision, averaged.

    The precision of a level is the share of positives among the rows that score as high or higher.
    """
    if not found.positives:
        return None
    rows_L = found.positives_L + found.others_L
    positives_above_L = found.positives_L.flip(0).cumsum(0)
    precision_L = positives_above_L.double() / rows_L.flip(0).cumsum(0)
    return ((precision_L * found.positives_L.flip(0)).sum() / found.positives).item()


# --- within groups


@dataclass(frozen=True, kw_only=True)
class GroupAuc:
    """The mean AUC within groups of rows, such as a user's, each weighted by its rows."""

    auc: Estimate
    groups: int
    """Groups that have rows of both classes."""
    rows: int
    """Rows in these groups."""
    groups_left_out: int
    """Groups of one class only, which have no AUC."""


def group_auc(scores_N: Tensor, labels_N: Tensor, groups_N: Tensor) -> GroupAuc | None:
    """None where no group has both classes.

    The interval takes the groups, not the rows, as what was drawn at random.
    """
    names, groups_N = groups_N.unique(return_inverse=True)
    order = scores_N.argsort()
    order = order[groups_N[order].argsort(stable=True)]
    scores_N, labels_N, groups_N = scores_N[order], labels_N.bool()[order], groups_N[order]
    begins_N = scores_N.new_ones(len(scores_N)).bool()  # a level, within its group
    begins_N[1:] = (scores_N.diff() != 0) | (groups_N.diff() != 0)
    level_N, group_L = begins_N.long().cumsum(0) - 1, groups_N[begins_N]
    positives_L = _sums(labels_N.long(), level_N, len(group_L))
    others_L = level_N.bincount() - positives_L

    positives_G = _sums(positives_L, group_L, len(names))
    others_G = _sums(others_L, group_L, len(names))
    before_G = others_G.cumsum(0) - others_G
    below_L = others_L.cumsum(0) - others_L - before_G[group_L]
    half_pairs_G = _sums(positives_L * (2 * below_L + others_L), group_L, len(names))
    both_G = (positives_G > 0) & (others_G > 0)
    if not both_G.any():
        return None
    positives_G, others_G = positives_G[both_G], others_G[both_G]
    auc_G = half_pairs_G[both_G].double() / (2 * positives_G * others_G)
    rows_G = (positives_G + others_G).double()
    rows, groups = rows_G.sum().item(), len(rows_G)
    value = (auc_G * rows_G).sum().item() / rows
    spread = (rows_G * (auc_G - value)).square().sum().item()
    error = math.sqrt(spread * groups / (groups - 1)) / rows if groups > 1 else None
    return GroupAuc(
        auc=estimate(value, error, lowest=0.0, highest=1.0),
        groups=groups,
        rows=int(rows),
        groups_left_out=len(names) - groups,
    )


def _sums(values: Tensor, places: Tensor, size: int) -> Tensor:
    """The sum of the values that go to each place."""
    return values.new_zeros(size).index_add_(0, places, values)
