"""What `benchmarks/prepare.py` measures, each in a process of its own: our engines and peers."""

import argparse
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

THRESHOLD = 3


def child_embedded(arguments: argparse.Namespace) -> dict[str, float]:
    from trainmark import cli
    from trainmark.clicklog import criteo

    with cli.doing_without(*cli.NOT_NEEDED):  # as the command does
        return criteo.prepare(_options(arguments, memory=arguments.memory))


def child_command(arguments: argparse.Namespace) -> dict[str, float]:
    from trainmark import cli

    words = ["--input", f"{arguments.input}/day_*", "--output", str(arguments.output)]
    if code := cli.main(["prepare", "criteo", *words, "--frequency-threshold", str(THRESHOLD)]):
        raise SystemExit(code)
    return {}


def child_spark(arguments: argparse.Namespace) -> dict[str, float]:
    from trainmark.clicklog import criteo

    conf = ("spark.driver.memory=2g", "spark.ui.showConsoleProgress=false")
    options = _options(arguments, engine="spark", master=arguments.master, spark_conf=conf)
    return criteo.prepare(options)


def child_plain_spark(arguments: argparse.Namespace) -> dict[str, float]:
    from benchmarks import prepare_spark

    return prepare_spark.prepare(arguments, THRESHOLD)


def _options(arguments: argparse.Namespace, **more: Any) -> Any:
    from trainmark.clicklog import criteo

    return criteo.Options(
        input=f"{arguments.input}/day_*",
        output=arguments.output,
        frequency_threshold=str(THRESHOLD),
        **more,
    )


# --- what one writes first: counted, mapped, shuffled in memory, written

NAMES = [f"c{number}" for number in range(40)]
NUMBERS, VALUES = NAMES[1:14], NAMES[14:]


def child_pandas(arguments: argparse.Namespace) -> dict[str, float]:
    """A day at a time."""
    import numpy as np
    import pandas as pd

    started = time.perf_counter()
    types = dict.fromkeys(NUMBERS, "float64") | dict.fromkeys(VALUES, "category")
    frames, counts = [], [pd.Series(dtype="int64") for _ in VALUES]
    for day in sorted(arguments.input.glob("day_*")):
        frame = pd.read_csv(day, sep="\t", header=None, names=NAMES, dtype=types | {"c0": "int8"})
        for number, name in enumerate(VALUES):
            counts[number] = counts[number].add(frame[name].value_counts(), fill_value=0)
        frames.append(frame)
    read = time.perf_counter()
    ids = []
    for count in counts:
        kept = count[count >= THRESHOLD].sort_values(ascending=False, kind="stable")
        ids.append(pd.Series(np.arange(1, len(kept) + 1, dtype="int32"), kept.index))
    counted = time.perf_counter()

    def transformed(frame: Any) -> Any:
        mapped = [frame[name].map(ids[n]).astype("float64") for n, name in enumerate(VALUES)]
        return (
            frame["c0"].to_numpy("bool"),
            _logarithms(frame[NUMBERS].to_numpy()),
            [column.fillna(0).to_numpy("int32") for column in mapped],
        )

    parts = [transformed(frame) for frame in frames]
    labels, numbers = (np.concatenate([part[i] for part in parts]) for i in range(2))
    columns = (np.concatenate([part[2][n] for part in parts]) for n in range(len(VALUES)))
    _write_splits(arguments.output, labels, numbers, columns, len(frames[-1]))
    ended = time.perf_counter()
    return {"parse": read - started, "vocabulary": counted - read, "write": ended - counted}


def child_polars(arguments: argparse.Namespace) -> dict[str, float]:
    """All days at once, all columns together."""
    import polars as pl

    started = time.perf_counter()
    types = dict.fromkeys(NUMBERS, pl.Float64) | dict.fromkeys(VALUES, pl.String)
    days = sorted(arguments.input.glob("day_*"))
    frames = [
        pl.read_csv(
            day,
            has_header=False,
            separator="\t",
            quote_char=None,
            schema={"c0": pl.Int8} | types,
        )
        for day in days
    ]
    log = pl.concat(frames)
    read = time.perf_counter()
    ids = pl.collect_all(
        log.lazy()
        .group_by(name)
        .len()
        .filter(pl.col("len") >= THRESHOLD, pl.col(name).is_not_null())
        .sort("len", descending=True)
        .select(name, pl.int_range(1, pl.len() + 1, dtype=pl.Int32).alias("id"))
        for name in VALUES
    )
    counted = time.perf_counter()
    mapped = pl.collect_all(
        log.lazy()
        .select(name)
        .join(known.lazy(), on=name, how="left", maintain_order="left")
        .select(pl.col("id").fill_null(0))
        for name, known in zip(VALUES, ids, strict=True)
    )
    labels, numbers = log["c0"].to_numpy() > 0, _logarithms(log.select(NUMBERS).to_numpy())
    columns = (column["id"].to_numpy() for column in mapped)
    _write_splits(arguments.output, labels, numbers, columns, len(frames[-1]))
    ended = time.perf_counter()
    return {"parse": read - started, "vocabulary": counted - read, "write": ended - counted}


def child_duckdb(arguments: argparse.Namespace) -> dict[str, float]:
    """A table of the log in memory, and one of each column's ids."""
    import duckdb
    import numpy as np

    started = time.perf_counter()
    database = duckdb.connect()
    kinds = dict.fromkeys(NUMBERS, "DOUBLE") | dict.fromkeys(VALUES, "VARCHAR")
    types = ", ".join(f"'{name}': '{kind}'" for name, kind in ({"c0": "TINYINT"} | kinds).items())
    days = sorted(map(str, arguments.input.glob("day_*")))
    source = "read_csv({}, delim='\t', header=false, quote='', columns={{{}}})"
    for number, day in enumerate(days):
        verb = "INSERT INTO log" if number else "CREATE TABLE log AS"
        database.execute(f"{verb} SELECT * FROM {source.format([day], types)}")
    (last_rows,) = database.execute(
        f"SELECT count(*) FROM {source.format(days[-1:], types)}"
    ).fetchone()
    read = time.perf_counter()
    for name in VALUES:
        database.execute(
            f"CREATE TABLE of_{name} AS SELECT {name}, "
            "CAST(row_number() OVER (ORDER BY count(*) DESC) AS INTEGER) AS id FROM log "
            f"WHERE {name} IS NOT NULL GROUP BY {name} HAVING count(*) >= {THRESHOLD}"
        )
    counted = time.perf_counter()

    def column(name: str) -> Any:
        found = database.execute(
            f"SELECT coalesce(id, 0) AS id FROM log LEFT JOIN of_{name} USING ({name}) "
            "ORDER BY log.rowid"
        )
        return found.fetchnumpy()["id"]

    dense = database.execute(f"SELECT c0, {', '.join(NUMBERS)} FROM log ORDER BY rowid")
    labels, *parts = (np.ma.filled(column, np.nan) for column in dense.fetchnumpy().values())
    labels, numbers = labels > 0, _logarithms(np.stack(parts, axis=1))
    _write_splits(arguments.output, labels, numbers, map(column, VALUES), last_rows)
    ended = time.perf_counter()
    return {"parse": read - started, "vocabulary": counted - read, "write": ended - counted}


def _logarithms(numbers: Any) -> Any:
    """ln(x + 3), and 0 for what is missing or too small."""
    import numpy as np

    return np.nan_to_num(np.log(np.maximum(numbers + 3, 1))).astype("float16")


def _write_splits(
    output: Path, labels: Any, numbers: Any, columns: Iterable[Any], last_rows: int
) -> None:
    """The days but for the last one in a random order; that one's halves as they are."""
    import numpy as np

    trained, half = len(labels) - last_rows, last_rows // 2
    splits: dict[str, Any] = {
        "train": np.random.default_rng(0).permutation(trained),
        "test": slice(trained, trained + half),
        "validation": slice(trained + half, None),
    }
    for split in splits:
        (output / split).mkdir(parents=True)
    ids = ((f"cat_{number}", column) for number, column in enumerate(columns))
    for name, column in (("label", labels), ("numerical", numbers), *ids):
        for split, rows in splits.items():
            column[rows].tofile(output / split / f"{name}.bin")


def child_parse(arguments: argparse.Namespace) -> dict[str, float]:
    """Parsing alone, by Arrow's reader on all cores, into columns that are thrown away."""
    import pyarrow as pa
    import pyarrow.csv as csv

    started = time.perf_counter()
    names = [f"c{number}" for number in range(40)]
    types = dict.fromkeys(names[:14], pa.int64()) | dict.fromkeys(names[14:], pa.string())
    for day in sorted(arguments.input.glob("day_*")):
        csv.read_csv(
            day,
            csv.ReadOptions(column_names=names, block_size=8 << 20),
            csv.ParseOptions(delimiter="\t", quote_char=False),
            csv.ConvertOptions(column_types=types),
        )
    return {"parse": time.perf_counter() - started}


# --- other kinds of input, of the same rows

CSV_COLUMNS = "label=1 numerical=2-14:log categorical=15-40"
PARQUET_COLUMNS = "label=label numerical=I*:log categorical=C*"


def child_csv(arguments: argparse.Namespace) -> dict[str, float]:
    """The log's own text: tabs, no header, values as strings."""
    return _by_command(arguments, "csv", "day_*", CSV_COLUMNS, "--delimiter", "tab", "--no-header")


def child_parquet(arguments: argparse.Namespace) -> dict[str, float]:
    return _by_command(arguments, "parquet", "day_*.parquet", PARQUET_COLUMNS)


def _by_command(
    arguments: argparse.Namespace, kind: str, files: str, columns: str, *more: str
) -> dict[str, float]:
    """As users type it."""
    from trainmark.cli import main

    paths = ["--input", f"{arguments.input}/{files}", "--output", str(arguments.output)]
    if main(["prepare", kind, *paths, "--columns", columns, *more]):
        raise SystemExit(1)
    return {}


def child_npy(arguments: argparse.Namespace) -> dict[str, float]:
    from trainmark.clicklog import npy

    npy.prepare(npy.Options(input=arguments.input, output=arguments.output))
    return {}


def child_tokens(arguments: argparse.Namespace) -> dict[str, float]:
    from trainmark.corpus import tokens

    tokens.prepare(
        tokens.Options(
            input=f"{arguments.input}/*.txt",
            tokenizer=arguments.input,
            output=arguments.output,
            append_eod=False,
        )
    )
    return {}


CHILDREN: dict[str, Callable[[argparse.Namespace], dict[str, float]]] = {
    "command": child_command,
    "embedded": child_embedded,
    "spark": child_spark,
    "plain_spark": child_plain_spark,
    "pandas": child_pandas,
    "polars": child_polars,
    "duckdb": child_duckdb,
    "parse": child_parse,
    "csv": child_csv,
    "parquet": child_parquet,
    "npy": child_npy,
    "tokens": child_tokens,
}
