"""Counting on the executors: how often every value occurs, in two steps.

A task counts the values of its blocks. Then the counts of each column and range of values meet in
one task.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from trainmark.clicklog.arrays import counting
from trainmark.clicklog.arrays.counting import Counts
from trainmark.clicklog.arrays.primitives import NO_KEYS, Array
from trainmark.clicklog.engine.column_reader import ColumnReader
from trainmark.clicklog.engine.splits import Split
from trainmark.clicklog.engine.vocabulary import Rules
from trainmark.clicklog.spark.blocks import Batches, Blocks, grouped, row

NO_LIMIT = 1 << 40
VALUE_BITS = 32


class _Tally:
    """Counts of a column's values, 0 among them."""

    def __init__(self, keyed: bool) -> None:
        every = (1, (1 << VALUE_BITS) - 1)
        self._counter = counting.counter(np.uint32, every, NO_LIMIT, keyed)
        self._zeros: list[tuple[int, int]] = []

    def add(self, values: Array, counts: Array | None, keys: Array) -> None:
        self._counter.add(values, counts, keys)

    def add_zeros(self, count: int, first: int) -> None:
        if count:
            self._zeros.append((count, first))

    def result(self, threshold: int) -> Counts:
        counts = self._counter.result(threshold)
        zeros = sum(count for count, _ in self._zeros)
        distinct = counts.distinct + bool(zeros)
        if not zeros or zeros < threshold:
            return replace(counts, distinct=distinct)
        keyed = self._counter.keyed
        first = [min(first for _, first in self._zeros)] if keyed else NO_KEYS
        return Counts(
            np.concatenate([np.zeros(1, np.uint32), counts.values]),
            np.concatenate([[zeros], counts.counts]),
            np.concatenate([first, counts.firsts]).astype(np.int64),
            distinct,
        )


def _packed(counts: Counts) -> bytes:
    return b"".join(array.tobytes() for array in counts.arrays)


def entries(data: bytes, keyed: bool) -> int:
    """How many values were packed."""
    return len(data) // (4 + 8 + 8 * keyed)


def _unpacked(data: bytes, keyed: bool) -> Counts:
    count = entries(data, keyed)
    values = np.frombuffer(data, np.uint32, count).copy()
    counts = np.frombuffer(data, np.int64, count, offset=4 * count).copy()
    firsts = np.frombuffer(data, np.int64, count * keyed, offset=12 * count * keyed).copy()
    return Counts(values, counts, firsts)


@dataclass(frozen=True)
class Count:
    """Blocks to counts: of every column, those of every range of values."""

    blocks: Blocks
    rules: Sequence[Rules]
    rows: Split
    """Those whose values count."""
    range_bits: int
    """How many bits of a value number its range."""

    gives = "column long, range long, data binary"

    def __call__(self, batches: Batches) -> Iterator[pa.RecordBatch]:
        recipe = self.rules[0].recipe
        keyed = recipe.order == "appearance"
        tallies = [_Tally(keyed) for _ in self.rules]
        for store, record in self.blocks.opened(batches):
            if self.rows.has_none(record):
                continue
            for number, (tally, rule) in enumerate(zip(tallies, self.rules, strict=True)):
                reader = ColumnReader(store, number, rule.value_modulus)
                tally.add(*reader.occurrences(record, self.rows, keyed))
                tally.add_zeros(*reader.zeros_and_first(self.rows, recipe.missing_is_zero))
        lowest = np.arange(1 << self.range_bits) << (VALUE_BITS - self.range_bits)
        for number, tally in enumerate(tallies):
            counts = tally.result(0)
            bounds = [*np.searchsorted(counts.values, lowest).tolist(), len(counts)]
            for of_range, (start, stop) in enumerate(itertools.pairwise(bounds)):
                if start < stop:
                    data = _packed(counts.keep(slice(start, stop)))
                    yield row(column=number, range=of_range, data=data)


@dataclass(frozen=True)
class Merge:
    """Counts of the same values, grouped by column and range, to one; rare values are left out."""

    thresholds: Sequence[int]
    keyed: bool

    gives = "column long, range long, distinct long, data binary"

    def __call__(self, batches: Batches) -> Iterator[pa.RecordBatch]:
        for (column, of_range), rows in grouped(batches):
            tally = _Tally(self.keyed)
            for [data] in rows:
                counts = _unpacked(data, self.keyed)
                if counts.values[0] == 0:
                    first = int(counts.firsts[0]) if self.keyed else 0
                    tally.add_zeros(int(counts.counts[0]), first)
                tally.add(counts.values, counts.counts, counts.firsts)
            merged = tally.result(self.thresholds[column])
            yield row(column=column, range=of_range, distinct=merged.distinct, data=_packed(merged))
