"""What `benchmarks/prepare.py` measures, each in a process of its own: our engines and peers."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

THRESHOLD = 3


def child_embedded(arguments: argparse.Namespace) -> dict[str, float]:
    from trainmark import cli
    from trainmark.clicklog import criteo

    with cli.doing_without(*cli.NOT_NEEDED):  # as the command does
        return criteo.prepare(_options(arguments, memory=arguments.memory))


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


def child_pandas(arguments: argparse.Namespace) -> dict[str, float]:
    """What one writes first: a day at a time, counted, mapped, shuffled in memory, written."""
    import numpy as np
    import pandas as pd

    started = time.perf_counter()
    names = [f"c{number}" for number in range(40)]
    types = dict.fromkeys(names[1:14], "float64") | dict.fromkeys(names[14:], "category")
    days = sorted(arguments.input.glob("day_*"))
    frames, counts = [], [pd.Series(dtype="int64") for _ in range(26)]
    for day in days:
        frame = pd.read_csv(day, sep="\t", header=None, names=names, dtype=types | {"c0": "int8"})
        for number, name in enumerate(names[14:]):
            counts[number] = counts[number].add(frame[name].value_counts(), fill_value=0)
        frames.append(frame)
    read = time.perf_counter()
    ids = []
    for count in counts:
        kept = count[count >= THRESHOLD].sort_values(ascending=False, kind="stable")
        ids.append(pd.Series(np.arange(1, len(kept) + 1, dtype="int32"), kept.index))
    counted = time.perf_counter()

    def transformed(frame: Any) -> Any:
        numbers = np.log(np.maximum(frame[names[1:14]].to_numpy() + 3, 1))
        mapped = [frame[name].map(ids[n]).astype("float64") for n, name in enumerate(names[14:])]
        return (
            frame["c0"].to_numpy("bool"),
            np.nan_to_num(numbers).astype("float16"),
            [column.fillna(0).to_numpy("int32") for column in mapped],
        )

    def write(folder: Path, parts: list[Any], order: Any) -> None:
        folder.mkdir(parents=True)
        pick = slice(None) if order is None else order
        np.concatenate([part[0] for part in parts])[pick].tofile(folder / "label.bin")
        np.concatenate([part[1] for part in parts])[pick].tofile(folder / "numerical.bin")
        for number in range(26):
            column = np.concatenate([part[2][number] for part in parts])
            column[pick].tofile(folder / f"cat_{number}.bin")

    half = len(frames[-1]) // 2
    test, validation = frames[-1].iloc[:half], frames[-1].iloc[half:]
    train = [transformed(frame) for frame in frames[:-1]]
    order = np.random.default_rng(0).permutation(sum(len(part[0]) for part in train))
    write(arguments.output / "train", train, order)
    write(arguments.output / "test", [transformed(test)], None)
    write(arguments.output / "validation", [transformed(validation)], None)
    ended = time.perf_counter()
    return {"parse": read - started, "vocabulary": counted - read, "write": ended - counted}


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
    "embedded": child_embedded,
    "spark": child_spark,
    "plain_spark": child_plain_spark,
    "pandas": child_pandas,
    "parse": child_parse,
    "csv": child_csv,
    "parquet": child_parquet,
    "npy": child_npy,
    "tokens": child_tokens,
}
