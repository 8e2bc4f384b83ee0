"""How good predictions are, as tables: for `trainmark evaluate` and for the page."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain

from trainmark.contract import Metrics
from trainmark.metrics.binary import Assessment, Importance
from trainmark.metrics.ranking import Estimate
from trainmark.report.tables import Grid

INTERVAL = "95 % interval"
UNDEFINED = "undefined"

Value = Estimate | float | None


# --- tables


def metrics_grid(splits: Mapping[str, Metrics], assessed: Mapping[str, Assessment]) -> Grid:
    """The metrics of each split, with their intervals where there are such."""
    headers, numeric = ["metric"], [False]
    for split in splits:
        headers += [split, INTERVAL] if split in assessed else [split]
        numeric += [True, False] if split in assessed else [True]
    values = {split: _values(found, assessed.get(split)) for split, found in splits.items()}
    rows = []
    for name in dict.fromkeys(name for found in values.values() for name in found):
        cells = [_cells(values[split].get(name), split in assessed) for split in splits]
        rows.append([name, *chain.from_iterable(cells)])
    return Grid(headers, rows, numeric)


def _values(metrics: Metrics, found: Assessment | None) -> dict[str, Value]:
    """All metrics of a split by name, those of every evaluation first."""
    values: dict[str, Value] = dict(metrics)
    if found is not None:
        values |= {"auc": found.auc, "log_loss": found.log_loss, "calibration": found.calibration}
        values["normalised_entropy"] = found.normalised_entropy
        values["pr_auc"] = found.pr_auc
        values["calibration_error"] = found.calibration_error
        if found.group_auc is not None:
            values["group_auc"] = found.group_auc.auc
    return values


def _cells(value: Value, with_interval: bool) -> list[str]:
    exact = value.value if isinstance(value, Estimate) else value
    cell = UNDEFINED if exact is None else f"{exact:.6f}"
    if not with_interval:
        return [cell]
    return [cell, interval(value) if isinstance(value, Estimate) else ""]


def interval(found: Estimate, sign: str = "") -> str:
    """The ends of an interval, with as many digits as its width allows."""
    if found.low is None or found.high is None:
        return "too few rows"
    half = (found.high - found.low) / 2
    digits = min(max(2 - math.ceil(math.log10(half)), 2), 8) if half > 0 else 6
    return f"{found.low:{sign}.{digits}f} to {found.high:{sign}.{digits}f}"


def calibration_grid(found: Assessment) -> Grid:
    """The bins of the reliability diagram."""
    rows = [
        [_share(b.prediction), _share(b.rate.value), interval(b.rate), f"{b.rows:,}"]
        for b in found.bins
    ]
    return Grid(["predicted", "observed", INTERVAL, "rows"], rows, [True, True, False, True])


def _share(value: float) -> str:
    """Two digits at least: predictions of rare clicks are small."""
    return f"{value:.4f}" if value >= 0.001 or value == 0 else f"{value:.1e}"


def importance_grid(columns: Sequence[Importance]) -> Grid:
    rows = [
        [c.column, f"{c.drop:.5f}", "" if c.error is None else f"{c.error:.5f}"] for c in columns
    ]
    return Grid(["column", "AUC lost when shuffled", "standard error"], rows, [False, True, True])


# --- in words


def remarks(split: str, found: Assessment) -> str:
    """A sentence on the rows behind the metrics."""
    text = f"{split}: {found.rows:,} rows, {found.positives:,} of them positive."
    if found.group_auc is not None:
        of = found.group_auc
        text += (
            f" group_auc is of {of.rows:,} rows in {of.groups:,} groups; left out, with one class "
            f"only: {of.groups_left_out:,}."
        )
    return text
