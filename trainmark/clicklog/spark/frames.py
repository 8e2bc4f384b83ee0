"""Preparation as Spark plans: each function takes and gives data frames, and runs nothing.

There is no Python per row. Everything up to `blocks` is plan-level and has a GPU version in the
RAPIDS Accelerator, but for the scan of text lines, which it leaves to the CPU. `blocks` ends in
`mapInArrow`: Arrow batches to numpy to bytes, with the same functions as the embedded engine, so
that logarithms and float16 agree to the last bit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.window import Window

from trainmark.clicklog.arrays import shuffle
from trainmark.clicklog.sources.criteo_format import NUM_CATEGORICAL, NUM_NUMERICAL
from trainmark.clicklog.sources.recipes import Recipe

INTEGERS = [f"n{i}" for i in range(1, NUM_NUMERICAL + 1)]
VALUES = [f"c{i}" for i in range(1, NUM_CATEGORICAL + 1)]
IDS = [f"id{i}" for i in range(1, NUM_CATEGORICAL + 1)]
GOOD_LINE = (
    rf"\A[01](\t(-?0*[0-9]{{1,19}})?){{{NUM_NUMERICAL}}}"
    rf"(\t([0-9a-fA-F]{{1,8}})?){{{NUM_CATEGORICAL}}}\z"
)
PARTITION_BITS = 33
"""Where `monotonically_increasing_id` keeps the partition's number."""


# --- phase 1: lines to integers


def parse(spark: SparkSession, paths: Sequence[str]) -> DataFrame:
    """Every line: where it stands (file, block, sequence), its integers, and its text if bad."""

    def lines(number: int, path: str) -> DataFrame:
        # The line end is given, since Spark would take a lone carriage return for one.
        text = spark.read.text(path, lineSep="\n")
        return text.select(
            sql.lit(number).alias("file"),
            sql.col("_metadata.file_block_start").alias("block"),
            sql.regexp_replace("value", r"\r\z", "").alias("line"),
        )

    every_line = reduce(DataFrame.unionAll, [lines(i, path) for i, path in enumerate(paths)])
    every_line = every_line.withColumn("fields", sql.split("line", "\t", -1))
    fields = sql.col("fields")
    integers = [fields[1 + i].cast("long").alias(name) for i, name in enumerate(INTEGERS)]
    values = [
        sql.conv(
            sql.when(fields[1 + NUM_NUMERICAL + i] != "", fields[1 + NUM_NUMERICAL + i]), 16, 10
        )
        .cast("long")
        .alias(name)
        for i, name in enumerate(VALUES)
    ]
    # Of 19 digits, some are beyond 64 bits: not empty, but no number.
    too_large = reduce(
        Column.__or__,
        [(fields[1 + i] != "") & fields[1 + i].cast("long").isNull() for i in range(NUM_NUMERICAL)],
    )
    bad = ~sql.col("line").rlike(GOOD_LINE) | too_large
    return every_line.select(
        "file",
        "block",
        sql.monotonically_increasing_id().alias("sequence"),
        sql.when(bad, sql.col("line")).alias("bad"),
        fields[0].cast("byte").alias("label"),
        *integers,
        *values,
    )


@dataclass(frozen=True)
class InputBlock:
    """Consecutive lines of a file that one task read."""

    file: int
    block: int
    """Offset in the file."""
    first: int
    """Sequence number of its first line; the others follow without gaps."""
    lines: int
    bad: int


def input_blocks(lines: DataFrame) -> list[InputBlock]:
    """What was read, in input order. Runs a query, with a row for each 128 MB or so of input."""
    counted = lines.groupBy("file", "block").agg(
        sql.min("sequence").alias("first"),
        sql.count("*").alias("lines"),
        sql.count("bad").alias("bad"),
    )
    return sorted(
        (InputBlock(**row.asDict()) for row in counted.collect()), key=lambda b: (b.file, b.block)
    )


def numbered(lines: DataFrame, blocks: Sequence[InputBlock], spark: SparkSession) -> DataFrame:
    """The good rows, numbered through all files in input order."""
    good = [block.lines - block.bad for block in blocks]
    bases = accumulate(good, initial=0)
    base = spark.createDataFrame(
        [(b.file, b.block, b.first, start) for b, start in zip(blocks, bases, strict=False)],
        "file int, block long, first long, base long",
    )
    rows = lines.where(sql.col("bad").isNull()).join(sql.broadcast(base), ["file", "block"])
    if any(block.bad for block in blocks):
        in_block = Window.partitionBy("file", "block").orderBy("sequence")
        within = sql.row_number().over(in_block) - 1
    else:
        within = sql.col("sequence") - sql.col("first")
    return rows.select((sql.col("base") + within).alias("row"), "label", *INTEGERS, *VALUES)


# --- phase 2: vocabularies


def categories(recipe: Recipe, max_rows: Sequence[int | None]) -> list[Column]:
    """The categorical columns as the recipe counts them."""

    def value(name: str, cap: int | None) -> Column:
        column = (
            sql.coalesce(sql.col(name), sql.lit(0)) if recipe.missing_is_zero else sql.col(name)
        )
        return column % sql.lit(cap) if recipe.folds_values and cap else column

    return [value(name, cap).alias(name) for name, cap in zip(VALUES, max_rows, strict=True)]


def counts(rows: DataFrame, values: Sequence[Column]) -> DataFrame:
    """(column, value, count, first): how often each value occurs, and in which row first."""
    pairs = rows.select("row", sql.posexplode(sql.array(*values)).alias("column", "value"))
    return (
        pairs.where(sql.col("value").isNotNull())
        .groupBy("column", "value")
        .agg(sql.count("*").alias("count"), sql.min("row").alias("first"))
    )


def ranked(counted: DataFrame, recipe: Recipe, thresholds: Sequence[int]) -> DataFrame:
    """The values that are kept, in the order of their ids, with a rising `sequence`."""
    threshold = sql.element_at(sql.array(*[sql.lit(t) for t in thresholds]), sql.col("column") + 1)
    kept = counted.where(sql.col("count") >= threshold)
    order = ["first"] if recipe.order == "appearance" else [sql.desc("count"), "value"]
    return kept.orderBy("column", *order).withColumn("sequence", sql.monotonically_increasing_id())


def with_ids(
    ranks: DataFrame, recipe: Recipe, max_rows: Sequence[int | None], spark: SparkSession
) -> DataFrame:
    """(column, value, id, count). Counts the rows of each partition, to number through them."""
    part = sql.shiftright("sequence", PARTITION_BITS).alias("part")
    sizes = ranks.groupBy("column", part).agg(
        sql.min("sequence").alias("start"), sql.count("*").alias("size")
    )
    bases, column, next_id = [], None, 0
    for row in sorted(sizes.collect(), key=lambda r: (r["column"], r["part"])):
        if row["column"] != column:
            column, next_id = row["column"], recipe.first_id
        bases.append((row["column"], row["part"], next_id - row["start"]))
        next_id += row["size"]
    base = spark.createDataFrame(bases, "column int, part long, base long")
    identifier = sql.col("sequence") + sql.col("base")
    if not recipe.folds_values:
        caps = sql.array(*[sql.lit(cap) for cap in max_rows])
        cap = sql.element_at(caps.cast("array<long>"), sql.col("column") + 1)
        identifier = sql.coalesce(identifier % cap, identifier)
    return (
        ranks.withColumn("part", part)
        .join(sql.broadcast(base), ["column", "part"])
        .select("column", "value", identifier.cast("int").alias("id"), "count")
    )


# --- phase 3: ids, order, bytes


def encoded(rows: DataFrame, vocabulary: DataFrame, values: Sequence[Column]) -> DataFrame:
    """(row, label, integers, ids); an id is null where a value has none."""
    joined = rows.select("row", "label", *INTEGERS, *values)
    for number, (name, id_name) in enumerate(zip(VALUES, IDS, strict=True)):
        of_column = vocabulary.where(sql.col("column") == number)
        known = of_column.select(sql.col("value").alias(name), sql.col("id").alias(id_name))
        joined = joined.join(known, name, "left")

    return joined.select("row", "label", *INTEGERS, *IDS)


def ordered(
    rows: DataFrame, starts: Sequence[int], train: int, seed: int, partitions: int
) -> DataFrame:
    """Split by split: the training rows by their random keys, the others as they came.

    Args:
        rows: with `row`, numbered from 0.
        starts: first row of each split, rising, the first one 0.
        train: which of them is the training split.
        seed: of the random order.
        partitions: into how many pieces the result is cut.
    """
    split = sql.lit(0)
    for number, start in enumerate(starts[1:], start=1):
        split = sql.when(sql.col("row") >= start, sql.lit(number)).otherwise(split)
    key = sql.when(sql.col("split") == train, row_key(seed, sql.col("row"))).otherwise(sql.lit(0))
    by = ["split", "key", "row"]
    return (
        rows.withColumn("split", split)
        .withColumn("key", key)
        .repartitionByRange(partitions, *by)
        .sortWithinPartitions(*by)
    )


def row_key(seed: int, row: Column) -> Column:
    """`shuffle.keys`, in the JVM's wrapping 64-bit integers."""

    def mix(x: Column) -> Column:
        x = x.bitwiseXOR(sql.shiftrightunsigned(x, 30)) * sql.lit(_signed(0xBF58476D1CE4E5B9))
        x = x.bitwiseXOR(sql.shiftrightunsigned(x, 27)) * sql.lit(_signed(0x94D049BB133111EB))
        return x.bitwiseXOR(sql.shiftrightunsigned(x, 31))

    golden = sql.lit(_signed(0x9E3779B97F4A7C15))
    origin = mix(sql.lit(seed).cast("long") * golden + 1)
    return sql.shiftrightunsigned(mix(origin + (row + 1) * golden), 64 - shuffle.KEY_BITS)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def blocks(
    rows: DataFrame, recipe: Recipe, rare_ids: Sequence[int], dtypes: Sequence[str]
) -> DataFrame:
    """(split, file, bytes): for every partition, its piece of every file."""
    # The workers need numpy and pyarrow, but not this package: its code travels with the plan.
    from pyspark import cloudpickle

    from trainmark.clicklog.sources import recipes
    from trainmark.clicklog.spark import encode as spark_encode

    for module in (recipes, spark_encode):
        cloudpickle.register_pickle_by_value(module)
    encoder = spark_encode.Encoder(recipe, rare_ids, dtypes)

    def encode(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        return encoder(batches)

    bytes_of_files = rows.select("split", "label", *INTEGERS, *IDS).mapInArrow(
        encode, "split int, file string, data binary"
    )
    # The text writer puts a column's bytes into a file as they are, and a line end after them.
    return bytes_of_files.select("split", "file", sql.col("data").cast("string").alias("value"))
