"""Phase 2: the columns of the store, one after the other, into the files of the dataset."""

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from trainmark import checksums, progress
from trainmark.clickdata import identity
from trainmark.clicklog.engine import numbers, vocabulary
from trainmark.clicklog.engine.arrange import Field, TrainRows, write_in_order, write_train
from trainmark.clicklog.engine.column_reader import ColumnReader
from trainmark.clicklog.engine.division import Division
from trainmark.clicklog.engine.fields import (
    BagField,
    CategoricalField,
    GroupField,
    LabelField,
    NumericalField,
)
from trainmark.clicklog.engine.job import VOCABULARY, Job
from trainmark.clicklog.engine.limits import Limits
from trainmark.clicklog.engine.numbers import BinField, FittedNumber, FittedNumbers, NumbersField
from trainmark.clicklog.engine.splits import NamedRows, RowSet
from trainmark.clicklog.engine.store import Store
from trainmark.clicklog.engine.vocabulary import Rules, SpecialIds, Vocabulary
from trainmark.clicklog.engine.vocabulary_files import read_sizes
from trainmark.clicklog.engine.work import Work
from trainmark.clicklog.sources.recipes import RECIPES

NUMBERS = "numbers"
"""Of the record of what becomes of the numerical columns."""
GROUP_RULES = Rules(recipe=RECIPES["nvidia"], threshold=0)
"""Groups are numbered from 1 on; rows without one have the number 0."""

Task = Callable[[], dict[str, Any]]
"""Writes files; their checksums and what is worth knowing of them, for a record."""


class Encoder:
    """Writes every column of a store, unless an earlier run that was killed has done so."""

    def __init__(
        self, job: Job, limits: Limits, work: Work, store: Store, division: Division
    ) -> None:
        self.job, self.work, self.store, self.division = job, work, store, division
        self._threads = limits.threads
        self._memory = limits.memory // limits.threads
        self._train = TrainRows(store, division.splits[0], work.folder / "order.bin")

    def run(self) -> tuple[FittedNumbers, dict[str, dict[str, Any]]]:
        """How the numbers were read, and what is worth knowing of each column."""
        dataset, splits, store = self.work.dataset, self.division.splits, self.store
        for name in (*(split.name for split in splits), VOCABULARY):
            (dataset / name).mkdir(parents=True, exist_ok=True)
        finished = {record["name"]: record for record in self.work.column_log.keep(self._intact)}
        if store.schema.numbers and NUMBERS not in finished:
            self._find_order()
            finished[NUMBERS] = self._fit()
        fitted = FittedNumbers.from_json(
            finished.pop(NUMBERS)["facts"] if store.schema.numbers else {}
        )
        tasks = self._tasks(fitted)
        left = [name for name in tasks if name not in finished]
        with progress.rows_bar("Writing", store.rows * len(tasks)) as advance:
            advance(store.rows * len(finished))
            if left:
                self._find_order()

            def work(name: str) -> dict[str, Any]:
                record = {"name": name} | tasks[name]()
                self.work.column_log.append(record)
                advance(store.rows)
                return record

            with ThreadPoolExecutor(self._threads) as pool:
                records = list(pool.map(work, left))
        finished |= {record["name"]: record for record in records}
        return fitted, {name: finished[name]["facts"] for name in tasks}

    def _intact(self, record: dict[str, Any]) -> bool:
        files = record["files"].items()
        return all(checksums.matches(self.work.dataset / name, check) for name, check in files)

    def _find_order(self) -> None:
        if self.division.splits[0].rows:
            self._train.write_order(self._memory)

    def _fit(self) -> dict[str, Any]:
        """Find out what becomes of the numerical columns; the record of that."""
        schema = self.store.schema

        def fit(number: int) -> FittedNumber:
            rows = self.division.all_rows
            return numbers.fit(self.store, self._train, rows, number, self._memory)

        most = self._threads * self._memory // numbers.FIT_BYTES
        with ThreadPoolExecutor(max(min(self._threads, most), 1)) as pool:
            fitted = FittedNumbers(list(pool.map(fit, range(len(schema.numbers)))))
        fitted.check_names([column.name for column in schema.categorical])
        record = {"name": NUMBERS, "files": {}, "facts": fitted.to_json()}
        self.work.column_log.append(record)
        return record

    def _tasks(self, fitted: FittedNumbers) -> dict[str, Task]:
        """What is to be written, by name; the largest first, so that no thread ends up alone."""
        store = self.store
        stored = [
            sum(r.columns[p].width * r.rows for r in store.records for p in store.schema.places(c))
            for c in range(len(store.schema.categorical))
        ]
        tasks: dict[str, Task] = {}
        if numerical_features(store, fitted):
            tasks["numerical"] = partial(self._numerical, fitted)
        for column in sorted(range(len(stored)), key=lambda column: -stored[column]):
            tasks[f"cat_{column}"] = partial(self._categorical, column)
        for place, of_column in enumerate(fitted.with_bins(), start=len(stored)):
            tasks[f"cat_{place}"] = partial(self._bins, place, *of_column)
        group = store.schema.helper("group")
        if group is not None:
            tasks["group"] = partial(self._group, group)
        return tasks | {"label": self._label}

    # --- the tasks

    def _write(
        self, field: Field, file: str, splits: Sequence[NamedRows] | None = None
    ) -> dict[str, Any]:
        """Write a field of all splits; the files' checksums."""
        files = {}
        for split in splits or self.division.splits:
            path = self.work.dataset / split.name / file
            if not split.rows:
                path.touch()
                check = checksums.Checksum()
            elif split.name == "train":
                check = write_train(self._train, field, path, self._memory * 2 // 5)
            else:
                check = write_in_order(self.store, split, field, path, self._memory * 2 // 5)
            files[f"{split.name}/{file}"] = check.value()
        return files

    def _numerical(self, fitted: FittedNumbers) -> dict[str, Any]:
        store = self.store
        field = NumbersField(store, fitted) if store.schema.numbers else NumericalField(store)
        return {"files": self._write(field, "numerical.bin"), "facts": {}}

    def _bins(self, column: int, number: int, fitted: FittedNumber) -> dict[str, Any]:
        name, path = self._vocabulary(column)
        if self.job.vocabulary is None:
            numbers.write_bins(fitted, path)
        else:
            shutil.copyfile(self.job.vocabulary / path.name, path)
        lower_ends = numbers.read_bins(path)
        field = BinField(self.store, number, lower_ends)
        files = self._write(field, f"cat_{column}.bin")
        facts = {
            "distinct": len(lower_ends),
            "kept": len(lower_ends),
            "cardinality": len(lower_ends) + 1,
            "missing": field.missing,
            "rare": 0,
            "digest": identity.digest(path),
        }
        return {"files": files | {name: checksums.of_file(path)}, "facts": facts}

    def _label(self) -> dict[str, Any]:
        files, clicks = dict[str, Any](), dict[str, int]()
        for split in self.division.splits:
            field = LabelField(self.store)
            files |= self._write(field, "label.bin", [split])
            clicks[split.name] = field.clicks
        return {"files": files, "facts": {"clicks": clicks}}

    def _categorical(self, column: int) -> dict[str, Any]:
        rules = self.job.rules[column]
        places, most = self.store.schema.places(column), self.store.schema.categorical[column].most
        readers = [ColumnReader(self.store, p, rules.value_modulus, places[0]) for p in places]
        name, path = self._vocabulary(column)
        old = self.job.vocabulary / path.name if self.job.vocabulary else None
        if old is None or self.job.grow:
            sizes = vocabulary.build(readers, rules, self._counted(), self._memory, path, old)
        else:
            shutil.copyfile(old, path)
            sizes = read_sizes(path)
        cardinality = rules.cardinality(sizes.kept)
        known = Vocabulary(path, readers[0], self._memory // 2)
        special = SpecialIds.of(known, rules)
        field: CategoricalField | BagField = (
            BagField(readers, known, cardinality, special)
            if most
            else CategoricalField(readers[0], known, cardinality, special)
        )
        files = self._write(field, f"cat_{column}.bin")
        facts: dict[str, Any] = {
            "distinct": sizes.distinct,
            "kept": sizes.kept,
            "cardinality": cardinality,
            "missing": readers[0].missing(self.division.all_rows),  # of lists: the empty ones
            "rare": field.rare,
            "digest": identity.digest(path),
        }
        if most:
            facts["most"] = most
        if old is not None and self.job.grow:
            facts["grown"] = _grown(old, rules, sizes.kept)
        return {"files": files | {name: checksums.of_file(path)}, "facts": facts}

    def _vocabulary(self, column: int) -> tuple[str, Path]:
        """The file of a column's vocabulary: its name in the dataset, and where it is."""
        name = f"{VOCABULARY}/cat_{column}.parquet"
        return name, self.work.dataset / name

    def _counted(self) -> RowSet:
        """The rows whose values vocabularies are made of."""
        everything = self.job.vocabulary_from == "all"
        return self.division.all_rows if everything else self.division.splits[0]

    def _group(self, column: int) -> dict[str, Any]:
        """The number of every row's group, which is good for this dataset only."""
        reader = ColumnReader(self.store, column)
        path = self.work.folder / "groups.parquet"
        rows = self.division.all_rows
        sizes = vocabulary.build([reader], GROUP_RULES, rows, self._memory, path)
        known = Vocabulary(path, reader, self._memory // 2)
        field = GroupField(reader, known, sizes.kept + 1, SpecialIds.of(known, GROUP_RULES))
        return {"files": self._write(field, "group.bin"), "facts": {"groups": sizes.kept}}


def _grown(old: Path, rules: Rules, kept: int) -> dict[str, Any]:
    """What a column's vocabulary has grown from, and by how much."""
    before = read_sizes(old).kept
    return {
        "digest": identity.digest(old),
        "rows": rules.cardinality(before),
        "new_ids": kept - before,
    }


def numerical_features(store: Store, fitted: FittedNumbers) -> int:
    """How many numerical features the dataset has."""
    return fitted.features() if store.schema.numbers else store.schema.num_numerical
