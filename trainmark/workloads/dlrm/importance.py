"""What each column is worth to a trained model: how much AUC is lost when its values are shuffled.

Shuffled values are as frequent as before, but no longer say anything about their row. All features
that were made from a column (the hour and the weekday of a time) are shuffled together.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from trainmark.clickdata import identity
from trainmark.errors import InputError
from trainmark.metrics.binary import Importance, importance_of
from trainmark.metrics.ranking import Placements, levels, row_placements
from trainmark.progress import rate_bar
from trainmark.workloads.dlrm.data import ClickData, row_source
from trainmark.workloads.dlrm.rows import Columns, RowSource
from trainmark.workloads.dlrm.runs import DlrmRun
from trainmark.workloads.dlrm.step import DlrmTrainer, predict

REPEATS = 5
STRETCHES = 64  # of neighbouring rows, from everywhere in the split: rows may be in order of time


def importance(trainer: DlrmTrainer, split: str, most_rows: int) -> list[Importance]:
    """The importance of every column, the highest first, on at most `most_rows` rows of a split."""
    rows = _some_rows(row_source(trainer.cfg, split), most_rows)
    usual = _placements(trainer, split, rows)
    permutations = [
        np.random.default_rng((trainer.cfg.seed, repeat)).permutation(len(rows.labels))
        for repeat in range(REPEATS)
    ]
    found, inputs = [], list(model_inputs(trainer.cfg))
    with _bar(trainer, len(inputs)) as advance:
        for column in inputs:
            permuted = [_placements(trainer, split, column.permuted(rows, p)) for p in permutations]
            found.append(importance_of(column.name, usual, permuted))
            advance(1)
    return sorted(found, key=lambda column: -column.drop)


def _bar(trainer: DlrmTrainer, total: int) -> AbstractContextManager[Callable[[int], None]]:
    """Progress, shown by the rank that speaks."""
    if trainer.mesh.is_main:
        return rate_bar("importance", total, "M values")
    return nullcontext(lambda done: None)


def _placements(trainer: DlrmTrainer, split: str, rows: Columns) -> Placements:
    """The placements of rows, whose mean is the AUC."""
    mesh = trainer.mesh
    data = ClickData(_InMemory(rows), trainer.cfg, split, mesh.dp_rank, mesh.dp_size)
    predictions = predict(trainer, data)
    found = levels(predictions.logits, predictions.labels)
    if not found.positives or not found.others:
        raise InputError(
            f"There is no AUC on {len(rows.labels):,} rows of {split}: all have the same label. "
            "Give --importance-rows more."
        )
    return row_placements(found, predictions.logits, predictions.labels)


# --- columns


@dataclass
class ModelInputs:
    """What a model is fed of one column that a user knows."""

    name: str
    numerical: list[int] = field(default_factory=list)
    """Numbers of the numerical features."""
    categorical: list[int] = field(default_factory=list)
    """Numbers of the tables."""

    def permuted(self, rows: Columns, order: NDArray[np.int64]) -> Columns:
        """The rows, with the values of this column from others."""
        numerical, ids = rows.numerical, list(rows.ids)
        if self.numerical:
            numerical = numerical.copy()
            numerical[:, self.numerical] = rows.numerical[order][:, self.numerical]
        for number in self.categorical:
            ids[number] = rows.ids[number][order]
        return replace(rows, numerical=numerical, ids=ids)


def model_inputs(cfg: DlrmRun) -> Iterator[ModelInputs]:
    """The inputs of each column, in the order of their first features."""
    model, columns = cfg.model, identity.columns(cfg.dataset)
    if not columns:  # synthetic data
        yield from (ModelInputs(f"num_{i}", numerical=[i]) for i in range(model.numerical_features))
        yield from (ModelInputs(f"cat_{i}", categorical=[i]) for i in range(len(model.table_rows)))
        return
    found: dict[str, ModelInputs] = {}
    for kind in ("numerical", "categorical"):
        of_kind = [column for column in columns if column.kind == kind]
        for number, column in enumerate(of_kind):
            name = identity.source(column, columns)
            getattr(found.setdefault(name, ModelInputs(name)), kind).append(number)
    yield from found.values()


# --- rows


def _some_rows(source: RowSource, most: int) -> Columns:
    """All rows, or stretches of them from everywhere."""
    count = min(source.num_rows, most)
    rows = source.kind.room(count)
    stretches = STRETCHES if count < source.num_rows else 1
    for part in range(stretches):
        begin, end = (count * i // stretches for i in (part, part + 1))
        start = source.num_rows * part // stretches
        source.read(start, start + end - begin, rows.part(slice(begin, end)))
    return rows


class _InMemory:
    """Rows that were read already, as a source."""

    def __init__(self, rows: Columns) -> None:
        self._rows, self.kind = rows, rows.part(slice(0))
        self.num_rows = len(rows.labels)

    def read(self, start: int, stop: int, into: Columns) -> None:
        into.copy_from(self._rows.part(slice(start, stop)))
