"""What each column of a dataset reads from the store and writes to its file."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trainmark.clickdata import feature_spec
from trainmark.clicklog.arrays import number_transforms, primitives
from trainmark.clicklog.arrays.primitives import UNKNOWN, Array, IdLookup, Scratch
from trainmark.clicklog.engine.arrange import Field, Part, rows_of, with_rows
from trainmark.clicklog.engine.column_reader import ColumnReader
from trainmark.clicklog.engine.numbers import FittedNumbers, features_of
from trainmark.clicklog.engine.store import Store
from trainmark.clicklog.engine.vocabulary import SpecialIds, Vocabulary

_scratch = Scratch()


def dtype_of_ids(cardinality: int) -> np.dtype[Any]:
    """Of a file of ids."""
    return np.dtype(feature_spec.dtype_for(cardinality)).newbyteorder("<")


class LabelField(Field):
    """One byte per row; counts clicks."""

    dtype = np.dtype(np.uint8)
    row_bytes = 4

    def __init__(self, store: Store) -> None:
        self._store = store

    def fill(self, out: Array, part: Part) -> None:
        out[:] = self._store.labels(part.record, part.start, part.stop)

    def finish(self, rows: Array) -> Array:
        self.count += int(rows.sum())
        return rows


# --- numbers


class NumericalField(Field):
    """All numerical columns, row by row; the bits of float16."""

    dtype = np.dtype("<u2")

    def __init__(self, store: Store) -> None:
        self._store = store
        self.shape = (store.schema.num_numerical,)
        self.row_bytes = 6 * max(store.schema.num_numerical, 1)

    def fill(self, out: Array, part: Part) -> None:
        self._store.numerical(part.record, part.start, part.stop, out)


class NumbersField(Field):
    """All numerical features, row by row: of each column its number, then its indicator."""

    def __init__(self, store: Store, numbers: FittedNumbers) -> None:
        self._store, self._numbers = store, numbers
        self._type = np.dtype(numbers.dtype).newbyteorder("<")
        self.dtype = np.dtype(f"<u{self._type.itemsize}")
        self.shape = (numbers.features(),)
        # Besides the features and their copy in order: a column on its way through float64.
        self.row_bytes = 3 * self._type.itemsize * max(numbers.features(), 1) + 48

    def fill(self, out: Array, part: Part) -> None:
        features, feature = out.view(self._type), 0
        for number, column in enumerate(self._numbers.columns):
            if not column.features():
                continue
            numbers = self._store.number(part.record, number, part.start, part.stop)
            for values in features_of(column.read_as, column.parameters, numbers):
                features[:, feature] = number_transforms.narrowed(values, self._type)
                feature += 1


class BinField(Field):
    """The bins of a column, as ids; counts the rows that have none."""

    row_bytes = 48

    def __init__(self, store: Store, number: int, lower_ends: Array) -> None:
        self.dtype = dtype_of_ids(len(lower_ends) + 1)
        self._store, self._number, self._lower_ends = store, number, lower_ends

    def fill(self, out: Array, part: Part) -> None:
        numbers = self._store.number(part.record, self._number, part.start, part.stop)
        out[:] = number_transforms.bins(self._lower_ends, numbers)

    def finish(self, rows: Array) -> Array:
        self.count += int(np.count_nonzero(rows == 0))
        return rows


# --- ids


class CategoricalField(Field):
    """The ids of a column; counts the rows that have the rare one.

    Args:
        reader: its numbers.
        vocabulary: ids of the numbers.
        dtype: of the file.
        special: ids of what it does not know.
    """

    row_bytes = 12

    def __init__(
        self,
        reader: ColumnReader,
        vocabulary: Vocabulary,
        dtype: np.dtype[Any],
        special: SpecialIds,
    ) -> None:
        self._reader, self._vocabulary, self.dtype = reader, vocabulary, dtype
        self._special = special

    def read(self, parts: Sequence[Part]) -> Array:
        ids = _scratch.array("ids", rows_of(parts), self.dtype)
        for number, lookup in enumerate(self._vocabulary.lookups()):
            for part, of_part in with_rows(parts, ids):
                self._look_up(of_part, part, lookup, first=number == 0)
        if self._special.zero != self._special.missing:
            for part, of_part in with_rows(parts, ids):
                zeros = self._reader.zeros(part.record, part.start, part.stop)
                of_part[zeros] = self._special.zero
        return ids

    def _look_up(self, ids: Array, part: Part, lookup: IdLookup, first: bool) -> None:
        """Set the ids of the rows whose values `lookup` knows, and of missing ones; unless it is
        the first, leave the others."""
        reader, record = self._reader, part.record
        found = ids if first else np.empty_like(ids)
        if record.columns[reader.column].distinct:
            numbers, _ = reader.dictionary(record)
            id_of_code = np.empty(len(numbers), np.int32)
            lookup(numbers, id_of_code, self._special.missing)
            primitives.take(id_of_code, reader.codes(record, part.start, part.stop), found)
        else:
            numbers = reader.numbers(record, part.start, part.stop)
            lookup(numbers, found, self._special.missing)
        if not first:
            np.copyto(ids, found, where=found != UNKNOWN)

    def finish(self, rows: Array) -> Array:
        self.count += primitives.replace(rows, UNKNOWN, self._special.rare)
        return rows


class BagField(Field):
    """The ids of a column of lists; counts the rare ones.

    Args:
        readers: of every place in a list that some list reaches.
        most: how many places there are.
        vocabulary, dtype, special: as of a `CategoricalField`.
    """

    NONE, MISSING = -1, -2
    """In the file, and until it is written."""

    def __init__(
        self,
        readers: Sequence[ColumnReader],
        most: int,
        vocabulary: Vocabulary,
        dtype: np.dtype[Any],
        special: SpecialIds,
    ) -> None:
        none = replace(special, missing=self.MISSING)
        self._fields = [CategoricalField(r, vocabulary, dtype, none) for r in readers]
        self._rare_id = special.rare
        self.dtype, self.row_bytes, self._most = dtype, 12 * most, most

    def read(self, parts: Sequence[Part]) -> Array:
        ids = np.full((rows_of(parts), self._most), self.MISSING, self.dtype)
        for place, field in enumerate(self._fields):
            ids[:, place] = field.read(parts)
        return ids

    def finish(self, rows: Array) -> Array:
        self.count += primitives.replace(rows, UNKNOWN, self._rare_id)
        primitives.replace(rows, self.MISSING, self.NONE)
        return rows
