"""Numerical columns between parsing and writing: fitted to training rows, counted, transformed.

The training rows lie in a random order that nothing but the seed decides. The first `SAMPLE_ROWS`
of them are a fair sample, the same for any memory, number of threads and however often a run was
killed; a column is fitted to them, and so to all rows of a smaller log.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import numpy as np

from trainmark.clicklog.arrays import number_choice, number_transforms
from trainmark.clicklog.arrays.number_transforms import Losses
from trainmark.clicklog.arrays.primitives import Array, arrow_array, numpy_array
from trainmark.clicklog.engine import vocabulary_files
from trainmark.clicklog.engine.arrange import Field, Part, TrainRows, in_training_order
from trainmark.clicklog.engine.splits import RowSet
from trainmark.clicklog.engine.store import BlockRecord, Store, describe_numbers
from trainmark.clicklog.engine.vocabulary import Rules
from trainmark.clicklog.sources import number_readings
from trainmark.clicklog.sources.number_readings import NumberReading
from trainmark.clicklog.sources.recipes import RECIPES
from trainmark.clicklog.sources.rows import Number, NumberFacts
from trainmark.errors import InputError

SAMPLE_ROWS = 1_000_000
FIT_BYTES = 80 * SAMPLE_ROWS
"""What fitting a column takes, at most: its sample, and copies that are sorted or transformed."""
BIN_RULES = Rules(recipe=RECIPES["nvidia"], threshold=0)
"""Bins have ids from 1 on; missing numbers have the id 0."""


def bin_name(column: str) -> str:
    """Name of the categorical feature that a column's bins are."""
    return f"{column}.bin"


@dataclass(frozen=True, kw_only=True)
class FittedNumber:
    """A numerical column, and what becomes of it."""

    name: str
    reading: str
    """Never `auto`."""
    parameters: Mapping[str, Any]
    """Of its transform."""
    lower_ends: Sequence[float]
    """Of its bins; none where an earlier dataset has them, or there are no bins."""
    bin_counts: Sequence[int]
    """Rows of each among those that it was fitted to."""
    facts: Mapping[str, Any]
    """For prepare.json."""
    exact_in_float16: bool

    @cached_property
    def read_as(self) -> NumberReading:
        return number_readings.parse(self.reading)

    def features(self) -> int:
        """How many numerical features it gives."""
        return bool(self.read_as.transform) + self.read_as.missing


@dataclass(frozen=True)
class FittedNumbers:
    """All numerical columns of a dataset."""

    columns: Sequence[FittedNumber]

    def to_json(self) -> dict[str, Any]:
        return {"columns": [asdict(column) for column in self.columns]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "FittedNumbers":
        return cls([FittedNumber(**column) for column in data.get("columns", [])])

    @property
    def dtype(self) -> str:
        """Of numerical.bin: float16 where that keeps every number exactly."""
        exact = all(column.exact_in_float16 for column in self.columns)
        return "float16" if exact else "float32"

    def features(self) -> int:
        return sum(column.features() for column in self.columns)

    def with_bins(self) -> list[tuple[int, FittedNumber]]:
        """The columns that have bins, and their numbers."""
        return [(i, column) for i, column in enumerate(self.columns) if column.read_as.bins]

    def check_names(self, categorical: Sequence[str]) -> None:
        """Refuse two categorical features of one name."""
        bins = [bin_name(column.name) for _, column in self.with_bins()]
        for name in bins:
            if name in categorical:
                raise InputError(
                    f"The bins of a numerical column and a categorical column are both {name!r}. "
                    f"Read the number without bins: numerical={name.removesuffix('.bin')}:standard."
                )

    def recorded(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """How the columns were read, for vocabulary.json, with what was chosen and fitted."""
        found = {column.name: column for column in self.columns}

        def of_column(use: Mapping[str, Any]) -> dict[str, Any]:
            column = found.get(use["column"]) if use["role"] == "numerical" else None
            if column is None:
                return dict(use)
            fitted = {"parameters": dict(column.parameters)} if column.parameters else {}
            return {**use, "reading": column.reading, **fitted}

        return {**inputs, "columns": [of_column(use) for use in inputs["columns"]]}


# --- fitting


def fit(store: Store, train: TrainRows, rows: RowSet, number: int, memory: int) -> FittedNumber:
    """Choose and fit what becomes of a column, and count what it loses.

    Args:
        rows: those of all splits.
    """
    column = store.schema.numbers[number]
    sample, in_splits = _sample(store, train, number, memory), _InSplits(store, rows, number)
    present = sample[~np.isnan(sample)]
    reading = _reading(column, present, has_missing=len(present) < len(sample))
    parameters = column.parameters
    if parameters is None:
        parameters = number_transforms.fit(reading.transform or "", present)
    lower_ends = number_transforms.fit_bins(present) if reading.bins else np.empty(0)
    bins = (
        number_transforms.bins(lower_ends, present) - 1 if reading.bins else np.empty(0, np.int64)
    )
    losses, exact = in_splits.scan(reading.transform, parameters)
    whole = added(map(in_splits.facts, store.records))
    median = float(np.quantile(present, 0.5, method="lower")) if len(present) else None
    facts = _shown(str(reading), whole, median, losses)
    return FittedNumber(
        name=column.name,
        reading=str(reading),
        parameters=parameters,
        lower_ends=lower_ends.tolist(),
        bin_counts=np.bincount(bins, minlength=len(lower_ends)).tolist(),
        facts=facts,
        exact_in_float16=exact,
    )


def of_source(store: Store) -> dict[str, dict[str, Any]]:
    """For prepare.json, of columns that the source transforms itself: what its blocks counted."""
    columns = store.schema.transformed
    parts = zip(*(record.numbers for record in store.records), strict=True)
    return {
        column.name: transformed_facts(column, added(part))
        for column, part in zip(columns, parts, strict=True)
    }


def transformed_facts(column: Number, whole: NumberFacts) -> dict[str, Any]:
    """Of one such column. No median: that would take another pass."""
    return _shown(column.reading, whole, None, Losses(became_zero=whole.became_zero))


def added(parts: Iterable[NumberFacts]) -> NumberFacts:
    return reduce(NumberFacts.__add__, parts, NumberFacts(0, None, None))


def _shown(
    reading: str, whole: NumberFacts, median: float | None, losses: Losses
) -> dict[str, Any]:
    return {
        "reading": reading,
        "missing": whole.missing,
        "minimum": whole.minimum,
        "median": median,
        "maximum": whole.maximum,
        **asdict(losses),
    }


def _reading(column: Number, present: Array, *, has_missing: bool) -> NumberReading:
    if column.reading != number_readings.AUTO:
        return number_readings.parse(column.reading)
    return number_readings.parse(number_choice.choose(present, has_missing=has_missing))


def _sample(store: Store, train: TrainRows, number: int, memory: int) -> Array:
    """The numbers of the first training rows, NaN where missing."""
    if not train.records:
        return np.empty(0)
    field = _RawField(store, number)
    most_rows = min(memory // field.row_bytes, SAMPLE_ROWS)
    found: list[Array] = []
    rows = 0
    for bucket in in_training_order(train, field, most_rows):
        found.append(bucket.view(np.float64)[: SAMPLE_ROWS - rows].copy())
        rows += len(found[-1])
        if rows == SAMPLE_ROWS:
            break
    return np.concatenate(found)


class _RawField(Field):
    """A column as it was read."""

    dtype = np.dtype(np.uint64)  # the bits of float64
    row_bytes = 24

    def __init__(self, store: Store, number: int) -> None:
        self._store, self._number = store, number

    def fill(self, out: Array, part: Part) -> None:
        numbers = self._store.number(part.record, self._number, part.start, part.stop)
        out[:] = numbers.view(self.dtype)


class _InSplits:
    """A column's numbers, as far as their rows are in a split."""

    def __init__(self, store: Store, rows: RowSet, number: int) -> None:
        self._store, self._rows, self._number = store, rows, number

    def facts(self, record: BlockRecord) -> NumberFacts:
        """What is known of those of a block."""
        if self._rows.has_all(record):
            return record.numbers[self._number]
        return describe_numbers(self._numbers(record))

    def _numbers(self, record: BlockRecord) -> Array:
        numbers = self._store.number(record, self._number, 0, record.rows)
        if self._rows.has_all(record):
            return numbers
        return numbers[self._rows.mask(record)[self._store.order(record)]]

    def scan(self, transform: str | None, parameters: Mapping[str, Any]) -> tuple[Losses, bool]:
        """What is lost, and whether float16 keeps every number."""
        losses, exact = Losses(), transform in (None, "plain")
        if not transform:
            return losses, exact
        for record in self._store.records:
            part = self.facts(record)
            if part.minimum is None or part.maximum is None:
                continue
            if number_transforms.may_lose(transform, parameters, part.minimum, part.maximum):
                numbers = self._numbers(record)
                present = numbers[~np.isnan(numbers)]
                losses += number_transforms.losses(transform, parameters, present)
                exact = exact and number_transforms.exact_in_float16(present)
        return losses, exact


# --- what becomes of a column


def features_of(reading: NumberReading, parameters: Mapping[str, Any], numbers: Array) -> list[Any]:
    """The numerical features of a column's numbers, NaN where missing."""
    found = []
    if reading.transform:
        found.append(number_transforms.apply(reading.transform, parameters, numbers))
    if reading.missing:
        found.append(np.isnan(numbers).astype(np.float64))
    return found


# --- bins, which have a vocabulary as other categorical features do


def write_bins(column: FittedNumber, path: Path) -> None:
    """The vocabulary of a column's bins: their lower ends, with ids that rise."""
    import pyarrow as pa

    with vocabulary_files.Writer(path, pa.float64()) as writer:
        ids = np.arange(1, len(column.lower_ends) + 1, dtype=np.int32)
        values = np.asarray(column.lower_ends, np.float64)
        counts = np.asarray(column.bin_counts, np.int64)
        writer.write(arrow_array(values), arrow_array(ids), arrow_array(counts))


def read_bins(path: Path) -> Array:
    """The lower ends of a column's bins."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        values = pq.ParquetFile(path).read(columns=["value"])["value"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path} cannot be read as a vocabulary: {error}.") from None
    if not pa.types.is_float64(values.type):
        raise InputError(f"{path} has values of {values.type}; bins of numbers are expected.")
    return numpy_array(values)
