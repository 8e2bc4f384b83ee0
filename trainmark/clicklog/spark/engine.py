"""`--engine spark`: the phases of preparation as a Spark job, for logs beyond one machine.

The result is what the embedded engine writes, byte for byte, the random order of the training rows
included. Input and output are any Hadoop paths. The phases are those of the embedded engine, each
leaving its result in a work folder beside the output, so that a run that was stopped continues:

    lines        text -> integers, as Parquet; bad lines keep their text
    counts       (column, value) -> count, first row
    ranks        the values that are kept, in the order of their ids
    ids          (column, value) -> id, count: the vocabularies
    files        joins give ids, a range sort the order; blocks of bytes, one per task and file
    output       the JVM joins the blocks to `train/cat_0.bin` and so on, through Hadoop's streams

frames.py holds the plans. The driver collects a row per input block, per partition of a vocabulary
and per column, and the vocabularies, piece by piece, to write them.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

from trainmark.clickdata import feature_spec
from trainmark.clicklog.engine.job import Job
from trainmark.clicklog.engine.splits import Split
from trainmark.clicklog.sources.criteo_format import NUM_CATEGORICAL
from trainmark.clicklog.sources.rows import NumberFacts
from trainmark.clicklog.spark import frames
from trainmark.clicklog.spark.encode import FACTS
from trainmark.clicklog.spark.hadoop import File, Hadoop

ROWS_PER_PARTITION = 2_000_000
"""Rows whose bytes a worker holds at once: about 100 bytes each."""
ENTRY = ("value", "id", "count")
VOCABULARY_ROWS = 16_000_000
"""Entries of vocabularies that the driver holds at once."""


@dataclass(frozen=True)
class ColumnFacts:
    """What was counted of a categorical column."""

    distinct: int
    kept: int


class SparkEngine:
    """One preparation. Its phases run when their results are asked for, each once.

    Args:
        spark: the session.
        files: the days.
        job: what to prepare; its source and output are not looked at.
        work: folder for the phases' results.
    """

    def __init__(self, spark: SparkSession, files: Sequence[File], job: Job, work: str) -> None:
        self.spark, self.days, self.job, self.work = spark, files, job, work
        self.files = Hadoop(spark)
        self.recipe = job.rules[0].recipe
        self.thresholds = [rule.threshold for rule in job.rules]
        self.max_rows = [rule.max_rows for rule in job.rules]

    # --- the phases

    @cached_property
    def lines(self) -> DataFrame:
        paths = [file.path for file in self.days]
        return self._saved("lines", lambda: frames.parse(self.spark, paths))

    @cached_property
    def blocks(self) -> list[frames.InputBlock]:
        return frames.input_blocks(self.lines)

    @cached_property
    def rows(self) -> DataFrame:
        return frames.numbered(self.lines, self.blocks, self.spark)

    @cached_property
    def splits(self) -> list[Split]:
        """In input order; together they are all rows."""
        return sorted(self.job.split.apply(self.rows_per_file()), key=lambda split: split.start)

    def rows_per_file(self) -> list[int]:
        """Good rows of each day."""
        rows = [0] * len(self.days)
        for block in self.blocks:
            rows[block.file] += block.lines - block.bad
        return rows

    @cached_property
    def counts(self) -> DataFrame:
        rows = self.rows
        if self.job.vocabulary_from == "train":
            train = self.splits[self._train]
            rows = rows.where(sql.col("row").between(train.start, train.stop - 1))
        return self._saved("counts", lambda: frames.counts(rows, self._values()))

    @cached_property
    def vocabulary(self) -> DataFrame:
        """(column, value, id, count)"""
        ranks = self._saved(
            "ranks", lambda: frames.ranked(self.counts, self.recipe, self.thresholds)
        )
        return self._saved(
            "ids", lambda: frames.with_ids(ranks, self.recipe, self.max_rows, self.spark)
        )

    def write_blocks(self) -> None:
        """The bytes of all files, in pieces."""
        path = f"{self.work}/files"
        if self.files.exists(f"{path}/_SUCCESS"):
            return
        ordered = frames.ordered(
            frames.encoded(self.rows, self.vocabulary, self._values()),
            [split.start for split in self.splits],
            self._train,
            self.job.seed,
            -(-self.splits[-1].stop // ROWS_PER_PARTITION),
        )
        rare_ids = [rule.rare_id for rule in self.job.rules]
        dtypes = [feature_spec.dtype_for(cardinality) for cardinality in self.cardinalities]
        pieces = frames.blocks(ordered, self.recipe, rare_ids, dtypes)
        pieces.write.mode("overwrite").partitionBy("split", "file").text(path)

    def join_blocks(self, output: str) -> None:
        """Write the files of every split under `output`."""
        names = ["label.bin", "numerical.bin", *(f"cat_{i}.bin" for i in range(NUM_CATEGORICAL))]

        def join(number: int, split: Split, name: str) -> None:
            pattern = f"{self.work}/files/split={number}/file={name}/part-*"
            parts = sorted(self.files.glob(pattern), key=lambda part: int(part.name.split("-")[1]))
            self.files.join(parts, f"{output}/{split.name}/{name}")

        with ThreadPoolExecutor(8) as pool:
            jobs = [
                pool.submit(join, number, split, name)
                for number, split in enumerate(self.splits)
                for name in names
            ]
            for job in jobs:
                job.result()

    # --- facts

    @cached_property
    def columns(self) -> list[ColumnFacts]:
        """What was counted of each column."""
        found = self._sizes(self.counts)
        kept = self._sizes(self.vocabulary)
        return [ColumnFacts(found.get(i, 0), kept.get(i, 0)) for i in range(NUM_CATEGORICAL)]

    def _sizes(self, frame: DataFrame) -> dict[int, int]:
        return {row[0]: row[1] for row in frame.groupBy("column").count().collect()}

    @cached_property
    def cardinalities(self) -> list[int]:
        """Number of ids of each column."""
        pairs = zip(self.job.rules, self.columns, strict=True)
        return [rule.cardinality(column.kept) for rule, column in pairs]

    def clicks_and_rare(self) -> tuple[dict[str, int], list[int], list[int]]:
        """Clicks of each split; missing and rare rows of each column. After `write_blocks`."""
        present = self.rows.agg(sql.count("*"), *(sql.count(name) for name in frames.VALUES))
        total, *with_value = next(iter(present.collect()))
        missing = [total - rows for rows in with_value]
        clicks, without_id = dict[str, int](), [0] * NUM_CATEGORICAL
        for number, split in enumerate(self.splits):
            clicks[split.name] = 0
            for part in self.files.glob(f"{self.work}/files/split={number}/file={FACTS}/part-*"):
                facts = self.files.read_json(part.path)
                clicks[split.name] += facts["clicks"]
                without_id = [a + b for a, b in zip(without_id, facts["without_id"], strict=True)]
        if not self.recipe.missing_is_zero:
            without_id = [a - b for a, b in zip(without_id, missing, strict=True)]
        return clicks, missing, without_id

    def numbers(self) -> list[NumberFacts]:
        """Of each integer column."""
        counted = []
        for name in frames.INTEGERS:
            too_small = sql.count(sql.when(sql.col(name) < self.recipe.smallest, 1))
            counted += [sql.count(name), sql.min(name), sql.max(name), too_small]
        total, *rest = next(iter(self.rows.agg(sql.count("*"), *counted).collect()))
        columns = zip(*(rest[place::4] for place in range(4)), strict=True)
        return [NumberFacts(total - there, *others) for there, *others in columns]

    def bad_lines(self, limit: int | None = None) -> Iterator[tuple[int, int, str]]:
        """(file, line number, text) of the bad lines, in input order."""
        bad = self.lines.where(sql.col("bad").isNotNull()).select(
            "file", "block", "sequence", "bad"
        )
        ordered = bad.orderBy("file", "block", "sequence")
        starts = dict[tuple[int, int], int]()
        for file in range(len(self.days)):
            of_file = [block for block in self.blocks if block.file == file]
            sizes = accumulate((block.lines for block in of_file), initial=1)
            for block, line in zip(of_file, sizes, strict=False):
                starts[file, block.block] = line - block.first
        for row in (ordered if limit is None else ordered.limit(limit)).toLocalIterator():
            yield row["file"], starts[row["file"], row["block"]] + row["sequence"], row["bad"]

    def vocabulary_tables(self) -> Iterator[tuple[int, Iterator[pa.Table]]]:
        """(column, pieces): for every column its (value, id, count) by rising value, in pieces."""
        sizes = [column.kept for column in self.columns]
        small: list[int] = []
        for number, size in enumerate(sizes):
            if sum(sizes[i] for i in [*small, number]) > VOCABULARY_ROWS:
                yield from self._whole_vocabularies(small)
                small = []
            if size > VOCABULARY_ROWS:
                yield number, self._vocabulary_pieces(number, -(-size // VOCABULARY_ROWS))
            else:
                small.append(number)
        yield from self._whole_vocabularies(small)

    def _whole_vocabularies(self, columns: list[int]) -> Iterator[tuple[int, Iterator[pa.Table]]]:
        """Several columns in one query."""
        if not columns:
            return
        chosen = self.vocabulary.where(sql.col("column").isin(columns)).toArrow()
        for number in columns:
            of_column = chosen.filter(pc.equal(chosen["column"], number))
            yield number, iter([of_column.select(list(ENTRY)).sort_by("value")])

    def _vocabulary_pieces(self, column: int, pieces: int) -> Iterator[pa.Table]:
        # Values are hashes: equal ranges of them hold about equally many.
        bounds = [(1 << 32) * piece // pieces for piece in range(pieces + 1)]
        for low, high in pairwise(bounds):
            chosen = (sql.col("column") == column) & sql.col("value").between(low, high - 1)
            yield self.vocabulary.where(chosen).select(*ENTRY).toArrow().sort_by("value")

    # --- helpers

    @property
    def _train(self) -> int:
        return [split.name for split in self.splits].index("train")

    def _values(self) -> list[Any]:
        return frames.categories(self.recipe, self.max_rows)

    def _saved(self, name: str, plan: Callable[[], DataFrame]) -> DataFrame:
        """The result of a phase: as an earlier run left it, or computed and written now."""
        path = f"{self.work}/{name}"
        if not self.files.exists(f"{path}/_SUCCESS"):
            plan().write.mode("overwrite").parquet(path)
        return self.spark.read.parquet(path)
