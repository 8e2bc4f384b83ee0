"""Why a trained model should not be trusted: an AUC of guessing, or of 1; ids that say nothing."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from trainmark.clickdata import feature_spec
from trainmark.clicklog.engine.summary import MANIFEST, rare_shares, rare_warning
from trainmark.config import SYNTHETIC, filled
from trainmark.contract import Metrics
from trainmark.errors import InputError
from trainmark.metrics import guessing_error
from trainmark.workloads.dlrm.rows import planted_clicks, synthetic_range
from trainmark.workloads.dlrm.runs import TERABYTE, DlrmRun, is_generated

NEAR_GUESSING = 0.01  # above 0.5, however many rows show it
TOO_GOOD = 0.999  # real clicks are never as certain
ERRORS = 2  # standard errors: what guessing exceeds once in forty times
READ_ROWS = 1 << 24


def warnings(cfg: DlrmRun, metrics: Mapping[str, Metrics]) -> list[str]:
    """Sentences on a run with these last metrics of each split."""
    judged = metrics.get(cfg.quality_split, {})
    return _near_guessing(cfg, judged) + _too_good(cfg, judged) + _rare_ids(cfg)


# --- AUC


def _near_guessing(cfg: DlrmRun, metrics: Metrics) -> list[str]:
    if cfg.metric not in metrics or (cfg.data == SYNTHETIC and cfg.synthetic_ids == "uniform"):
        return []  # uniform ids are for speed, and a note says so
    auc = metrics[cfg.metric]
    clicks, others = _counted(cfg)
    if auc is None:
        return _one_label(cfg, clicks, others)
    error = guessing_error(clicks, others) if clicks and others else 0.0
    if auc >= 0.5 + max(ERRORS * error, NEAR_GUESSING):
        return []
    rows = f" ({clicks:,} clicks among {clicks + others:,} rows)" if error else ""
    told = f"The AUC on {cfg.quality_split} is {auc:.4f}"
    if auc < 0.5 - max(ERRORS * error, NEAR_GUESSING):
        return [
            f"{told}: worse than guessing{rows}. Check the label, and whether the held-out "
            "rows are like the training rows; then lower --lr."
        ]
    if ERRORS * error > NEAR_GUESSING:
        told += f", and guessing reaches up to {0.5 + ERRORS * error:.4f} there{rows}"
        return [f"{told}. Hold more rows out to tell, take more or smaller steps, or lower --lr."]
    return [f"{told}: near guessing{rows}. Take more or smaller steps, or lower --lr."]


def _too_good(cfg: DlrmRun, metrics: Metrics) -> list[str]:
    auc = metrics.get("auc")
    if auc is None or auc < TOO_GOOD or is_generated(cfg.data):
        return []
    return [
        f"The AUC on {cfg.quality_split} is {auc:.4f}, better than clicks can be foretold: a "
        "column may tell the label, such as one that is filled in after the click. 'trainmark "
        "evaluate RUN --importance' shows which; leave it out of --columns."
    ]


def _one_label(cfg: DlrmRun, clicks: int, others: int) -> list[str]:
    if bool(clicks) == bool(others):
        return []
    which = "every row" if clicks else "no row"
    return [
        f"The AUC on {cfg.quality_split} is undefined: {which} there is a click, so that nothing "
        "says whether the model is good. Check the label, or hold other rows out."
    ]


def _counted(cfg: DlrmRun) -> tuple[int, int]:
    """Clicks and other rows of the quality split; zeros where the data is gone by now."""
    split = cfg.quality_split
    if cfg.data == TERABYTE:
        return 0, 0  # enough that an AUC above the bound is no accident
    if cfg.data == SYNTHETIC:
        blocks = planted_clicks(cfg).blocks(*synthetic_range(cfg, split))
        counts = [(int(np.count_nonzero(block.labels)), len(block)) for block in blocks]
    else:
        try:
            counts = _counted_in(Path(filled(cfg.data)), split)
        except (InputError, OSError):  # a result is not lost for want of a bound
            return 0, 0
    clicks, rows = (sum(column) for column in zip(*counts, strict=True))
    return clicks, rows - clicks


def _counted_in(folder: Path, split: str) -> list[tuple[int, int]]:
    """(clicks, rows) of each piece of a dataset's label file, in bounded memory."""
    spec = feature_spec.read(feature_spec.path_of(folder, split))
    labels = np.memmap(folder / spec.files(split)[spec.label], np.bool_, mode="r")
    pieces = (labels[start : start + READ_ROWS] for start in range(0, len(labels), READ_ROWS))
    return [(int(np.count_nonzero(piece)), len(piece)) for piece in pieces]


# --- ids


def _rare_ids(cfg: DlrmRun) -> list[str]:
    if is_generated(cfg.data):
        return []
    sentence = rare_warning(rare_shares(Path(filled(cfg.data)) / MANIFEST))
    return [sentence] if sentence else []
