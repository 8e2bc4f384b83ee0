"""Vocabularies: which categorical values have an id, and which one. `vocabulary_builder.py` makes
them.

Their files (vocabulary_files.py) hold value, id and count. The number 0 of a column is among the
values if it is one; the missing value is one where the recipe says so.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainmark.clicklog.arrays.counting import Counts
from trainmark.clicklog.arrays.primitives import (
    UNKNOWN,
    Array,
    IdLookup,
    numpy_array,
)
from trainmark.clicklog.engine.vocabulary_files import (
    of_values,
    read_missing,
)
from trainmark.clicklog.sources.recipes import Recipe
from trainmark.clicklog.sources.rows import Kind


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
