"""Preparation as a plain Spark job, by the method that NVIDIA describes for DLRM; own code.

Counts by DataFrame, a broadcast join for every column, Parquet in between and at the end. What
NVIDIA does after that, from Parquet to the files that training reads, is left out here.
"""

import argparse
import subprocess
import time
from functools import reduce
from pathlib import Path
from typing import Any

SETTINGS = {
    "spark.driver.memory": "6g",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.autoBroadcastJoinThreshold": str(1 << 30),
    "spark.driver.maxResultSize": "4g",
}
INTEGERS = [f"_c{number}" for number in range(1, 14)]
VALUES = [f"_c{number}" for number in range(14, 40)]


def prepare(arguments: argparse.Namespace, threshold: int) -> dict[str, float]:
    """Write the dataset as Parquet; seconds of each phase."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(arguments.master)
    for key, value in SETTINGS.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    output = arguments.output
    days = sorted(arguments.input.glob("day_*"))
    started = time.perf_counter()
    _count(spark, days, output, threshold)
    counted = time.perf_counter()
    models = [_model(spark, output, column) for column in range(len(VALUES))]
    _transformed(_read(spark, days[:-1]), models, shuffled=True).write.parquet(f"{output}/train")
    for name, half in zip(("test", "validation"), _halves(days[-1], output), strict=True):
        _transformed(_read(spark, [half]), models, shuffled=False).write.parquet(f"{output}/{name}")
    ended = time.perf_counter()
    spark.stop()
    return {"vocabulary": counted - started, "encode": ended - counted}


def _read(spark: Any, days: list[Path]) -> Any:
    types = ["_c0 int", *(f"{name} int" for name in INTEGERS), *(f"{n} string" for n in VALUES)]
    return spark.read.csv([str(day) for day in days], schema=", ".join(types), sep="\t")


def _count(spark: Any, days: list[Path], output: Path, threshold: int) -> None:
    """Values of each column, numbered from 1 by falling count."""
    from pyspark.sql import Window
    from pyspark.sql import functions as sql

    pairs = _read(spark, days).select(sql.posexplode(sql.array(*VALUES)).alias("column", "value"))
    counts = (
        pairs.where(sql.col("value").isNotNull())
        .groupBy("column", "value")
        .count()
        .where(sql.col("count") >= threshold)
    )
    rank = sql.row_number().over(Window.partitionBy("column").orderBy(sql.desc("count")))
    counts.withColumn("id", rank).write.partitionBy("column").parquet(f"{output}/models")


def _model(spark: Any, output: Path, column: int) -> Any:
    from pyspark.sql import functions as sql

    read = spark.read.schema("value string, id int").parquet(f"{output}/models/column={column}")
    return read.select(
        sql.col("value").alias(VALUES[column]), sql.col("id").alias(f"id{VALUES[column]}")
    )


def _transformed(rows: Any, models: list[Any], *, shuffled: bool) -> Any:
    from pyspark.sql import functions as sql

    joined = reduce(
        lambda frame, model: frame.join(sql.broadcast(model), model.columns[0], "left"),
        models,
        rows,
    )
    numbers = [
        sql.coalesce(sql.log(sql.col(name) + 3), sql.lit(0.0)).cast("float").alias(name)
        for name in INTEGERS
    ]
    ids = [sql.coalesce(sql.col(f"id{name}"), sql.lit(0)).alias(name) for name in VALUES]
    columns = joined.select("_c0", *numbers, *ids)
    if not shuffled:
        return columns
    ordinal = columns.withColumn("ordinal", sql.rand())
    partitions = 8 * rows.sparkSession.sparkContext.defaultParallelism
    spread = ordinal.repartition(partitions, "ordinal")
    return spread.sortWithinPartitions("ordinal").drop("ordinal")


def _halves(day: Path, output: Path) -> list[Path]:
    """The last day's halves as files, by the shell's own tools."""
    lines = int(subprocess.check_output(["wc", "-l", day]).split()[0])
    found = []
    for name, part in (("test", ["head", "-n"]), ("validation", ["tail", "-n"])):
        count = lines // 2 if name == "test" else lines - lines // 2
        found.append(output / f"{name}.txt")
        with found[-1].open("wb") as file:
            subprocess.run([*part, str(count), day], stdout=file, check=True)
    return found
