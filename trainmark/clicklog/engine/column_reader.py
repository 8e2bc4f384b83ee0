"""Reads a categorical column of the store, for counting and encoding."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trainmark.clicklog.arrays.primitives import NO_KEYS, Array, arrow_array, numpy_array
from trainmark.clicklog.engine import store as stores
from trainmark.clicklog.engine.splits import RowSet
from trainmark.clicklog.engine.store import BlockRecord, Store


class ColumnReader:
    """Numbers of one column.

    Args:
        store: the finished store.
        column: which of its categorical columns, helpers included.
        modulus: numbers are taken modulo this, if given.
        first: of the columns that are numbered together, if there are several.
    """

    def __init__(
        self, store: Store, column: int, modulus: int | None = None, first: int | None = None
    ) -> None:
        self.store, self.column, self.modulus = store, column, modulus
        self._first = column if first is None else first
        self.kind = store.schema.stored[column].kind
        self.dtype = stores.dtype_of(store.schema.stored[column])

    def records(self, rows: RowSet) -> Iterator[BlockRecord]:
        """Blocks that have some of these rows."""
        return (record for record in self.store.records if not rows.has_none(record))

    def _final(self, record: BlockRecord, numbers: Array) -> Array:
        """Numbers that mean the same in all blocks."""
        if self.kind == "string":
            numbers = self.store.string_numbers(record.index, self._first)[numbers]
        return numbers % self.dtype.type(self.modulus) if self.modulus else numbers

    def dictionary(self, record: BlockRecord) -> tuple[Array, Array]:
        numbers, counts = self.store.dictionary(record, self.column)
        return self._final(record, numbers), counts

    def codes(self, record: BlockRecord, start: int, stop: int) -> Array:
        """Codes of a block's places, where it has a dictionary."""
        return self.store.codes(record, self.column, start, stop)

    def numbers(self, record: BlockRecord, start: int, stop: int) -> Array:
        """Numbers of a block's places, 0 where missing."""
        codes = self.codes(record, start, stop)
        if record.columns[self.column].distinct:
            return self.dictionary(record)[0][codes]
        return self._final(record, codes)

    def occurrences(
        self, record: BlockRecord, rows: RowSet, keyed: bool
    ) -> tuple[Array, Array | None, Array]:
        """Numbers of some rows, how often each occurs (None: once), and keys that rise with them.

        A block's dictionary is in order of appearance, so that an entry's index will do for the
        row of its first appearance: no other block has keys in between.
        """
        whole = rows.has_all(record)
        if whole and record.columns[self.column].distinct:
            numbers, counts = self.dictionary(record)
            keys = record.first_row + np.arange(len(numbers)) if keyed else NO_KEYS
            return numbers, counts.astype(self.dtype, copy=False), keys
        numbers = self.numbers(record, 0, record.rows)
        if whole and not keyed:
            return numbers, None, NO_KEYS
        order = self.store.order(record)
        within = rows.mask(record)[order]
        keys = record.first_row + order[within].astype(np.int64) if keyed else NO_KEYS
        return numbers[within], None, keys

    def zeros_and_first(self, rows: RowSet, with_missing: bool) -> tuple[int, int]:
        """How many of these rows hold the number 0 (or nothing), and a key of the first."""
        count = first = 0
        for record in self.records(rows):
            if with_missing:
                numbers, counts, keys = self.occurrences(record, rows, True)
                zeros = numbers == 0
                here = int(zeros.sum() if counts is None else counts[zeros].sum())
                if here and not count:
                    first = int(keys[zeros].min())
            elif rows.has_all(record):
                here = record.columns[self.column].zeros
            else:
                order = self.store.order(record)
                places = self.store.zeros(record, self.column)
                here = int(np.count_nonzero(rows.mask(record)[order[places]]))
            count += here
        return count, first

    def zeros(self, record: BlockRecord, start: int, stop: int) -> Array:
        """Which of a block's places hold the number 0, relative to `start`."""
        if not record.columns[self.column].zeros:
            return np.empty(0, np.int64)
        places = self.store.zeros(record, self.column).astype(np.int64)
        return places[(places >= start) & (places < stop)] - start

    def missing(self, rows: RowSet) -> int:
        """How many of these rows hold nothing."""
        return sum(self._missing(record, rows) for record in self.records(rows))

    def _missing(self, record: BlockRecord, rows: RowSet) -> int:
        stored = record.columns[self.column]
        if not stored.missing or rows.has_all(record):
            return stored.missing
        numbers = self.codes(record, 0, record.rows)
        if stored.distinct:
            numbers = self.store.dictionary(record, self.column)[0][numbers]
        nothing = numbers == 0
        nothing[self.store.zeros(record, self.column)] = False
        order = self.store.order(record)
        return int(np.count_nonzero(nothing & rows.mask(record)[order]))

    # --- numbers as users know them

    def arrow_type(self) -> Any:
        import pyarrow as pa

        types = {"int64": pa.int64(), "float64": pa.float64(), "string": pa.large_string()}
        return types.get(self.kind) or pa.from_numpy_dtype(self.dtype)

    def to_arrow(self, numbers: Array) -> Any:
        """The values that rising numbers of the store stand for."""
        if self.kind == "string":
            from trainmark.clicklog.arrays import strings

            return strings.of_numbers(self._all_strings(), numbers)
        return arrow_array(stores.decode(self.kind, numbers))

    def from_arrow(self, values: Any) -> Array:
        """The store's numbers for rising values; for a string that does not occur, 0."""
        if self.kind == "string":
            from trainmark.clicklog.arrays import strings

            return strings.to_numbers(self._all_strings(), values)
        return stores.encode(self.kind, numpy_array(values))

    def _all_strings(self) -> Path:
        from trainmark.clicklog.arrays import strings

        return strings.all_strings_path(self.store.folder, self._first)
