"""Vocabularies: which categorical values have an id, and which one. Built, written and read.

A vocabulary is a Parquet file with the columns value, id and count, by rising value. The number 0
of a column is among the values if it is one; the missing value is not.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainmark.clicklog.arrays import counting, primitives
from trainmark.clicklog.arrays.counting import Counts
from trainmark.clicklog.arrays.primitives import NO_KEYS, Array, IdLookup
from trainmark.clicklog.engine.column_reader import ColumnReader, arrow_array, numpy_array
from trainmark.clicklog.sources.recipes import Recipe
from trainmark.clicklog.sources.rows import Kind
from trainmark.errors import InputError

BYTES_PER_ENTRY = {4: 40, 8: 72}
"""Memory that an entry takes at the worst moment of counting, by the size of a number."""
LARGE_COUNT = 1 << 16
"""Counts from here on are rare enough to be handled one by one."""
WINDOW_ROWS = 1 << 24
GROUP_ROWS = 1 << 20
"""Entries of a row group in the file."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How a column's values get ids."""

    recipe: Recipe
    threshold: int
    """Values that occur less often are rare."""
    max_rows: int | None = None
    """Ids (or values, as the recipe says) are folded into this many by modulo."""

    def fold(self, ids: NDArray[np.int64]) -> NDArray[np.int32]:
        """Final ids."""
        if self.max_rows and not self.recipe.folds_values:
            ids = ids % self.max_rows
        return ids.astype(np.int32)

    @property
    def rare_id(self) -> int:
        return int(self.fold(np.array([self.recipe.rare_id]))[0])

    @property
    def value_modulus(self) -> int | None:
        return self.max_rows if self.recipe.folds_values else None

    def cardinality(self, kept: int) -> int:
        """Number of ids of a vocabulary of `kept` values; all ids are below it."""
        cardinality = max(kept + self.recipe.first_id, self.recipe.rare_id + 1)
        if self.max_rows and not self.recipe.folds_values:
            return min(cardinality, self.max_rows)
        return cardinality


@dataclass(frozen=True)
class Sizes:
    """What is worth knowing of a vocabulary."""

    distinct: int
    """Values that occur."""
    kept: int
    """Values that have an id of their own."""


def build(reader: ColumnReader, rules: Rules, stop_row: int, memory: int, path: Path) -> Sizes:
    """Count a column's values up to `stop_row` and write its vocabulary.

    Args:
        memory: bytes that may be used, roughly.
        path: the file to write. Parts that do not fit in memory wait beside it.
    """
    limit = memory // BYTES_PER_ENTRY[reader.dtype.itemsize]
    keyed = rules.recipe.order == "appearance"
    parts = _Parts(path)
    zero = _count_zeros(reader, rules, stop_row)
    low = 1
    while True:
        counter = counting.counter(reader.dtype, low, limit, keyed)
        for record in reader.records(stop_row):
            counter.add(*reader.occurrences(record, stop_row, keyed))
        parts.add(counter.result(rules.threshold))
        if counter.high == np.iinfo(reader.dtype).max:
            break
        low = counter.high + 1
    if zero is not None:
        parts.add_zero(zero, rules.threshold)
    with Writer(path, reader.arrow_type()) as writer:
        number = _by_appearance if keyed else _by_count
        for part, ids in number(parts, rules.recipe.first_id):
            folded, counts = arrow_array(rules.fold(ids)), arrow_array(part.counts)
            writer.write(reader.to_arrow(part.values), folded, counts)
    parts.remove()
    return Sizes(parts.distinct, parts.kept)


def _count_zeros(reader: ColumnReader, rules: Rules, stop_row: int) -> Counts | None:
    """The number 0, which the store keeps apart; None if there is none."""
    count, first = reader.zeros_and_first(stop_row, rules.recipe.missing_is_zero)
    if not count:
        return None
    firsts = np.array([first]) if rules.recipe.order == "appearance" else NO_KEYS
    return Counts(np.zeros(1, reader.dtype), np.array([count]), firsts, 1)


class _Parts:
    """Counts of ranges of values; on disk if there are several ranges."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._in_memory: list[Counts] = []
        self._files: list[Path] = []
        self.distinct = self.kept = 0

    def add(self, part: Counts) -> None:
        self.distinct += part.distinct
        self.kept += len(part)
        if self._in_memory and len(self._in_memory[-1]):
            self._spill(self._in_memory.pop())
        self._in_memory = [part]

    def add_zero(self, zero: Counts, threshold: int) -> None:
        self.distinct += 1
        if zero.counts[0] >= threshold:
            self.kept += 1
            self._spill(zero, first=True)

    def _spill(self, part: Counts, first: bool = False) -> None:
        path = self._path.with_suffix(f".{len(self._files)}.npz")
        np.savez(path, values=part.values, counts=part.counts, firsts=part.firsts)
        self._files.insert(0 if first else len(self._files), path)

    def __iter__(self) -> Iterator[Counts]:
        """By rising values."""
        for path in self._files:
            with np.load(path) as arrays:
                yield Counts(arrays["values"], arrays["counts"], arrays["firsts"])
        yield from self._in_memory

    def remove(self) -> None:
        for path in self._files:
            path.unlink()
        self._in_memory = []


Numbered = Iterator[tuple[Counts, NDArray[np.int64]]]


def _by_count(parts: _Parts, first_id: int) -> Numbered:
    """Ids by falling count, then by rising value."""
    small = np.zeros(LARGE_COUNT, np.int64)
    large: list[tuple[int, int]] = []
    for part in parts:
        is_large = part.counts >= LARGE_COUNT
        small += np.bincount(part.counts[~is_large], minlength=LARGE_COUNT)
        pairs = zip(part.counts[is_large].tolist(), part.values[is_large].tolist(), strict=True)
        large += [(-count, value) for count, value in pairs]
    large_ids = {value: first_id + rank for rank, (_, value) in enumerate(sorted(large))}
    # The first id of each count: behind those of all larger counts.
    next_id = first_id + len(large) + np.cumsum(small[::-1])[::-1] - small
    for part in parts:
        is_large = part.counts >= LARGE_COUNT
        ids = np.empty(len(part), np.int64)
        ids[~is_large] = primitives.number_in_turn(part.counts[~is_large], next_id)
        ids[is_large] = [large_ids[value] for value in part.values[is_large].tolist()]
        yield part, ids


def _by_appearance(parts: _Parts, first_id: int) -> Numbered:
    """Ids by first appearance: its rank among all first appearances."""
    rows = 1 + max((int(part.firsts.max()) for part in parts if len(part)), default=0)
    # How many values appear first before each window of rows.
    before = np.zeros(rows // WINDOW_ROWS + 2, np.int64)
    for part in parts:
        before[1:] += np.bincount(part.firsts // WINDOW_ROWS, minlength=len(before) - 1)
    before = first_id + np.cumsum(before)
    for part in parts:
        ids = np.empty(len(part), np.int64)
        for window in np.unique(part.firsts // WINDOW_ROWS).tolist():
            start = window * WINDOW_ROWS
            appears = np.zeros(min(WINDOW_ROWS, rows - start), np.int64)
            for other in parts:
                appears[_within(other.firsts, start) - start] = 1
            ranks = np.cumsum(appears, out=appears) - 1
            inside = (part.firsts >= start) & (part.firsts < start + WINDOW_ROWS)
            ids[inside] = before[window] + ranks[part.firsts[inside] - start]
        yield part, ids


def _within(firsts: Array, start: int) -> Array:
    return firsts[(firsts >= start) & (firsts < start + WINDOW_ROWS)]


# --- files


class Writer:
    """Writes a vocabulary. Its bytes do not depend on how the entries come in pieces.

    Args:
        path: the file.
        value_type: Arrow's type of the values.
    """

    def __init__(self, path: Path, value_type: Any) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        fields = [("value", value_type), ("id", pa.int32()), ("count", pa.int64())]
        self._schema = pa.schema(fields)
        self._waiting: list[Any] = []
        self._file = pq.ParquetWriter(
            path, self._schema, compression="none", use_dictionary=False, write_statistics=False
        )

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *exception: object) -> None:
        self._write(sum(map(len, self._waiting)))
        self._file.close()

    def write(self, values: Any, ids: Any, counts: Any) -> None:
        """Add entries, by rising value: arrays of Arrow's."""
        import pyarrow as pa

        self._waiting.append(pa.Table.from_arrays([values, ids, counts], schema=self._schema))
        self._write(sum(map(len, self._waiting)) // GROUP_ROWS * GROUP_ROWS)

    def _write(self, rows: int) -> None:
        import pyarrow as pa

        if rows:
            waiting = pa.concat_tables(self._waiting)
            ready = waiting.slice(0, rows).combine_chunks()
            self._file.write_table(ready, row_group_size=GROUP_ROWS)
            self._waiting = [waiting.slice(rows)]


class Numbering(Protocol):
    """How the values of a column become the store's numbers, which rise as they do."""

    kind: Kind
    dtype: Any

    def from_arrow(self, values: Any) -> Array: ...


class Vocabulary:
    """A vocabulary on disk, for mapping values to ids.

    Args:
        path: its file.
        reader: the column to map.
        memory: bytes that lookup tables may take.
    """

    def __init__(self, path: Path, reader: Numbering, memory: int) -> None:
        self._path, self._reader = path, reader
        self._limit = max(memory // (6 * reader.dtype.itemsize), 16)
        self._only: IdLookup | None = None

    def zero_id(self) -> int | None:
        """The id of the number 0, if it has one. No string has the number 0."""
        if self._reader.kind == "string":
            return None
        for values, ids in self._batches(1):
            return int(ids[0]) if len(values) and values[0] == 0 else None
        return None

    def lookups(self) -> Iterator[IdLookup]:
        """One after the other: tables that know all values together."""
        if self._only is not None:
            yield self._only
            return
        lookup = None
        count = 0
        for values, ids in self._batches(self._limit):
            count += 1
            known = values != 0
            del lookup
            lookup = IdLookup(values[known], ids[known])
            yield lookup
        if count <= 1:
            self._only = lookup or IdLookup(np.empty(0, self._reader.dtype), np.empty(0, np.int32))
            if not count:
                yield self._only

    def _batches(self, size: int) -> Iterator[tuple[Array, NDArray[np.int32]]]:
        import pyarrow.parquet as pq

        with pq.ParquetFile(self._path) as file:
            if file.metadata.num_rows <= size:
                table = file.read(["value", "id"], use_threads=False)
                yield self._numbers(table.column(0)), numpy_array(table.column(1))
                return
            for batch in file.iter_batches(size, columns=["value", "id"], use_threads=False):
                yield self._numbers(batch.column(0)), numpy_array(batch.column(1))

    def _numbers(self, values: Any) -> Array:
        return self._reader.from_arrow(values)


UNKNOWN = -1
"""No id."""


@dataclass(frozen=True)
class SpecialIds:
    """The ids of what is not looked up."""

    rare: int
    """Of a value that the vocabulary does not know."""
    zero: int
    """Of the number 0; `UNKNOWN` where it is no known value."""
    missing: int

    @classmethod
    def of(cls, vocabulary: Vocabulary, rules: Rules) -> "SpecialIds":
        found = vocabulary.zero_id()
        zero = UNKNOWN if found is None else found
        missing = zero if rules.recipe.missing_is_zero else rules.rare_id
        return cls(rules.rare_id, zero, missing)


def read_sizes(path: Path) -> Sizes:
    """Sizes of a vocabulary that was built earlier; all its values count as distinct."""
    import pyarrow.parquet as pq

    try:
        rows = pq.read_metadata(path).num_rows
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as a vocabulary: {error}.") from None
    return Sizes(rows, rows)
