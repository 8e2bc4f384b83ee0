"""`--engine spark`: the phases of preparation as a Spark job, for logs beyond one machine.

The result is what the embedded engine writes, byte for byte, the random order of the training rows
included. Input and output are any Hadoop paths. Spark reads the lines, and groups, sorts and stores
blocks of rows; what is done with rows is the embedded engine's own code. Most phases leave their
result in a work folder beside the output, so that a run that was stopped continues:

    blocks       text -> the embedded engine's store, block by block; bad lines are listed
    counts       of the values of each column that are not rare
    vocabulary   the driver numbers what was counted, and Spark brings the tables to all machines
    pieces       ids, and rows in their order: the bytes of every file, in pieces
    output       the JVM joins the pieces to `train/cat_0.bin` and so on, through Hadoop's streams

blocks.py, counts.py and pieces.py hold what the executors do. The driver collects a row per block,
and the values that are kept.
"""

import json
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import accumulate
from pathlib import Path

import numpy as np
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

from trainmark.clickdata import feature_spec
from trainmark.clicklog.engine import numbers
from trainmark.clicklog.engine.column_reader import ColumnReader
from trainmark.clicklog.engine.job import Job
from trainmark.clicklog.engine.splits import Split
from trainmark.clicklog.engine.store import BlockRecord
from trainmark.clicklog.engine.vocabulary import SpecialIds, Vocabulary
from trainmark.clicklog.engine.vocabulary_builder import Spilled, VocabularyBuilder
from trainmark.clicklog.engine.vocabulary_files import num_kept
from trainmark.clicklog.sources.criteo_format import NUM_NUMERICAL
from trainmark.clicklog.sources.criteo_text import CriteoSource
from trainmark.clicklog.sources.rows import NumberFacts
from trainmark.clicklog.spark.blocks import Batches, Blocks, Parse, Place, no_blocks
from trainmark.clicklog.spark.counts import NO_LIMIT, Count, Merge, entries
from trainmark.clicklog.spark.hadoop import File, Hadoop
from trainmark.clicklog.spark.pieces import FACTS, Encode, Order, Shares

LINES = 1 << 16
"""Of a block."""
BATCH = 8
"""Blocks, or parts of them, that go to Python at a time."""
SHARE_ROWS = 1 << 20
"""The most rows whose bytes a task holds at once: about 200 bytes each."""
MIN_SHARE_ROWS = 1 << 17
RANGE_ROWS = 1 << 24
"""The most rows of a column for which a task counts all values."""
MAX_RANGE_BITS = 10
PARQUET = {
    "compression": "none",
    # Blocks are megabytes: look at the size of what waits to be written after each.
    "parquet.page.size.row.check.min": "1",
    "parquet.block.size": str(16 << 20),
    "parquet.enable.dictionary": "false",
}


@dataclass(frozen=True)
class Block:
    """Consecutive lines of a file."""

    place: Place
    lines: int
    record: BlockRecord

    @property
    def file(self) -> int:
        return self.place[0]


class SparkEngine:
    """One preparation. Its phases run when their results are asked for, each once.

    Args:
        spark: the session.
        files: the days.
        job: what to prepare, by a source of lines; its output is not looked at.
        work: folder for the phases' results.
        here: an empty folder on this machine, for vocabularies.
    """

    def __init__(
        self, spark: SparkSession, files: Sequence[File], job: Job, work: str, here: Path
    ) -> None:
        if not isinstance(job.source, CriteoSource):
            raise TypeError(f"{job.source} reads no lines of Criteo's")
        self.spark, self.days, self.job, self.source = spark, files, job, job.source
        self.work, self.here = work, here
        self.files = Hadoop(spark)
        self.parallel = spark.sparkContext.defaultParallelism

    # --- lines to blocks

    @cached_property
    def stored(self) -> DataFrame:
        def plan() -> DataFrame:
            days = [self._lines(number, day.path) for number, day in enumerate(self.days)]
            return self._mapped(reduce(DataFrame.unionAll, days), Parse(self.source))

        return self._saved("blocks", plan, batch=LINES)

    def _lines(self, number: int, path: str) -> DataFrame:
        # The line end is given, since Spark would take a lone carriage return for one.
        text = self.spark.read.text(path, lineSep="\n")
        return text.select(
            sql.lit(number).cast("long").alias("file"),
            sql.col("_metadata.file_block_start").alias("block"),
            sql.concat(sql.col("value").cast("binary"), sql.lit(b"\n")).alias("line"),
        )

    @cached_property
    def blocks(self) -> list[Block]:
        """In input order."""
        found = self.stored.select("file", "block", "part", "lines", "record").collect()
        blocks = [
            Block(tuple(place), lines, BlockRecord.from_json(json.loads(record)))
            for *place, lines, record in found
        ]
        return sorted(blocks, key=lambda block: block.place)

    @cached_property
    def _numbered(self) -> Blocks:
        starts = accumulate((block.record.rows for block in self.blocks), initial=0)
        places = (block.place for block in self.blocks)
        return Blocks(self.source.schema, dict(zip(places, starts, strict=False)))

    def rows_per_file(self) -> list[int]:
        """Good rows of each day."""
        rows = [0] * len(self.days)
        for block in self.blocks:
            rows[block.file] += block.record.rows
        return rows

    def bad_rows(self) -> int:
        """How many lines were bad."""
        return sum(block.record.bad for block in self.blocks)

    def bad_lines(self) -> Iterator[tuple[int, int, str]]:
        """File, line number and reason of the bad lines, in input order."""
        first_lines = dict[Place, int]()
        file, line = -1, 1
        for block in self.blocks:
            file, line = block.file, line if block.file == file else 1
            first_lines[block.place] = line
            line += block.lines
        bad = self.stored.where(sql.col("bad") != "").select("file", "block", "part", "bad")
        for *place, text in bad.orderBy("file", "block", "part").toLocalIterator():
            for number, reason in json.loads(text):
                yield place[0], first_lines[tuple(place)] - 1 + number, reason

    # --- counts to vocabularies

    @cached_property
    def splits(self) -> list[Split]:
        """In input order; together they are all rows."""
        return sorted(self.job.split.apply(self.rows_per_file()), key=lambda split: split.start)

    @cached_property
    def _train(self) -> Split:
        return next(split for split in self.splits if split.name == "train")

    @cached_property
    def _keyed(self) -> bool:
        return self.job.rules[0].recipe.order == "appearance"

    @cached_property
    def counts(self) -> DataFrame:
        """Of each column and range of values."""
        rows = sum(self.rows_per_file())
        counted = self._train if self.job.vocabulary_from == "train" else Split("all", 0, rows)
        bits = min((rows // RANGE_ROWS).bit_length(), MAX_RANGE_BITS)
        rules = self.job.rules

        def plan() -> DataFrame:
            count = Count(self._numbered, rules, counted, bits)
            found = self._mapped(self.stored.select(*Blocks.columns), count)
            grouped = self._grouped(found, len(rules) << bits, "column", "range")
            return self._mapped(grouped, Merge([r.threshold for r in rules], self._keyed))

        return self._saved("value_counts", plan)

    @cached_property
    def distinct(self) -> list[int]:
        """How many values of each column occur; its vocabulary is written on this machine."""
        parts: list[dict[int, Spilled]] = [{} for _ in self.job.rules]
        for column, of_range, distinct, data in self.counts.toLocalIterator(True):
            path = self.here / f"{column}.{of_range}.counts"
            path.write_bytes(data)
            kept = entries(data, self._keyed)
            parts[column][of_range] = Spilled(path, "<u4", kept, distinct, self._keyed)
        distinct = []
        for number, (rule, ranges) in enumerate(zip(self.job.rules, parts, strict=True)):
            rising = [ranges[of_range] for of_range in sorted(ranges)]
            builder = VocabularyBuilder([self._readers[number]], rule, self._train)
            # In Criteo's recipes, a value that is missing is none.
            distinct.append(builder.build(rising, self.path_of(number), missing=0))
        return distinct

    @cached_property
    def _readers(self) -> list[ColumnReader]:
        """Of no rows: they know how values are written."""
        store = no_blocks(self.source.schema)
        return [ColumnReader(store, number) for number in range(len(self.job.rules))]

    def path_of(self, column: int) -> Path:
        """A vocabulary's file on this machine."""
        return self.here / f"cat_{column}.parquet"

    @cached_property
    def kept(self) -> list[int]:
        """How many values of each column have an id."""
        return [num_kept(self.path_of(number)) for number in range(len(self.distinct))]

    @cached_property
    def cardinalities(self) -> list[int]:
        """Number of ids of each column."""
        pairs = zip(self.job.rules, self.kept, strict=True)
        return [rule.cardinality(kept) for rule, kept in pairs]

    # --- ids to files

    def _files(self) -> list[tuple[str, int]]:
        """Name and bytes of a row."""
        ids = [np.dtype(feature_spec.dtype_for(size)).itemsize for size in self.cardinalities]
        columns = [(f"cat_{number}.bin", width) for number, width in enumerate(ids)]
        return [("label.bin", 1), ("numerical.bin", 2 * NUM_NUMERICAL), *columns]

    def write_pieces(self) -> None:
        """The bytes of all files, in pieces."""
        path = f"{self.work}/pieces"
        if self.files.exists(f"{path}/_SUCCESS"):
            return
        rows = sum(self.rows_per_file())
        size = min(max(rows // (8 * self.parallel), MIN_SHARE_ROWS), SHARE_ROWS)
        bits = (self._train.rows // size).bit_length()
        shares = Shares(self.splits, self.job.seed, bits, size)
        tables, special = self._send_tables()
        encode = Encode(self._numbered, shares, self.job.rules, self.cardinalities, special, tables)
        with self._batches_of(BATCH):
            parts = self._mapped(self.stored.select(*Blocks.columns), encode)
            grouped = self._grouped(parts, (1 << bits) + 2 + rows // size, "split", "share")
            ordered = grouped.sortWithinPartitions("split", "share", "first")
            pieces = self._mapped(ordered, Order(shares, self._files()))
            # The text writer puts a column's bytes into a file as they are, and a line end behind.
            text = pieces.withColumn("value", sql.col("data").cast("string")).drop("data")
            text.write.mode("overwrite").partitionBy("file", "split", "share").text(path)

    def _send_tables(self) -> tuple[str, list[SpecialIds]]:
        """Bring the tables of ids to all machines: how their names begin, and ids of what they
        do not hold."""
        name = f"{uuid.uuid4().hex}."  # of no other run of this session
        special = []
        for number, rule in enumerate(self.job.rules):
            tables = self.here / f"{name}{number}"
            known = Vocabulary(self.path_of(number), self._readers[number], NO_LIMIT, tables)
            known.share()
            special.append(SpecialIds.of(known, rule))
        for path in self.here.glob(f"{name}*"):
            self.spark.sparkContext.addFile(str(path))
        return name, special

    def join_pieces(self, output: str) -> None:
        """Write the files of every split under `output`."""

        def share_of(part: File) -> int:
            return int(re.findall(r"/share=(\d+)/", part.path)[-1])

        def join(name: str, number: int, split: Split) -> None:
            pattern = f"{self.work}/pieces/file={name}/split={number}/share=*/part-*"
            parts = sorted(self.files.glob(pattern), key=share_of)
            self.files.join(parts, f"{output}/{split.name}/{name}")

        with ThreadPoolExecutor(8) as pool:
            joins = [
                pool.submit(join, name, number, split)
                for name, _ in self._files()
                for number, split in enumerate(self.splits)
            ]
            for done in joins:
                done.result()

    # --- facts

    def clicks_and_rare(self) -> tuple[dict[str, int], list[int]]:
        """Clicks of each split; rare rows of each column. After `write_pieces`."""
        facts = self.spark.read.text(f"{self.work}/pieces/file={FACTS}")
        clicks = dict.fromkeys((split.name for split in self.splits), 0)
        rare = np.zeros(len(self.job.rules), np.int64)
        for row in facts.collect():
            of_labels, _, *of_columns = json.loads(row["value"])
            clicks[self.splits[row["split"]].name] += of_labels
            rare += of_columns
        return clicks, list(map(int, rare))

    def missing(self) -> list[int]:
        """Missing values of each column."""
        columns = zip(*(block.record.columns for block in self.blocks), strict=True)
        return [sum(stored.missing for stored in column) for column in columns]

    def numbers(self) -> list[NumberFacts]:
        """Of each integer column."""
        columns = zip(*(block.record.numbers for block in self.blocks), strict=True)
        return [numbers.added(column) for column in columns]

    # --- helpers

    def _mapped(self, frame: DataFrame, task: Parse | Count | Merge | Encode | Order) -> DataFrame:
        def run(batches: Batches) -> Batches:
            return task(batches)

        return frame.mapInArrow(run, task.gives)

    def _grouped(self, frame: DataFrame, groups: int, *keys: str) -> DataFrame:
        """Rows of the same keys one after the other, in the same task."""
        count = min(groups, max(4 * self.parallel, groups // 16))
        return frame.repartition(count, *keys).sortWithinPartitions(*keys)

    @contextmanager
    def _batches_of(self, rows: int) -> Iterator[None]:
        """Let Spark send so many rows to Python at a time."""
        key = "spark.sql.execution.arrow.maxRecordsPerBatch"
        self.spark.conf.set(key, rows)
        try:
            yield
        finally:
            self.spark.conf.unset(key)

    def _saved(self, name: str, plan: Callable[[], DataFrame], batch: int = BATCH) -> DataFrame:
        """The result of a phase: as an earlier run left it, or computed and written now."""
        path = f"{self.work}/{name}"
        if not self.files.exists(f"{path}/_SUCCESS"):
            with self._batches_of(batch):
                plan().write.mode("overwrite").options(**PARQUET).parquet(path)
        return self.spark.read.parquet(path)
