"""Phase 2: the columns of the store into the files of the dataset, by several processes.

Of a large column they share the values that are to be counted, and then the buckets of its training
rows; a small one is the work of one process.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from trainmark import checksums, progress
from trainmark.clicklog.engine import numbers
from trainmark.clicklog.engine.arrange import Buckets, Field, TrainRows, write_in_order, write_train
from trainmark.clicklog.engine.columns import Built, DatasetColumn, Given, columns_of
from trainmark.clicklog.engine.division import Division
from trainmark.clicklog.engine.job import VOCABULARY, Job
from trainmark.clicklog.engine.limits import Limits
from trainmark.clicklog.engine.numbers import FittedNumber, FittedNumbers
from trainmark.clicklog.engine.splits import RowSet
from trainmark.clicklog.engine.store import Store
from trainmark.clicklog.engine.vocabulary_builder import Spilled
from trainmark.clicklog.engine.work import Work
from trainmark.clicklog.engine.workers import Workers

NUMBERS = "numbers"
"""Of the record of what becomes of the numerical columns."""
SHARE_ROWS = 1 << 20
"""Rows of a column that are worth a process of their own."""
MOST_SHARES = 8
"""Each reads a part of every block; smaller parts take longer to find than to read."""
SHARES_OF_A_PROCESS = 4
"""Of all columns, so that all processes end at about the same time. Of one column there should be
few: while one of its processes writes, the others wait for the file."""
DICTIONARY_SHARES = 2
"""The most that share a column with dictionaries, all of which each has to look up."""
ORDER_TURN = -1
"""Before all columns."""

Each = Callable[[str, Iterable[tuple[Any, ...]]], list[Any]]
"""Calls a method of the encoder with each of some arguments."""


class Encoder:
    """Writes every column of a store, unless an earlier run that was killed has done so."""

    def __init__(
        self, job: Job, limits: Limits, work: Work, store: Store, division: Division
    ) -> None:
        self.job, self.work, self.store, self.division = job, work, store, division
        self._workers = min(limits.workers, len(store.records)) or 1
        self._memory = limits.memory // self._workers
        self._train = TrainRows(store, division.splits[0], work.folder / "order")
        self._is_ordered = False
        self._columns: dict[str, DatasetColumn] = {}
        self._field: tuple[str, Field] | None = None

    def run(self) -> tuple[FittedNumbers, dict[str, dict[str, Any]]]:
        """How the numbers were read, and what is worth knowing of each column."""
        splits, store = self.division.splits, self.store
        for name in (*(split.name for split in splits), VOCABULARY):
            (self.work.dataset / name).mkdir(parents=True, exist_ok=True)
        finished = {record["name"]: record for record in self.work.column_log.keep(self._intact)}
        if store.schema.numbers and NUMBERS not in finished:
            with Workers(self, self._workers) as workers:
                self._find_order(workers)
            finished[NUMBERS] = self._fit()
        fitted = FittedNumbers.from_json(
            finished.pop(NUMBERS)["facts"] if store.schema.numbers else {}
        )
        given = Given(self.job, self.work, store, self.division, fitted, self._memory)
        self._columns = columns_of(given)
        left = [name for name in self._columns if name not in finished]
        if left:
            finished |= self._write_columns(left)
        return fitted, {name: finished[name]["facts"] for name in self._columns}

    def _intact(self, record: dict[str, Any]) -> bool:
        files = record["files"].items()
        return all(checksums.matches(self.work.dataset / name, check) for name, check in files)

    def _find_order(self, workers: Workers) -> None:
        if self._is_ordered or not self.division.splits[0].rows:
            return
        self._train.folder.mkdir(exist_ok=True)
        shares = self._train.shares(4 * self._workers)
        workers.each(ORDER_TURN, "order", [(share,) for share in shares])
        self._is_ordered = True

    def _fit(self) -> dict[str, Any]:
        """Find out what becomes of the numerical columns; the record of that."""
        schema = self.store.schema
        most = self._workers * self._memory // numbers.FIT_BYTES
        with Workers(self, max(min(self._workers, most), 1)) as workers:
            found = workers.each(0, "fit", [(number,) for number in range(len(schema.numbers))])
        fitted = FittedNumbers(found)
        fitted.check_names([column.name for column in schema.categorical])
        record = {"name": NUMBERS, "files": {}, "facts": fitted.to_json()}
        self.work.column_log.append(record)
        return record

    def _write_columns(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Write columns; their records by name."""
        rows, done = self.store.rows, len(self._columns) - len(names)
        with (
            Workers(self, self._workers) as workers,
            ThreadPoolExecutor(1 + len(names)) as drivers,
            progress.rate_bar("Writing", rows * len(self._columns), "M values") as advance,
        ):
            advance(rows * done)

            def column(place: int) -> dict[str, Any]:
                # What is left to do of the first, largest ones goes before all else.
                each = partial(workers.each, place)
                name = names[place]
                if self._shares(self._columns[name]) > 1:
                    made = self._made(name, each, ordered.result)
                else:
                    ordered.result()
                    [made] = each("whole", [(name,)])
                record = {"name": name} | made
                self.work.column_log.append(record)
                advance(rows)
                return record

            with workers.stopping():
                # Meanwhile the values of large columns are counted.
                ordered = drivers.submit(self._find_order, workers)
                found = list(drivers.map(column, range(len(names))))
        return {record["name"]: record for record in found}

    def _shares(self, column: DatasetColumn) -> int:
        """How many processes share a column."""
        records, rows = self.store.records, self.store.rows
        enough = -(-SHARES_OF_A_PROCESS * self._workers // max(len(self._columns), 1))
        most = min(self._workers, max(rows // SHARE_ROWS, 1), MOST_SHARES, enough)
        entries = sum(
            record.columns[place].distinct for record in records for place in column.places
        )
        return min(most, DICTIONARY_SHARES) if 16 * entries > rows else most

    def _made(
        self, name: str, each: Each, when_ordered: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Make all files of a column; their checksums, and what is worth knowing of it.

        Args:
            when_ordered: waits until the order of the training rows is found.
        """
        column = self._columns[name]
        shares = self._shares(column)
        # Whoever counts some values of a column has to read them all.
        ranges = column.ranges(min(shares, max(self._workers // len(self._columns), 1)))
        parts = each("count", [(name, within) for within in ranges])
        counted = list(itertools.chain.from_iterable(parts))
        [built] = each("build", [(name, counted, shares > 1)])
        of_splits = [
            (split.name, share)
            for split in self.division.splits
            for share in self._row_shares(split, shares)
        ]
        for split in self.division.splits:
            self._path(split.name, name).write_bytes(b"")
        when_ordered()
        written = each("write", [(name, *place, shares > 1) for place in of_splits])
        if shares > 1:
            column.close()
        files, counts = dict(built.files), dict[str, int]()
        for split in self.division.splits:
            pairs = zip(of_splits, written, strict=True)
            done = [found for (of_split, _), found in pairs if of_split == split.name]
            files[f"{split.name}/{name}.bin"] = checksums.joined(check for check, _ in done)
            counts[split.name] = sum(count for _, count in done)
        return {"files": files, "facts": {**built.facts, **column.facts(counts)}}

    def _row_shares(self, split: RowSet, count: int) -> list[Buckets]:
        """What processes write of a split: training rows by their buckets, others at once."""
        if split.name == "train" and split.rows:
            return self._train.shares(count)
        return [self._train.all_buckets]

    def _path(self, of_split: str, name: str) -> Path:
        return self.work.dataset / of_split / f"{name}.bin"

    # --- in a process

    def order(self, share: Buckets) -> None:
        """Find the order of some buckets' rows."""
        self._train.write_order(share, self._memory)

    def fit(self, number: int) -> FittedNumber:
        """Find out what becomes of a numerical column."""
        rows = self.division.all_rows
        return numbers.fit(self.store, self._train, rows, number, self._memory)

    def whole(self, name: str) -> dict[str, Any]:
        """All of a column that is not shared."""

        def each(method: str, arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
            return [getattr(self, method)(*one) for one in arguments]

        return self._made(name, each)

    def count(self, name: str, within: tuple[int, int]) -> list[Spilled]:
        """Count a column's values of a range."""
        self._field = None  # for its memory
        return self._columns[name].count(within)

    def build(self, name: str, parts: Sequence[Spilled], shared: bool) -> Built:
        """Make a column's vocabulary."""
        self._field = None
        return self._columns[name].build(parts, shared)

    def write(
        self, name: str, of_split: str, share: Buckets, shared: bool
    ) -> tuple[list[Any], int]:
        """Write rows of a column: a checksum of them, and what was counted.

        Args:
            share: of training rows, which buckets.
        """
        if self._field is None or self._field[0] != name:
            self._field = None
            self._field = name, self._columns[name].field(shared)
        field = self._field[1]
        [split] = [split for split in self.division.splits if split.name == of_split]
        path, memory = self._path(of_split, name), self._memory * 2 // 5
        if not split.rows:
            return checksums.Checksum().value(), 0
        if of_split == "train":
            check = write_train(self._train, field, path, memory, share)
        else:
            check = write_in_order(self.store, split, field, path, memory)
        return check.value(), field.take_count()
