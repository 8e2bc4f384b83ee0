"""How good predictions are: the cheap metrics of every evaluation, and all of them at the end.

Scores of splits that are not too large (`keep_scores`) are kept in the run's folder, so that
`trainmark compare` can pair them with another run's:

    scores/SPLIT.npy          the probability of every row, float32, in the split's order
    scores/SPLIT.labels.npy   what it was: bool
    scores/SPLIT.json         where they are from
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trainmark import checksums
from trainmark.config import Run
from trainmark.contract import AnyWorkload, Data, Metrics, Predictions, Trainer
from trainmark.errors import InputError
from trainmark.files import NPY_ERRORS, read_json, replacing, write_atomically
from trainmark.metrics.binary import Assessment, Importance, assess, binary_metrics
from trainmark.validation import parse

if TYPE_CHECKING:  # pages are made without torch
    from torch import Tensor

SCORES = "scores"
SCHEMA = "trainmark.scores/1"
INPUT = "input"
"""What raw files are called among the splits."""


def evaluated(
    workload: AnyWorkload, trainer: Trainer[Any, Any], data: Data[Any]
) -> tuple[Metrics, Predictions | None]:
    """Metrics on a split; for yes-or-no labels also the predictions that they come from."""
    if workload.predict is not None:
        predictions = workload.predict(trainer, data)
        return binary_metrics(predictions.logits, predictions.labels), predictions
    if workload.evaluate is not None:
        return workload.evaluate(trainer, data), None
    raise TypeError("A workload has to have `evaluate` or `predict`.")


def assessments(
    cfg: Run, workload: AnyWorkload, predictions: Mapping[str, Predictions]
) -> dict[str, Assessment]:
    """The full assessment of each split, computed on the device that predicted if it has room."""
    found = {}
    for split, made in predictions.items():
        groups = workload.groups(cfg, split)
        if groups is not None and len(groups) != len(made.logits):
            raise InputError(
                f"The groups of {split} in {cfg.data} are of {len(groups):,} rows, but it has "
                f"{len(made.logits):,}. Prepare the data again."
            )
        assessed = _assess(made, groups)
        if assessed is not None:
            found[split] = assessed
    return found


def _assess(made: Predictions, groups: "Tensor | None") -> Assessment | None:
    import torch

    device = made.logits.device
    try:
        return assess(made.logits, made.labels, None if groups is None else groups.to(device))
    except torch.OutOfMemoryError:  # of a device that the model fills
        return assess(made.logits.cpu(), made.labels.cpu(), groups)


# --- what `trainmark evaluate` found out

EVALUATION_FILE = "evaluation.json"


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The part of `evaluation.json` that a page shows. Files of earlier versions have only the
    metrics."""

    step: int
    samples: int
    """How many the checkpoint was trained on."""
    data: str | None
    splits: dict[str, Metrics]
    assessments: dict[str, Assessment] = field(default_factory=dict)
    importance: list[Importance] = field(default_factory=list)


def read_evaluation(folder: Path) -> Evaluated | None:
    """The evaluation in a run's folder; None if there is none."""
    data = read_json(folder / EVALUATION_FILE)
    return parse(Evaluated, data, str(folder / EVALUATION_FILE)) if data else None


# --- scores


@dataclass(frozen=True)
class Scores:
    """A run's scores for a split."""

    scores: NDArray[np.float32]
    labels: NDArray[np.bool_]


def write_scores(
    output: Path,
    predictions: Mapping[str, Predictions],
    *,
    most: int,
    samples: int,
    data: str | None,
) -> None:
    """Keep the scores of each split that is not too large.

    Args:
        output: the run's folder.
        predictions: by split.
        most: splits with more rows are left out.
        samples: how many the model was trained on.
        data: the dataset, or the raw files.
    """
    for split, made in predictions.items():
        if len(made.logits) > most:
            continue
        folder = output / SCORES
        folder.mkdir(exist_ok=True)
        facts = folder / f"{split}.json"
        facts.unlink(missing_ok=True)  # last and first: arrays without it are not read
        _write_array(folder / f"{split}.npy", made.logits.sigmoid().float().cpu().numpy())
        _write_array(folder / f"{split}.labels.npy", made.labels.cpu().numpy())
        told = {"schema": SCHEMA, "rows": len(made.logits), "samples": samples, "data": data}
        arrays = [folder / f"{split}.npy", folder / f"{split}.labels.npy"]
        told["files"] = {path.name: checksums.of_file(path) for path in arrays}
        write_atomically(facts, checksums.dumps(told))


def _write_array(path: Path, array: NDArray[Any]) -> None:
    with replacing(path) as temporary, open(temporary, "xb") as file:
        np.save(file, array)


def scored_splits(output: Path) -> list[str]:
    """The splits that a run's folder has scores for."""
    return sorted(path.stem for path in (output / SCORES).glob("*.json"))


def read_scores(output: Path, split: str) -> Scores:
    """What `write_scores` kept."""
    folder = output / SCORES
    facts = read_json(folder / f"{split}.json")
    checksums.check(folder, listed_in=f"{split}.json")
    try:
        scores, labels = (np.load(folder / f"{split}{end}") for end in (".npy", ".labels.npy"))
    except NPY_ERRORS as error:
        raise InputError(f"The scores in {folder} cannot be read: {error}.") from None
    if not len(scores) == len(labels) == facts.get("rows"):
        raise InputError(
            f"The scores for {split} in {folder} are damaged: {len(scores):,} scores, "
            f"{len(labels):,} labels. `trainmark evaluate` writes them again."
        )
    return Scores(scores, labels)
