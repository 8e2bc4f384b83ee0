"""What each column of a dataset reads from the store and writes to its file."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trainmark.clickdata import feature_spec
from trainmark.clicklog.arrays import primitives
from trainmark.clicklog.arrays.primitives import UNKNOWN, Array, IdLookup, Scratch
from trainmark.clicklog.engine.arrange import Field, Part
from trainmark.clicklog.engine.column_reader import ColumnReader
from trainmark.clicklog.engine.store import Store
from trainmark.clicklog.engine.vocabulary import SpecialIds, Vocabulary

_scratch = Scratch()


class LabelField(Field):
    """One byte per row; counts clicks."""

    dtype = np.dtype(np.uint8)
    row_bytes = 4

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self, parts: Sequence[Part]) -> Array:
        return np.concatenate(
            [self._store.labels(part.record, part.start, part.stop) for part in parts]
        )

    def finish(self, rows: Array) -> Array:
        self.count += int(rows.sum())
        return rows


class NumericalField(Field):
    """All numerical columns, row by row; the bits of float16."""

    dtype = np.dtype("<u2")

    def __init__(self, store: Store) -> None:
        self._store = store
        self.row_bytes = 6 * max(store.schema.num_numerical, 1)

    def read(self, parts: Sequence[Part]) -> Array:
        width = self._store.schema.num_numerical
        out = _scratch.array("numbers", (sum(part.rows for part in parts), width), self.dtype)
        end = 0
        for part in parts:
            start, end = end, end + part.rows
            self._store.numerical(part.record, part.start, part.stop, out[start:end])
        return out


class CategoricalField(Field):
    """The ids of a column; counts the rows that have the rare one.

    Args:
        reader: its numbers.
        vocabulary: ids of the numbers.
        cardinality: decides the type of the file.
        special: ids of what it does not know.
    """

    row_bytes = 12

    def __init__(
        self,
        reader: ColumnReader,
        vocabulary: Vocabulary,
        cardinality: int,
        special: SpecialIds,
    ) -> None:
        self.dtype = np.dtype(feature_spec.dtype_for(cardinality)).newbyteorder("<")
        self._reader, self._vocabulary = reader, vocabulary
        self._special = special

    def read(self, parts: Sequence[Part]) -> Array:
        ids = _scratch.array("ids", sum(part.rows for part in parts), self.dtype)
        for number, lookup in enumerate(self._vocabulary.lookups()):
            end = 0
            for part in parts:
                start, end = end, end + part.rows
                self._fill(ids[start:end], part, lookup, first=number == 0)
        end = 0
        for part in parts:
            start, end = end, end + part.rows
            if self._special.zero != self._special.missing:
                zeros = self._reader.zeros(part.record, part.start, part.stop)
                ids[start:end][zeros] = self._special.zero
        return ids

    def _fill(self, ids: Array, part: Part, lookup: IdLookup, first: bool) -> None:
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
        readers: of every place in a list.
        vocabulary, cardinality, special: as of a `CategoricalField`.
    """

    NONE, MISSING = -1, -2
    """In the file, and until it is written."""

    def __init__(
        self,
        readers: Sequence[ColumnReader],
        vocabulary: Vocabulary,
        cardinality: int,
        special: SpecialIds,
    ) -> None:
        none = replace(special, missing=self.MISSING)
        self._fields = [CategoricalField(r, vocabulary, cardinality, none) for r in readers]
        self._rare_id = special.rare
        self.dtype, self.row_bytes = self._fields[0].dtype, 12 * len(readers)

    def read(self, parts: Sequence[Part]) -> Array:
        ids = np.empty((sum(part.rows for part in parts), len(self._fields)), self.dtype)
        for place, field in enumerate(self._fields):
            ids[:, place] = field.read(parts)
        return ids

    def finish(self, rows: Array) -> Array:
        self.count += primitives.replace(rows, UNKNOWN, self._rare_id)
        primitives.replace(rows, self.MISSING, self.NONE)
        return rows


class GroupField(CategoricalField):
    """The numbers of a column's groups: as ids, but always of 4 bytes."""

    def __init__(
        self, reader: ColumnReader, vocabulary: Vocabulary, groups: int, special: SpecialIds
    ) -> None:
        super().__init__(reader, vocabulary, groups, special)
        self.dtype = np.dtype("<i4")
