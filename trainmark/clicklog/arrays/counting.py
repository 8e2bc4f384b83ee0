"""Exact counts of a column's values in bounded memory.

`Counter` holds counts within a limit of entries. When it is full it forgets its larger half and
from then on ignores values that large, so that what it reports at the end is exact for a range of
values. Further passes over the column count the ranges above.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainmark.clicklog.arrays import primitives
from trainmark.clicklog.arrays.primitives import NO_KEYS, Array

HALF_A_COUNTER = 1 << 31
"""Counts of 32-bit values are 32-bit numbers; what exceeds this is put aside in time."""


@dataclass(frozen=True)
class Counts:
    """What was counted, for a range of values."""

    values: Array
    """Distinct, rising."""
    counts: NDArray[np.int64]
    firsts: NDArray[np.int64]
    """The smallest key of each value; empty if keys were not given."""

    distinct: int = 0
    """How many values there were, those counted too rarely included."""

    def __len__(self) -> int:
        return len(self.values)

    @property
    def arrays(self) -> tuple[Array, Array, Array]:
        """In the order in which files hold them."""
        return self.values, self.counts, self.firsts

    def keep(self, which: Array | slice) -> "Counts":
        firsts = self.firsts[which] if len(self.firsts) else NO_KEYS
        return Counts(self.values[which], self.counts[which], firsts)


class Counter:
    """Counts values of [low, high]; `high` sinks when memory does not suffice.

    Args:
        dtype: uint32 or uint64.
        within: the smallest and the largest value to count; others are ignored. 0 is no value.
        limit: how many distinct values may be held.
        keyed: whether to find the smallest key of each value.
    """

    def __init__(self, dtype: Any, within: tuple[int, int], limit: int, keyed: bool) -> None:
        self.dtype = np.dtype(dtype)
        self.low, self.high = max(within[0], 1), within[1]
        self.limit = max(limit, 2)
        self.keyed = keyed

    def add(self, values: Array, counts: Array | None = None, keys: Array = NO_KEYS) -> None:
        """Count `values`; with `counts`, each as often as that says."""
        raise NotImplementedError

    def result(self, threshold: int) -> Counts:
        """Exact counts of the values of [low, high] that occur at least so often; the end."""
        raise NotImplementedError


def counter(dtype: Any, within: tuple[int, int], limit: int, keyed: bool) -> Counter:
    """The fastest counter there is."""
    kind = HashCounter if primitives.FAST else SortCounter
    return kind(dtype, within, limit, keyed)


class HashCounter(Counter):
    """Counts in a hash table that grows up to the limit."""

    def __init__(self, dtype: Any, within: tuple[int, int], limit: int, keyed: bool) -> None:
        from trainmark.clicklog.arrays import kernels

        super().__init__(dtype, within, limit, keyed)
        self._kernels = kernels
        self._large: dict[int, int] = {}
        self._since_check = 0
        self._size = 0
        self._allocate(1 << 10)

    def _allocate(self, slots: int) -> None:
        self._table = primitives.empty_table(slots, self.dtype)
        self._firsts = np.zeros(slots if self.keyed else 0, np.int64)
        self._room = min(self.limit, slots * 2 // 3)

    def add(self, values: Array, counts: Array | None = None, keys: Array = NO_KEYS) -> None:
        self._put_aside(int(counts.sum()) if counts is not None else len(values))
        if counts is None and self.keyed:
            counts = np.ones(len(values), self.dtype)
        place = 0
        while place < len(values):
            # Values above `high` are forgotten already and must not come back.
            within = self.dtype.type(self.low), self.dtype.type(self.high)
            held = (self._size, self._room)
            if counts is None:
                one = self.dtype.type(1)
                self._size, place = self._kernels.count(
                    self._table, *held, values, within, one, place
                )
            else:
                found = (values, counts.astype(self.dtype, copy=False), keys)
                self._size, place = self._kernels.count_known(
                    self._table, self._firsts, *held, found, within, place
                )
            if place < len(values):
                self._make_room()

    def _make_room(self) -> None:
        table, firsts = self._table, self._firsts
        if self._size >= self.limit:
            held = table[:, 1][table[:, 1] != 0]
            # The lower half stays; it is not empty, and neither is the upper one.
            self.high = int(np.partition(held, len(held) // 2)[len(held) // 2]) - 1
            self._large = {v: c for v, c in self._large.items() if v <= self.high}
            self._allocate(len(table))
        else:
            self._allocate(4 * len(table) if 4 * self._room < self.limit else 2 * len(table))
        bounds = self.dtype.type(self.low), self.dtype.type(self.high)
        self._size = self._kernels.move(table, firsts, self._table, self._firsts, *bounds)

    def _put_aside(self, rows: int) -> None:
        """Empty the counters that might overflow in the next `rows` rows."""
        self._since_check += rows
        if self._since_check < HALF_A_COUNTER or self.dtype.itemsize > 4:
            return
        for slot in np.flatnonzero(self._table[:, 0] >= HALF_A_COUNTER // 2).tolist():
            count, value = self._table[slot].tolist()
            self._large[value] = self._large.get(value, 0) + count
            self._table[slot, 0] = 0
        self._since_check = rows

    def result(self, threshold: int) -> Counts:
        table, firsts, distinct = self._table, self._firsts, self._size
        self._allocate(1)
        kept = table[:, 0] >= max(threshold, 1)
        for value in self._large:
            kept |= table[:, 1] == value
        if self.dtype.itemsize == 4 and not self.keyed:
            # Value and count as one number: one fast sort, and little memory.
            words = table.view(np.uint64)[:, 0][kept]
            del table, kept
            words.sort()
            values = (words >> np.uint64(32)).astype(np.uint32)
            counts = (words & np.uint64(0xFFFFFFFF)).view(np.int64)
        else:
            slots = np.flatnonzero(kept)
            slots = slots[np.argsort(table[slots, 1])]
            values, counts = table[slots, 1], table[slots, 0].astype(np.int64)
            firsts = firsts[slots] if self.keyed else NO_KEYS
        for value, count in self._large.items():
            counts[np.searchsorted(values, self.dtype.type(value))] += count
        return Counts(values, counts, firsts, distinct)


class SortCounter(Counter):
    """Counts in sorted arrays, for machines without numba."""

    def __init__(self, dtype: Any, within: tuple[int, int], limit: int, keyed: bool) -> None:
        super().__init__(dtype, within, limit, keyed)
        self._held = Counts(np.empty(0, dtype), np.empty(0, np.int64), NO_KEYS)

    def add(self, values: Array, counts: Array | None = None, keys: Array = NO_KEYS) -> None:
        # At most `limit` new values at a time, so that memory is bounded here too.
        for start in range(0, len(values), self.limit):
            part = slice(start, start + self.limit)
            weights = np.ones(len(values[part]), np.int64) if counts is None else counts[part]
            self._merge(values[part], weights, keys[part])

    def _merge(self, values: Array, counts: Array, keys: Array) -> None:
        wanted = (values >= self.dtype.type(self.low)) & (values <= self.dtype.type(self.high))
        values = np.concatenate([self._held.values, values[wanted]])
        distinct, where = np.unique(values, return_inverse=True)
        # Weights make bincount count in float64, exact up to 2**53 occurrences.
        weights = np.concatenate([self._held.counts, counts[wanted].astype(np.int64)])
        totals = np.bincount(where, weights, len(distinct)).astype(np.int64)
        firsts = NO_KEYS
        if self.keyed:
            firsts = np.full(len(distinct), np.iinfo(np.int64).max)
            np.minimum.at(firsts, where, np.concatenate([self._held.firsts, keys[wanted]]))
        self._held = Counts(distinct, totals, firsts)
        if len(distinct) > self.limit:
            half = self.limit // 2
            self.high = int(distinct[half]) - 1
            self._held = self._held.keep(np.arange(half))

    def result(self, threshold: int) -> Counts:
        kept = self._held.keep(self._held.counts >= max(threshold, 1))
        return replace(kept, distinct=len(self._held))
