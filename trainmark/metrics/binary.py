"""Metrics of yes-or-no predictions: a few at every evaluation, all of them at the end.

`binary_metrics` is cheap and is computed at every evaluation; `assess` at the end of a run and by
`trainmark evaluate`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainmark.metrics import ranking
from trainmark.metrics.ranking import Estimate, GroupAuc, Levels, estimate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from trainmark.metrics.ranking import Placements

BINS = 15  # of the reliability diagram, with equally many rows


def binary_metrics(logits: Tensor, labels: Tensor) -> dict[str, float | None]:
    """AUC, log loss, accuracy and calibration of click predictions.

    Args:
        logits: [N], before the sigmoid, any floating type.
        labels: [N], 0 or 1.
    """
    if logits.numel() == 0:
        return {"auc": None, "log_loss": None, "accuracy": None, "calibration": None}
    labels = labels.bool()
    wide = logits.double()
    click_rate = labels.double().mean()
    calibration = wide.sigmoid().mean() / click_rate
    return {
        "auc": ranking.auc(logits, labels),
        "log_loss": _losses(wide, labels).mean().item(),
        "accuracy": ((logits > 0) == labels).double().mean().item(),
        "calibration": calibration.item() if click_rate > 0 else None,
    }


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    """-[y log p + (1 - y) log(1 - p)] of each row, with p = sigmoid(x)."""
    import torch

    # softplus(x) - x y is the same, without overflow.
    return torch.nn.functional.softplus(logits) - logits * labels.double()


# --- all of it


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Rows of neighbouring predictions."""

    rows: int
    prediction: float
    """The mean of theirs."""
    rate: Estimate
    """The share of positives among them."""


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """How good the predictions for a split are, and how sure that is."""

    rows: int
    positives: int
    auc: Estimate | None
    """None where the split has one class only."""
    log_loss: Estimate
    pr_auc: float | None
    """Average precision: guessing has the share of positives."""
    normalised_entropy: float | None
    """The log loss over that of predicting the share of positives for every row."""
    calibration: Estimate | None
    """The mean prediction over the share of positives."""
    calibration_error: float
    """ECE: mean distance between prediction and share of positives in the bins."""
    bins: list[Bin]
    group_auc: GroupAuc | None = None
    """None without groups, or where none has both classes."""


def assess(logits: Tensor, labels: Tensor, groups: Tensor | None = None) -> Assessment | None:
    """All metrics of a split, computed on the tensors' device; None if it has no rows.

    Args:
        logits: [N], before the sigmoid.
        labels: [N], 0 or 1.
        groups: [N], the number of each row's group.
    """
    rows = len(logits)
    if rows == 0:
        return None
    labels = labels.bool()
    found = ranking.levels(logits, labels)
    losses = _losses(logits.double(), labels)
    log_loss = losses.mean().item()
    bins = _bins(found)
    auc = ranking.auc_of(found)
    entropy = _entropy(found.positives / rows)
    return Assessment(
        rows=rows,
        positives=found.positives,
        auc=None if auc is None else estimate(auc, ranking.auc_error(found), 0.0, 1.0),
        log_loss=estimate(log_loss, _error_of_mean(losses), lowest=0.0),
        pr_auc=ranking.average_precision(found),
        normalised_entropy=log_loss / entropy if entropy else None,
        calibration=_calibration(logits.double().sigmoid_(), labels),
        calibration_error=sum(abs(b.prediction - b.rate.value) * b.rows for b in bins) / rows,
        bins=bins,
        group_auc=None if groups is None else ranking.group_auc(logits, labels, groups),
    )


def _entropy(rate: float) -> float:
    """The log loss of predicting `rate` for every row, if that is the share of positives."""
    return -sum(p * math.log(p) for p in (rate, 1 - rate) if p)


def _error_of_mean(values: Tensor) -> float | None:
    return values.std().item() / math.sqrt(len(values)) if len(values) > 1 else None


def _calibration(predictions: Tensor, labels: Tensor) -> Estimate | None:
    """A ratio of two means, with the error of its linear approximation."""
    rate = labels.double().mean().item()
    if rate == 0:
        return None
    ratio = predictions.mean().item() / rate
    error = _error_of_mean(predictions - ratio * labels)
    return estimate(ratio, None if error is None else error / rate, lowest=0.0)


def _bins(found: Levels) -> list[Bin]:
    """Rows in the order of their predictions, cut into parts that are as equal as ties allow."""
    rows_L = found.positives_L + found.others_L
    middle_L = rows_L.cumsum(0) - rows_L.double() / 2
    bin_L = (middle_L * (BINS / middle_L.new_tensor(found.positives + found.others))).long()
    predictions_L = found.scores_L.double().sigmoid() * rows_L
    sums = [
        column.new_zeros(BINS).index_add_(0, bin_L, column).tolist()
        for column in (rows_L, found.positives_L, predictions_L)
    ]
    return [
        Bin(rows=rows, prediction=predicted / rows, rate=share(positives, rows))
        for rows, positives, predicted in zip(*sums, strict=True)
        if rows
    ]


def share(count: int, rows: int) -> Estimate:
    """A share of rows, with Wilson's interval."""
    z, value = ranking.Z95, count / rows
    middle = (value + z * z / (2 * rows)) / (1 + z * z / rows)
    half = z * math.sqrt(value * (1 - value) / rows + (z / (2 * rows)) ** 2) / (1 + z * z / rows)
    low, high = max(middle - half, 0.0), min(middle + half, 1.0)
    return Estimate(value=value, low=min(low, value), high=max(high, value))


# --- two models on the same rows


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What a second model has more than a first, on the same rows."""

    auc: Estimate | None
    log_loss: Estimate


def difference(logits_a: Tensor, logits_b: Tensor, labels: Tensor) -> Difference:
    """B less A. Rows that are hard for both cancel out, so the intervals are narrow."""
    labels = labels.bool()
    both = (logits_a, logits_b)
    found = [ranking.levels(logits, labels) for logits in both]
    auc_a, auc_b = map(ranking.auc_of, found)
    auc = None
    if auc_a is not None and auc_b is not None:
        a, b = (ranking.row_placements(f, x, labels) for f, x in zip(found, both, strict=True))
        auc = estimate(auc_b - auc_a, ranking.paired_error(a, b), -1.0, 1.0)
    losses = _losses(logits_b.double(), labels) - _losses(logits_a.double(), labels)
    return Difference(auc=auc, log_loss=estimate(losses.mean().item(), _error_of_mean(losses)))


# --- importance


@dataclass(frozen=True, kw_only=True)
class Importance:
    """How much a model relies on a column: what its AUC loses where the column says nothing."""

    column: str
    drop: float
    """How much AUC is lost when the column's values are shuffled; the mean over repeats."""
    error: float | None
    """DeLong's standard error of that mean: how far it would differ on other rows of the kind."""


def importance_of(column: str, usual: Placements, permuted: Sequence[Placements]) -> Importance:
    """From the placements of the rows as they are, and of those with the column permuted."""
    import torch

    positives, others = (torch.stack(part).mean(0) for part in zip(*permuted, strict=True))
    drop = (usual[0].mean() - positives.mean()).item()
    error = ranking.paired_error(usual, (positives, others))
    return Importance(column=column, drop=drop, error=error)
