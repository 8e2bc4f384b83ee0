"""The columns of a dataset: what each is made of, and how."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from trainmark import checksums
from trainmark.clickdata import identity
from trainmark.clicklog.engine import numbers
from trainmark.clicklog.engine.arrange import Field
from trainmark.clicklog.engine.column_reader import ColumnReader
from trainmark.clicklog.engine.division import Division
from trainmark.clicklog.engine.fields import (
    BagField,
    BinField,
    CategoricalField,
    LabelField,
    NumbersField,
    NumericalField,
    dtype_of_ids,
)
from trainmark.clicklog.engine.job import VOCABULARY, Job
from trainmark.clicklog.engine.numbers import FittedNumber, FittedNumbers
from trainmark.clicklog.engine.splits import RowSet
from trainmark.clicklog.engine.store import Store
from trainmark.clicklog.engine.vocabulary import Rules, SpecialIds, Vocabulary
from trainmark.clicklog.engine.vocabulary_builder import Spilled, VocabularyBuilder
from trainmark.clicklog.engine.vocabulary_files import num_kept
from trainmark.clicklog.engine.work import Work
from trainmark.clicklog.sources.recipes import RECIPES

GROUP_RULES = Rules(recipe=RECIPES["nvidia"], threshold=0)
"""Groups are numbered from 1 on; rows without one have the number 0."""
GROUP_DTYPE = np.dtype("<i4")


@dataclass(frozen=True)
class Given:
    """What columns are made from."""

    job: Job
    work: Work
    store: Store
    division: Division
    fitted: FittedNumbers
    memory: int
    """Bytes that a process may use."""


@dataclass(frozen=True)
class Built:
    """A column before its rows are written."""

    facts: Mapping[str, Any]
    """What is worth knowing of it."""
    files: Mapping[str, Any]
    """Checksums of its files, other than those of rows."""


class DatasetColumn:
    """One file of every split; here, of a column that has no vocabulary."""

    places: Sequence[int] = ()
    """The categorical columns of the store that it is made of."""

    def __init__(self, name: str, given: Given) -> None:
        self.name, self._given = name, given

    def ranges(self, count: int) -> list[tuple[int, int]]:
        """The values to be counted, in up to so many ranges."""
        return []

    def count(self, within: tuple[int, int]) -> list[Spilled]:
        """Count the values of a range."""
        raise NotImplementedError

    def build(self, parts: Sequence[Spilled], shared: bool) -> Built:
        """Make what its rows need, of what was counted; for several processes, if shared."""
        return Built({}, {})

    def field(self, shared: bool) -> Field:
        """Its rows."""
        raise NotImplementedError

    def facts(self, counts: Mapping[str, int]) -> dict[str, Any]:
        """Those that are known when the rows are written: what `field` counted in each split."""
        return {}

    def close(self) -> None:
        """Remove what processes have shared."""


class NumericalColumn(DatasetColumn):
    """All numbers of a row."""

    def field(self, shared: bool) -> Field:
        store = self._given.store
        if store.schema.numbers:
            return NumbersField(store, self._given.fitted)
        return NumericalField(store)


class LabelColumn(DatasetColumn):
    def field(self, shared: bool) -> Field:
        return LabelField(self._given.store)

    def facts(self, counts: Mapping[str, int]) -> dict[str, Any]:
        return {"clicks": dict(counts)}


class BinColumn(DatasetColumn):
    """The bins of a numerical column, which have a vocabulary as other categorical features do."""

    def __init__(self, name: str, given: Given, number: int, fitted: FittedNumber) -> None:
        super().__init__(name, given)
        self._number, self._fitted = number, fitted
        self._file = f"{VOCABULARY}/{name}.parquet"
        self._path = given.work.dataset / self._file

    def build(self, parts: Sequence[Spilled], shared: bool) -> Built:
        old = self._given.job.vocabulary
        if old is None:
            numbers.write_bins(self._fitted, self._path)
        else:
            shutil.copyfile(old / self._path.name, self._path)
        bins = len(numbers.read_bins(self._path))
        digest = identity.digest(self._path)
        facts = {"distinct": bins, "kept": bins, "cardinality": bins + 1, "digest": digest}
        return Built(facts, {self._file: checksums.of_file(self._path)})

    def field(self, shared: bool) -> Field:
        return BinField(self._given.store, self._number, numbers.read_bins(self._path))

    def facts(self, counts: Mapping[str, int]) -> dict[str, Any]:
        return {"missing": sum(counts.values()), "rare": 0}


class IdColumn(DatasetColumn):
    """Ids of a column's values, by a vocabulary."""

    def __init__(self, name: str, given: Given, places: Sequence[int], rules: Rules) -> None:
        super().__init__(name, given)
        self.places, self.rules = places, rules
        self.readers = [
            ColumnReader(given.store, place, rules.value_modulus, places[0]) for place in places
        ]
        self.path = given.work.folder / f"{name}.parquet"
        self.old: Path | None = None

    def _counted(self) -> RowSet:
        """The rows whose values the vocabulary is made of."""
        return self._given.division.all_rows

    def _builder(self) -> VocabularyBuilder:
        return VocabularyBuilder(self.readers, self.rules, self._counted(), self.old)

    def ranges(self, count: int) -> list[tuple[int, int]]:
        if self.old is not None and not self._given.job.grow:
            return []
        return self._builder().ranges(count)

    def count(self, within: tuple[int, int]) -> list[Spilled]:
        spill = self._given.work.folder / self.name
        return self._builder().count(self._given.memory, spill, within)

    def build(self, parts: Sequence[Spilled], shared: bool) -> Built:
        if self.old is None or self._given.job.grow:
            distinct = self._builder().build(parts, self.path, self._missing())
        else:
            shutil.copyfile(self.old, self.path)
            distinct = num_kept(self.path)
        if shared:
            self._vocabulary(shared).share()
        return self._built(distinct, num_kept(self.path))

    def _missing(self) -> int:
        """Rows without a value, where these may have an id of their own."""
        return 0

    def _built(self, distinct: int, kept: int) -> Built:
        raise NotImplementedError

    def _vocabulary(self, shared: bool) -> Vocabulary:
        tables = self._given.work.folder / self.name if shared else None
        return Vocabulary(self.path, self.readers[0], self._given.memory // 2, tables)

    def field(self, shared: bool) -> Field:
        known = self._vocabulary(shared)
        return self._field(known, SpecialIds.of(known, self.rules))

    def _field(self, known: Vocabulary, special: SpecialIds) -> Field:
        raise NotImplementedError

    def close(self) -> None:
        self._vocabulary(shared=True).remove_shared()


class GroupColumn(IdColumn):
    """The number of every row's group, which is good for this dataset only."""

    def _built(self, distinct: int, kept: int) -> Built:
        return Built({"groups": kept}, {})

    def _field(self, known: Vocabulary, special: SpecialIds) -> Field:
        return CategoricalField(self.readers[0], known, GROUP_DTYPE, special)


class CategoricalColumn(IdColumn):
    """A categorical feature."""

    def __init__(self, name: str, given: Given, number: int) -> None:
        schema, job = given.store.schema, given.job
        column, places = schema.categorical[number], schema.places(number)
        self._longest = _longest(given.store, places)
        # No list reaches the others.
        super().__init__(name, given, places[: max(self._longest, 1)], job.rules[number])
        self._most = len(self.places) if column.is_found else column.most
        self._limit = column.most if column.is_found else None
        self._file = f"{VOCABULARY}/{name}.parquet"
        self.path = given.work.dataset / self._file
        self.old = job.vocabulary / self.path.name if job.vocabulary else None

    def _counted(self) -> RowSet:
        everything = self._given.job.vocabulary_from == "all"
        division = self._given.division
        return division.all_rows if everything else division.splits[0]

    def _missing(self) -> int:
        if self._most or not self.rules.recipe.missing_is_value:
            return 0
        return self.readers[0].missing(self._counted())

    def _built(self, distinct: int, kept: int) -> Built:
        facts: dict[str, Any] = {
            "distinct": distinct,
            "kept": kept,
            "cardinality": self.rules.cardinality(kept),
            # Of lists: the empty ones.
            "missing": self.readers[0].missing(self._given.division.all_rows),
            "digest": identity.digest(self.path),
        }
        if self._most:
            facts |= {"most": self._most, "longest": self._longest}
            facts |= {"limit": self._limit} if self._limit else {}
        if self.old is not None and self._given.job.grow:
            facts["grown"] = _grown(self.old, self.rules, kept)
        return Built(facts, {self._file: checksums.of_file(self.path)})

    def _field(self, known: Vocabulary, special: SpecialIds) -> Field:
        dtype = dtype_of_ids(self.rules.cardinality(num_kept(self.path)))
        if self._most:
            return BagField(self.readers, self._most, known, dtype, special)
        return CategoricalField(self.readers[0], known, dtype, special)

    def facts(self, counts: Mapping[str, int]) -> dict[str, Any]:
        return {"rare": sum(counts.values())}


def _longest(store: Store, places: Sequence[int]) -> int:
    """How many values the longest list has."""

    def is_empty(place: int) -> bool:
        return all(record.columns[place].missing == record.rows for record in store.records)

    return len(places) - sum(takewhile(bool, map(is_empty, reversed(places))))


def _grown(old: Path, rules: Rules, kept: int) -> dict[str, Any]:
    """What a column's vocabulary has grown from, and by how much."""
    before = num_kept(old)
    return {
        "digest": identity.digest(old),
        "rows": rules.cardinality(before),
        "new_ids": kept - before,
    }


def columns_of(given: Given) -> dict[str, DatasetColumn]:
    """By name, the largest first, so that no process ends up with one alone."""
    store, fitted = given.store, given.fitted
    features = range(len(store.schema.categorical))

    def stored(number: int) -> int:
        places = store.schema.places(number)
        return sum(
            record.columns[p].width * record.rows for record in store.records for p in places
        )

    columns: list[DatasetColumn] = []
    if numerical_features(store, fitted):
        columns.append(NumericalColumn("numerical", given))
    for number in sorted(features, key=lambda number: -stored(number)):
        columns.append(CategoricalColumn(f"cat_{number}", given, number))
    for number, of_column in enumerate(fitted.with_bins(), len(features)):
        columns.append(BinColumn(f"cat_{number}", given, *of_column))
    group = store.schema.helper("group")
    if group is not None:
        columns.append(GroupColumn("group", given, [group], GROUP_RULES))
    columns.append(LabelColumn("label", given))
    return {column.name: column for column in columns}


def numerical_features(store: Store, fitted: FittedNumbers) -> int:
    """How many numerical features the dataset has."""
    return fitted.features() if store.schema.numbers else store.schema.num_numerical
