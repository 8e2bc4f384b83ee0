"""Two runs' scores for the same rows: by how much they differ, and how sure that is."""

from pathlib import Path

import numpy as np

from trainmark.metrics.binary import Difference, difference
from trainmark.metrics.ranking import Estimate
from trainmark.report.assessments import INTERVAL, UNDEFINED, interval
from trainmark.report.tables import Grid
from trainmark.run.assessment import INPUT, Scores, read_scores, scored_splits


def paired_differences(a: Path, b: Path) -> tuple[Grid, list[str]]:
    """How two runs differ on every split that both have scores for.

    Returns:
        B less A, with 95 % intervals; and why splits are left out.
    """
    of_a, of_b = scored_splits(a), scored_splits(b)
    rows, left_out = [], []
    for split in dict.fromkeys([*of_a, *of_b]):
        if split not in of_a or split not in of_b:
            left_out.append(_no_scores(split, a if split not in of_a else b))
            continue
        first, second = read_scores(a, split), read_scores(b, split)
        if why := other_rows(first, second):
            left_out.append(f"{split} is left out: {why}, so these are not the same rows.")
        else:
            rows += _rows(split, difference_of(first, second))
    headers = ["split", "metric", "B - A", INTERVAL, "differs"]
    return Grid(headers, rows, [False, False, True, False, False]), left_out


def _no_scores(split: str, folder: Path) -> str:
    flag = " --input" if split == INPUT else ""
    return (
        f"{split} is left out: {folder} has no scores for it; trainmark evaluate{flag} writes them "
        "(--keep-scores of the run says of how many rows at most)."
    )


def other_rows(a: Scores, b: Scores) -> str | None:
    """What shows that two runs were not scored on the same rows; None if nothing does."""
    if len(a.labels) != len(b.labels):
        return f"A has {len(a.labels):,} rows there, B {len(b.labels):,}"
    different = int(np.count_nonzero(a.labels != b.labels))
    return f"{different:,} of {len(a.labels):,} labels differ" if different else None


def difference_of(a: Scores, b: Scores, device: str = "cpu") -> Difference:
    """The difference between two runs' scores for the same rows, computed on `device`."""
    import torch

    # What float32 rounds to 0 or 1 would have an infinite loss: it is half a step away from them.
    logits_a, logits_b = (
        torch.from_numpy(of.scores).to(device).double().clamp_(2.0**-150, 1 - 2.0**-25).logit_()
        for of in (a, b)
    )
    return difference(logits_a, logits_b, torch.from_numpy(a.labels).to(device))


def _rows(split: str, found: Difference) -> list[list[str]]:
    estimates = {"auc": found.auc, "log_loss": found.log_loss}
    return [[split, name, *_cells(estimate)] for name, estimate in estimates.items()]


def _cells(found: Estimate | None) -> list[str]:
    if found is None:
        return [UNDEFINED, "", ""]
    if found.low is None or found.high is None:
        return [f"{found.value:+.6f}", interval(found), ""]
    sure = found.low > 0 or found.high < 0
    return [f"{found.value:+.6f}", interval(found, sign="+"), "yes" if sure else "unclear"]
