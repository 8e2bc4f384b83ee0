"""Makes vocabularies: counts the values of a column, in ranges, and numbers them.

Counts lie in files, so that memory bounds neither how many values there are, nor which come first.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainmark.clicklog.arrays import counting, primitives
from trainmark.clicklog.arrays.counting import Counts
from trainmark.clicklog.arrays.primitives import NO_KEYS, Array, arrow_array
from trainmark.clicklog.engine.column_reader import ColumnReader
from trainmark.clicklog.engine.splits import RowSet
from trainmark.clicklog.engine.vocabulary import Rules, Vocabulary
from trainmark.clicklog.engine.vocabulary_files import (
    Entries,
    MissingEntry,
    Writer,
    merged,
    num_kept,
    read,
    read_missing,
)

BYTES_PER_ENTRY = {4: 40, 8: 72}
"""Memory that an entry takes at the worst moment of counting, by the size of a number."""
LARGE_COUNT = 1 << 16
"""Counts from here on are rare enough to be handled one by one."""
WINDOW_ROWS = 1 << 24


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


class VocabularyBuilder:
    """Counts and numbers a column's values.

    Args:
        readers: of the column; of one of lists, of every place in them.
        rules: of the column.
        rows: those that count.
        old: a vocabulary to extend: its values keep their ids, and new ones follow.
    """

    def __init__(
        self,
        readers: Sequence[ColumnReader],
        rules: Rules,
        rows: RowSet,
        old: Path | None = None,
    ) -> None:
        self._readers, self._rules, self._rows, self._old = readers, rules, rows, old

    def ranges(self, count: int) -> list[tuple[int, int]]:
        """All values in so many ranges, or fewer, of about as many values each.

        Judged by one block: they decide nothing but which process counts what.
        """
        reader = self._readers[0]
        last = int(np.iinfo(reader.dtype).max)
        record = next(reader.records(self._rows), None)
        if count == 1 or record is None:
            return [(1, last)]
        seen = np.unique(reader.numbers(record, 0, record.rows))
        places = [len(seen) * number // count for number in range(1, count)]
        bounds = [*sorted({1, *seen[places].tolist()} - {0}), last + 1]
        return [(low, after - 1) for low, after in itertools.pairwise(bounds)]

    def count(self, memory: int, spill: Path, within: tuple[int, int]) -> list[Spilled]:
        """Count the values of a range into files: one, if memory suffices.

        Args:
            memory: bytes that may be used, roughly.
            spill: name for these files, to which a number is added.
        """
        reader, rows = self._readers[0], self._rows
        limit = memory // BYTES_PER_ENTRY[reader.dtype.itemsize]
        keyed = self._rules.recipe.order == "appearance"
        known = Vocabulary(self._old, reader, memory // 4) if self._old else None
        found = []
        low, high = within
        while low <= high:
            counter = counting.counter(reader.dtype, (low, high), limit, keyed)
            for one in self._readers:
                for record in one.records(rows):
                    counter.add(*one.occurrences(record, rows, keyed))
            counts = counter.result(self._rules.threshold)
            path = spill.with_name(f"{spill.name}.{low}.counts")
            found.append(Spilled.write(known.without(counts) if known else counts, path))
            low = counter.high + 1
        return found

    def build(self, parts: Sequence[Spilled], path: Path, missing: int) -> int:
        """Write the vocabulary; how many values occur, or, of one that was extended, are kept.

        Args:
            parts: what was counted, by rising values; the files are removed.
            path: the file to write.
            missing: how many of the rows have none of its values; 0: it shall not be a value.
        """
        reader, rules, old, parts = self._readers[0], self._rules, self._old, list(parts)
        zero = self._count_zeros()
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

    def _count_zeros(self) -> Counts | None:
        """The number 0, which the store keeps apart; None if there is none."""
        recipe = self._rules.recipe
        found = [
            reader.zeros_and_first(self._rows, recipe.missing_is_zero) for reader in self._readers
        ]
        counted = [(count, first) for count, first in found if count]
        if not counted:
            return None
        first = min(first for _, first in counted)
        firsts = np.array([first]) if recipe.order == "appearance" else NO_KEYS
        count = sum(count for count, _ in counted)
        return Counts(np.zeros(1, self._readers[0].dtype), np.array([count]), firsts, 1)


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
