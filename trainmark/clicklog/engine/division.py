"""Splits that are no ranges of the input's rows: by a column, at random, or thinned out.

Every row has a key: the number that its column holds, or one drawn from the seed and the row (or
from the seed and the row's group). Rows are ordered by key, then by row number, and a split is a
range of places in that order. Finding where a range starts takes a few passes over the keys, a
digit of 16 bits at a time; then a byte for every row says which split it is in. Keys depend on
nothing but the rows and the seed, so neither do the splits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainmark.clicklog.arrays import shuffle
from trainmark.clicklog.engine.column_reader import ColumnReader
from trainmark.clicklog.engine.splits import RowSet, Split, SplitRule
from trainmark.clicklog.engine.store import BlockRecord, Store
from trainmark.errors import InputError
from trainmark.files import reserve

DIGIT_BITS = 16
LEFT_OUT = 255
Keys = NDArray[np.uint64]


@dataclass(frozen=True)
class ChosenRows:
    """The rows of a store that have one of some codes."""

    name: str
    rows: int
    codes: NDArray[np.uint8]
    """Of every row, in input order."""
    wanted: tuple[int, ...]

    def has_all(self, block: BlockRecord) -> bool:
        return bool(self.mask(block).all())

    def has_none(self, block: BlockRecord) -> bool:
        return not self.mask(block).any()

    def mask(self, block: BlockRecord) -> NDArray[np.bool_]:
        return np.isin(self.codes[block.first_row : block.first_row + block.rows], self.wanted)


@dataclass(frozen=True)
class Division:
    """The rows of a store in their splits."""

    splits: Sequence[RowSet]
    """Train, test and, where there is one, validation."""
    all_rows: RowSet
    """Of all splits together."""


def divide(rule: SplitRule, store: Store, rows_per_file: Sequence[int], path: Path) -> Division:
    """Divide the rows of a store.

    Args:
        rows_per_file: of the input.
        path: a file for the split of every row, where they are no ranges.
    """
    if rule.in_ranges:
        return Division(rule.apply(rows_per_file), Split("all", 0, store.rows))
    keys = _keys(rule, store)
    bounds = _bounds(rule, store, rows_per_file, keys)
    codes = np.memmap(path, np.uint8, "w+", shape=store.rows)
    reserve(path)
    thinned = _thinning(rule, store)
    counts = np.zeros(LEFT_OUT + 1, np.int64)
    for record in store.records:
        behind = [bound.is_before(keys(record), record.first_row) for bound in bounds]
        here: NDArray[np.uint8] = np.sum(behind, axis=0, dtype=np.uint8)
        if thinned is not None:
            here[(here == 0) & thinned(record)] = LEFT_OUT
        codes[record.first_row : record.first_row + record.rows] = here
        counts += np.bincount(here, minlength=len(counts))
    names = rule.names()
    sizes = counts[: len(names)].tolist()
    of_name = {
        name: ChosenRows(name, size, codes, (code,))
        for code, (name, size) in enumerate(zip(names, sizes, strict=True))
    }
    splits = [of_name[name] for name in ("train", "test", "validation") if name in of_name]
    if not splits[0].rows:
        raise InputError(
            "No training row is left: none is a click, and --negative-rate takes out the others."
        )
    return Division(splits, ChosenRows("all", sum(sizes), codes, tuple(range(len(names)))))


# --- keys


def _keys(rule: SplitRule, store: Store) -> Callable[[BlockRecord], Keys]:
    """The keys of a block's rows, in input order."""

    def numbers(record: BlockRecord) -> Keys:
        return np.arange(record.first_row, record.first_row + record.rows, dtype=np.uint64)

    def at_random(record: BlockRecord) -> Keys:
        return shuffle.hashed(store.seed, shuffle.SPLITS, numbers(record))

    if not (rule.by or rule.is_random):
        return numbers
    helper = store.schema.helper("order" if rule.by else "group")
    if helper is None:
        return at_random
    reader = ColumnReader(store, helper)

    def of_column(record: BlockRecord) -> Keys:
        found = reader.numbers(record, 0, record.rows)
        in_order = np.empty(record.rows, np.uint64)
        in_order[store.order(record)] = found
        return in_order

    def of_groups(record: BlockRecord) -> Keys:
        groups = of_column(record)
        drawn = shuffle.hashed(store.seed, shuffle.GROUPS, groups)
        return np.where(groups == 0, at_random(record), drawn)  # without a group: each by itself

    return of_column if rule.by else of_groups


def _thinning(rule: SplitRule, store: Store) -> Callable[[BlockRecord], NDArray[np.bool_]] | None:
    """Which rows of a block would be left out, were they training rows."""
    rate = rule.negative_rate
    if rate is None or rate == 1:
        return None

    def left_out(record: BlockRecord) -> NDArray[np.bool_]:
        labels = np.empty(record.rows, np.uint8)
        labels[store.order(record)] = store.labels(record, 0, record.rows)
        rows = np.arange(record.first_row, record.first_row + record.rows, dtype=np.uint64)
        drawn = shuffle.hashed(store.seed, shuffle.NEGATIVES, rows)
        found: NDArray[np.bool_] = (labels == 0) & (drawn >= np.uint64(int(rate * 2**64)))
        return found

    return left_out


# --- bounds


@dataclass(frozen=True)
class Bound:
    """A place between two rows in the order by (key, row)."""

    place: int
    """How many rows are before it."""
    key: int
    row: int
    """Rows of this key from here on are behind it."""

    def is_before(self, keys: Keys, first_row: int) -> NDArray[np.bool_]:
        """Which rows of a block are behind it."""
        key = np.uint64(self.key)
        rows = np.arange(first_row, first_row + len(keys))
        behind: NDArray[np.bool_] = (keys > key) | ((keys == key) & (rows >= self.row))
        return behind


def _bounds(
    rule: SplitRule,
    store: Store,
    rows_per_file: Sequence[int],
    keys: Callable[[BlockRecord], Keys],
) -> list[Bound]:
    """Where the second and the third split start."""
    if not (rule.by or rule.is_random):  # keys are row numbers
        splits = sorted(rule.apply(rows_per_file), key=lambda split: split.start)
        return [Bound(split.start, split.start, 0) for split in splits[1:]]
    finder = _Finder(store, keys)
    train = finder.between_keys(rule.train_rows(rows_per_file), after=0)
    if train is None:
        what = f"--split-by {rule.by}" if rule.by else f"--group {rule.group}"
        raise InputError(f"{what} has one value in all rows: they cannot be divided by it.")
    middle = rule.middle(train.place, store.rows)
    # Equal times may be held out apart; a group may not.
    half = finder.at_row(middle) if rule.by else finder.between_keys(middle, after=train.place)
    if half is None:
        raise InputError(
            f"--group {rule.group} leaves a single group to test and to validate on. Hold out a "
            "larger part, or leave --group out."
        )
    return [train, half]


class _Finder:
    """Finds places in the order of a store's rows by (key, row)."""

    def __init__(self, store: Store, keys: Callable[[BlockRecord], Keys]) -> None:
        self._store, self._keys = store, keys

    def between_keys(self, place: int, *, after: int) -> Bound | None:
        """The place behind `after` and before the end that is nearest to `place` and has
        different keys on its two sides; None if there is none."""
        key, smaller, equal = self._key_at(place)
        bounds = [Bound(smaller, key, 0), Bound(smaller + equal, key, self._store.rows)]
        possible = [bound for bound in bounds if after < bound.place < self._store.rows]
        return min(possible, key=lambda bound: abs(bound.place - place), default=None)

    def at_row(self, place: int) -> Bound:
        """Exactly there, be it between two rows of one key."""
        key, left, _ = self._key_at(place)
        left = place - left
        for record in self._store.records:
            rows = np.flatnonzero(self._keys(record) == np.uint64(key))
            if left < len(rows):
                return Bound(place, key, record.first_row + int(rows[left]))
            left -= len(rows)
        raise AssertionError("the row at a place has the key that was found there")

    def _key_at(self, place: int) -> tuple[int, int, int]:
        """The key of the row at a place, and how many rows have smaller and equal keys."""
        key = smaller = equal = 0
        for shift in range(64 - DIGIT_BITS, -1, -DIGIT_BITS):
            counts = np.zeros(1 << DIGIT_BITS, np.int64)
            for digits in self._digits(key, shift):
                counts += np.bincount(digits, minlength=len(counts))
            ends = np.cumsum(counts)
            digit = int(np.searchsorted(ends, place - smaller, side="right"))
            equal = int(counts[digit])
            smaller += int(ends[digit]) - equal
            key = key << DIGIT_BITS | digit
        return key, smaller, equal

    def _digits(self, prefix: int, shift: int) -> Iterator[NDArray[np.int64]]:
        """Of the keys that start with a prefix, the digit behind it."""
        for record in self._store.records:
            keys = self._keys(record) >> np.uint64(shift)
            if shift + DIGIT_BITS < 64:
                keys = keys[keys >> np.uint64(DIGIT_BITS) == np.uint64(prefix)]
            yield (keys & np.uint64((1 << DIGIT_BITS) - 1)).astype(np.int64)
