"""Vocabularies: which categorical values have an id, and which one. Built, extended and looked up.

Their files (vocabulary_files.py) hold value, id and count. The number 0 of a column is among the
values if it is one; the missing value is one where the recipe says so.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainmark.clicklog.arrays import counting, primitives
from trainmark.clicklog.arrays.counting import Counts
from trainmark.clicklog.arrays.primitives import (
    NO_KEYS,
    UNKNOWN,
    Array,
    IdLookup,
    arrow_array,
    numpy_array,
)
from trainmark.clicklog.engine.column_reader import ColumnReader
from trainmark.clicklog.engine.splits import RowSet
from trainmark.clicklog.engine.vocabulary_files import (
    Entries,
    MissingEntry,
    Writer,
    merged,
    num_kept,
    of_values,
    read,
    read_missing,
)
from trainmark.clicklog.sources.recipes import Recipe
from trainmark.clicklog.sources.rows import Kind

BYTES_PER_ENTRY = {4: 40, 8: 72}
"""Memory that an entry takes at the worst moment of counting, by the size of a number."""
LARGE_COUNT = 1 << 16
"""Counts from here on are rare enough to be handled one by one."""
WINDOW_ROWS = 1 << 24


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
class Spilled:
    """Counts of a range of values in a file: plain arrays, one behind the other."""

    path: Path
    dtype: str
    kept: int
    distinct: int
    keyed: bool

    @classmethod
    def write(cls, counts: Counts, path: Path) -> "Spilled":
        with path.open("wb") as file:
            for array in counts.arrays:
                file.write(array.data)
        kind, keyed = counts.values.dtype.str, len(counts.firsts) > 0
        return cls(path, kind, len(counts), counts.distinct, keyed)

    def read(self) -> Counts:
        with self.path.open("rb") as file:
            values = np.fromfile(file, self.dtype, self.kept)
            counts = np.fromfile(file, np.int64, self.kept)
            firsts = np.fromfile(file, np.int64, self.kept * self.keyed)
        return Counts(values, counts, firsts, self.distinct)


def ranges(reader: ColumnReader, rows: RowSet, count: int) -> list[tuple[int, int]]:
    """All values in so many ranges, or fewer, of about as many values each.

    Judged by one block: they decide nothing but which process counts what.
    """
    last = int(np.iinfo(reader.dtype).max)
    record = next(reader.records(rows), None)
    if count == 1 or record is None:
        return [(1, last)]
    seen = np.unique(reader.numbers(record, 0, record.rows))
    places = [len(seen) * number // count for number in range(1, count)]
    bounds = [*sorted({1, *seen[places].tolist()} - {0}), last + 1]
    return [(low, after - 1) for low, after in itertools.pairwise(bounds)]


def count(
    readers: Sequence[ColumnReader],
    rules: Rules,
    rows: RowSet,
    memory: int,
    spill: Path,
    within: tuple[int, int],
    old: Path | None = None,
) -> list[Spilled]:
    """Count a column's values of a range into files: one, if memory suffices.

    Args:
        readers: of the column; of one of lists, of every place in them.
        rows: those that count.
        memory: bytes that may be used, roughly.
        spill: name for these files, to which a number is added.
        old: a vocabulary whose values need not be counted.
    """
    reader = readers[0]
    limit = memory // BYTES_PER_ENTRY[reader.dtype.itemsize]
    keyed = rules.recipe.order == "appearance"
    known = Vocabulary(old, reader, memory // 4) if old else None
    found = []
    low, high = within
    while low <= high:
        counter = counting.counter(reader.dtype, (low, high), limit, keyed)
        for one in readers:
            for record in one.records(rows):
                counter.add(*one.occurrences(record, rows, keyed))
        counts = counter.result(rules.threshold)
        path = spill.with_name(f"{spill.name}.{low}.counts")
        found.append(Spilled.write(known.without(counts) if known else counts, path))
        low = counter.high + 1
    return found


def build(
    readers: Sequence[ColumnReader],
    rules: Rules,
    rows: RowSet,
    parts: Sequence[Spilled],
    path: Path,
    missing: int,
    old: Path | None = None,
) -> int:
    """Write a column's vocabulary; how many values occur, or, of one that was extended, are kept.

    Args:
        readers, rows: as for `count`.
        parts: what it has counted, by rising values; the files are removed.
        path: the file to write.
        missing: how many of the rows have none of its values; 0: it shall not be a value.
        old: a vocabulary to extend: its values keep their ids, and new ones follow.
    """
    reader, parts = readers[0], list(parts)
    zero = _count_zeros(readers, rules, rows)
    if zero is not None and (old is None or Vocabulary(old, reader, 0).zero_id() is None):
        enough = zero.counts[0] >= rules.threshold
        zero = zero if enough else zero.keep(np.zeros(1, bool))
        zero = replace(zero, distinct=1)
        parts.insert(0, Spilled.write(zero, path.with_suffix(".zero.counts")))
    first_id = rules.recipe.first_id + (num_kept(old) if old else 0)
    number = _by_appearance if rules.recipe.order == "appearance" else _by_count

    def counted() -> Iterator[Entries]:
        for part, ids in number(parts, first_id):
            folded, counts = arrow_array(rules.fold(ids)), arrow_array(part.counts)
            yield reader.to_arrow(part.values), folded, counts

    kept = sum(part.kept for part in parts)
    nothing = read_missing(old) if old else None
    if nothing is None and missing >= max(rules.threshold, 1):
        # Behind all values: it has no place among them.
        nothing = MissingEntry(int(rules.fold(np.array([first_id + kept]))[0]), missing)
    with Writer(path, reader.arrow_type()) as writer:
        if nothing is not None:
            writer.write_missing(nothing)
        for entries in merged(read(old), counted()) if old else counted():
            writer.write(*entries)
    for part in parts:
        part.path.unlink()
    return num_kept(path) if old else sum(part.distinct for part in parts) + bool(missing)


def _count_zeros(readers: Sequence[ColumnReader], rules: Rules, rows: RowSet) -> Counts | None:
    """The number 0, which the store keeps apart; None if there is none."""
    found = [reader.zeros_and_first(rows, rules.recipe.missing_is_zero) for reader in readers]
    counted = [(count, first) for count, first in found if count]
    if not counted:
        return None
    first = min(first for _, first in counted)
    firsts = np.array([first]) if rules.recipe.order == "appearance" else NO_KEYS
    count = sum(count for count, _ in counted)
    return Counts(np.zeros(1, readers[0].dtype), np.array([count]), firsts, 1)


def _read(parts: Sequence[Spilled]) -> Iterator[Counts]:
    """By rising values."""
    return (part.read() for part in parts)


Numbered = Iterator[tuple[Counts, NDArray[np.int64]]]


def _by_count(parts: Sequence[Spilled], first_id: int) -> Numbered:
    """Ids by falling count, then by rising value."""
    small = np.zeros(LARGE_COUNT, np.int64)
    large: list[tuple[int, int]] = []
    for part in _read(parts):
        is_large = part.counts >= LARGE_COUNT
        small += np.bincount(part.counts[~is_large], minlength=LARGE_COUNT)
        pairs = zip(part.counts[is_large].tolist(), part.values[is_large].tolist(), strict=True)
        large += [(-count, value) for count, value in pairs]
    large_ids = {value: first_id + rank for rank, (_, value) in enumerate(sorted(large))}
    # The first id of each count: behind those of all larger counts.
    next_id = first_id + len(large) + np.cumsum(small[::-1])[::-1] - small
    for part in _read(parts):
        is_large = part.counts >= LARGE_COUNT
        ids = np.empty(len(part), np.int64)
        ids[~is_large] = primitives.number_in_turn(part.counts[~is_large], next_id)
        ids[is_large] = [large_ids[value] for value in part.values[is_large].tolist()]
        yield part, ids


def _by_appearance(parts: Sequence[Spilled], first_id: int) -> Numbered:
    """Ids by first appearance: its rank among all first appearances."""
    rows = 1 + max((int(part.firsts.max()) for part in _read(parts) if len(part)), default=0)
    # How many values appear first before each window of rows.
    before = np.zeros(rows // WINDOW_ROWS + 2, np.int64)
    for part in _read(parts):
        before[1:] += np.bincount(part.firsts // WINDOW_ROWS, minlength=len(before) - 1)
    before = first_id + np.cumsum(before)
    for part in _read(parts):
        ids = np.empty(len(part), np.int64)
        for window in np.unique(part.firsts // WINDOW_ROWS).tolist():
            start = window * WINDOW_ROWS
            appears = np.zeros(min(WINDOW_ROWS, rows - start), np.int64)
            for other in _read(parts):
                appears[_within(other.firsts, start) - start] = 1
            ranks = np.cumsum(appears, out=appears) - 1
            inside = (part.firsts >= start) & (part.firsts < start + WINDOW_ROWS)
            ids[inside] = before[window] + ranks[part.firsts[inside] - start]
        yield part, ids


def _within(firsts: Array, start: int) -> Array:
    return firsts[(firsts >= start) & (firsts < start + WINDOW_ROWS)]


# --- mapping


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
        tables: name for files of these tables, to which a number is added, where several processes
            shall share them: they are made by `share`.
    """

    def __init__(
        self, path: Path, reader: Numbering, memory: int, tables: Path | None = None
    ) -> None:
        self._path, self._reader, self._tables = path, reader, tables
        self._limit = max(memory // (6 * reader.dtype.itemsize), 16)
        self._only: IdLookup | None = None

    def share(self) -> None:
        """Make the files of its tables."""
        self.remove_shared()  # of a run that was killed
        for number, lookup in enumerate(self._made()):
            lookup.write(self._table(number))

    def _table(self, number: int) -> Path:
        return Path(f"{self._tables}.{number}.table")

    def _shared(self) -> Iterator[Path]:
        return itertools.takewhile(Path.exists, map(self._table, itertools.count()))

    def remove_shared(self) -> None:
        # The last one first, so that after a kill none is left without those before it.
        for path in reversed(list(self._shared())):
            path.unlink()

    def zero_id(self) -> int | None:
        """The id of the number 0, if it has one. No string has the number 0."""
        if self._reader.kind == "string":
            return None
        for values, ids in self._batches(1):
            if len(values):
                return int(ids[0]) if values[0] == 0 else None
        return None

    def missing_id(self) -> int | None:
        """The id of the missing value, if it has one of its own."""
        found = read_missing(self._path)
        return None if found is None else found.id

    def without(self, counts: Counts) -> Counts:
        """The counts of those values that it does not know."""
        is_new, ids = np.ones(len(counts), bool), np.empty(len(counts), np.int32)
        for lookup in self.lookups():
            lookup(counts.values, ids, UNKNOWN)
            is_new &= ids == UNKNOWN
        return counts.keep(is_new)

    def lookups(self) -> Iterator[IdLookup]:
        """One after the other: tables that know all values together."""
        if self._tables is None:
            yield from self._made()
            return
        if self._only is None:
            # Of a single one, because to map its pages again takes as long as the lookups do.
            paths = list(self._shared())
            lookups = (IdLookup.read(path, self._reader.dtype) for path in paths)
            if len(paths) != 1:
                yield from lookups
                return
            self._only = next(lookups)
        yield self._only

    def _made(self) -> Iterator[IdLookup]:
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

        from trainmark.clicklog.sources.parquet_files import readable

        with readable(self._path), pq.ParquetFile(self._path) as file:
            if file.metadata.num_rows <= size:
                table = of_values(file.read(["value", "id"], use_threads=False))
                yield self._numbers(table.column(0)), numpy_array(table.column(1))
                return
            for batch in file.iter_batches(size, columns=["value", "id"], use_threads=False):
                known = of_values(batch)
                yield self._numbers(known.column(0)), numpy_array(known.column(1))

    def _numbers(self, values: Any) -> Array:
        return self._reader.from_arrow(values)


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
        if rules.recipe.missing_is_zero:
            return cls(rules.rare_id, zero, zero)
        missing = vocabulary.missing_id()
        return cls(rules.rare_id, zero, rules.rare_id if missing is None else missing)
