"""The ids of a column's values, from its vocabulary: for rows that come one request at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from trainmark.clicklog.arrays import number_transforms
from trainmark.clicklog.arrays.primitives import UNKNOWN, Array, numpy_array
from trainmark.clicklog.engine import store
from trainmark.clicklog.engine.numbers import read_bins
from trainmark.clicklog.engine.vocabulary import Rules, SpecialIds, Vocabulary
from trainmark.clicklog.engine.vocabulary_files import num_kept, of_values
from trainmark.clicklog.sources.rows import Column, Kind, Values

ALL_IN_MEMORY = 1 << 62


@dataclass(frozen=True)
class ColumnIds:
    """Maps values to ids; safe in several threads."""

    look_up: Callable[[Any], NDArray[np.int64]]
    """Ids of `Values`, of Arrow's strings with nulls, or of the numbers of bins."""
    most_frequent: int | float | str | None
    """The value that occurred most often; None if none was kept."""


def open_column(path: Path, kind: Kind, rules: Rules) -> ColumnIds:
    """Read a vocabulary into memory."""
    num_kept(path)  # which says so if it is no vocabulary
    table = pq.ParquetFile(path).read(columns=["value", "id", "count"])  # without a dataset
    most_frequent = None
    values = of_values(table)
    if len(values):
        place = int(np.argmax(numpy_array(values["count"])))
        most_frequent = values["value"][place].as_py()
    if kind == "string":
        return ColumnIds(_of_strings(table, rules), most_frequent)
    return ColumnIds(_of_numbers(path, Column(path.stem, kind), rules), most_frequent)


def open_bins(path: Path) -> ColumnIds:
    """Read the bins of a numerical column. They are looked up by numbers, NaN where missing."""
    return ColumnIds(partial(number_transforms.bins, read_bins(path)), None)


def _of_strings(table: pa.Table, rules: Rules) -> Callable[[Any], NDArray[np.int64]]:
    """A string that is not known has the rare id; so has a missing one that is no value, a None."""
    ids = dict(zip(table["value"].to_pylist(), table["id"].to_pylist(), strict=True))
    rare = rules.rare_id

    def look_up(strings: pa.Array) -> NDArray[np.int64]:
        return np.array([ids.get(string, rare) for string in strings.to_pylist()], np.int64)

    return look_up


def _of_numbers(path: Path, column: Column, rules: Rules) -> Callable[[Any], NDArray[np.int64]]:
    """As `fields.CategoricalField` does it for a whole file."""
    vocabulary = Vocabulary(path, _Numbers(column), ALL_IN_MEMORY)
    (known,) = vocabulary.lookups()
    special = SpecialIds.of(vocabulary, rules)
    modulus = rules.value_modulus

    def look_up(values: Values) -> NDArray[np.int64]:
        numbers, zeros = store.split_zeros(column, values)
        if modulus:
            numbers = numbers % numbers.dtype.type(modulus)
        ids = np.empty(len(numbers), np.int64)
        known(numbers, ids, special.missing)
        if special.zero != special.missing:
            ids[zeros] = special.zero
        ids[ids == UNKNOWN] = special.rare
        return ids

    return look_up


class _Numbers:
    """A column without rows, for a vocabulary to read itself with."""

    def __init__(self, column: Column) -> None:
        self.kind, self.dtype = column.kind, store.dtype_of(column)

    def from_arrow(self, values: Any) -> Array:
        return store.encode(self.kind, numpy_array(values))
