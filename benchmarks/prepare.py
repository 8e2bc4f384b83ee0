"""Preparation of click logs: the embedded engine beside Spark and a plain pandas script.

Generates logs like Criteo's, with power-law columns of up to 8 million values, of 4 and of 40
million rows (1 and 10 GB of text), and prepares them with frequency threshold 3, each time in a
process of its own, whose memory (with its children's) is sampled. About ten minutes on 2 cores.

    PYTHONPATH=. python benchmarks/prepare.py                      everything
    PYTHONPATH=. python benchmarks/prepare.py --only embedded-4m   one part: embedded-4m, -40m,
                                                    spark-4m, pandas-4m, parse-4m, killed-4m
    PYTHONPATH=. python benchmarks/prepare.py --folder /big/disk   where the logs go, and stay

Results of the parts that ran replace those in benchmarks/results/prepare.json.
"""

import argparse
import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.common import RESULTS, write_results

CARDINALITIES = (
    *(7912889, 33823, 17139, 7339, 20046, 4, 7105, 1382, 63, 5554114, 582469, 245828, 11),
    *(2209, 10667, 104, 4, 968, 15, 8165896, 2675940, 7156453, 302516, 12022, 97, 35),
)
"""Criteo's own, at frequency threshold 15."""
SIZES = {"4m": 4_000_000, "40m": 40_000_000}
DAYS = 8
THRESHOLD = 3
REPEATS = 3
"""Runs of a short part; the median counts."""
KILLS = 20
ROW_BYTES = 267
DISK_BYTES_PER_ROW = ROW_BYTES + 300
"""The log, the store, the dataset, and the dataset of another engine to compare."""
PARTS = ("embedded-4m", "parse-4m", "pandas-4m", "spark-4m", "embedded-40m", "killed-4m")


SIDE_PARTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "parse-4m": lambda row: {"arrow_parse_alone_seconds": row["seconds"]},
    "killed-4m": lambda row: {key: row[key] for key in ("kills", "same_bytes")},
}


# --- what runs in a process of its own


def child_embedded(arguments: argparse.Namespace) -> dict[str, float]:
    from trainmark.clicklog import criteo

    return criteo.prepare(_options(arguments, memory=arguments.memory))


def child_spark(arguments: argparse.Namespace) -> dict[str, float]:
    from trainmark.clicklog import criteo

    conf = ("spark.driver.memory=5g", "spark.ui.enabled=false")
    return criteo.prepare(_options(arguments, engine="spark", master="local[2]", spark_conf=conf))


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


CHILDREN: dict[str, Callable[[argparse.Namespace], dict[str, float]]] = {
    "embedded": child_embedded,
    "spark": child_spark,
    "pandas": child_pandas,
    "parse": child_parse,
}


# --- measuring


def command(kind: str, raw: Path, output: Path, *more: str) -> list[str]:
    paths = ["--input", str(raw), "--output", str(output)]
    return [sys.executable, str(Path(__file__).resolve()), "--child", kind, *paths, *more]


def measure(kind: str, raw: Path, output: Path, *more: str) -> dict[str, Any]:
    """Run a child; seconds from start to end, peak memory of its processes, its phases."""
    shutil.rmtree(output, ignore_errors=True)
    started = time.perf_counter()
    child = subprocess.Popen(command(kind, raw, output, *more), stdout=subprocess.PIPE)
    peak = [0]
    watcher = threading.Thread(target=_watch, args=(child, peak))
    watcher.start()
    text, _ = child.communicate()
    seconds = time.perf_counter() - started
    watcher.join()
    if child.returncode:
        raise SystemExit(f"{kind} failed; see above")
    phases = json.loads(text.decode().splitlines()[-1])
    return {"seconds": seconds, "peak_mb": peak[0] / 1e6, "phase_seconds": phases}


def _watch(child: subprocess.Popen, peak: list[int]) -> None:
    process = psutil.Process(child.pid)
    while child.poll() is None:
        total = 0
        try:
            for one in (process, *process.children(recursive=True)):
                total += one.memory_info().rss
        except psutil.NoSuchProcess:
            pass
        peak[0] = max(peak[0], total)
        time.sleep(0.02)


def row_for(part: str, raw: Path, measured: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    middle = sorted(measured, key=lambda one: one["seconds"])[len(measured) // 2]
    mb = sum(path.stat().st_size for path in raw.glob("day_*")) / 1e6
    engine, _, size = part.partition("-")
    return {
        "system": "trainmark" if engine in ("embedded", "spark") else engine,
        "engine": engine,
        "rows": SIZES[size],
        "mb": round(mb, 1),
        "seconds": round(middle["seconds"], 3),
        "mb_per_s": round(mb / middle["seconds"], 1),
        "rows_per_s": round(SIZES[size] / middle["seconds"]),
        "peak_mb": round(max(one["peak_mb"] for one in measured), 1),
        "phase_seconds": {name: round(s, 3) for name, s in middle["phase_seconds"].items()},
        "all_seconds": [round(one["seconds"], 3) for one in measured],
        **more,
    }


def run_part(part: str, raw: Path, folder: Path) -> dict[str, Any]:
    engine = part.partition("-")[0]
    output = folder / "out"
    if engine == "killed":
        return killed(part, raw, folder)
    more = ("--memory", "1G") if part == "embedded-40m" else ()
    repeats = REPEATS if part in ("embedded-4m", "parse-4m") else 1
    measured = []
    for _ in range(repeats):
        if part.endswith("-4m"):
            _warm(raw)
        measured.append(measure(engine, raw, output, *more))
    shutil.rmtree(output, ignore_errors=True)
    return row_for(part, raw, measured, **({"memory_flag": more[1]} if more else {}))


def _warm(raw: Path) -> None:
    for path in raw.glob("day_*"):
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass


def killed(part: str, raw: Path, folder: Path) -> dict[str, Any]:
    """Kill the engine at random moments of its run; the bytes must be those of a calm run."""
    calm, output = folder / "calm", folder / "killed"
    whole = measure("embedded", raw, calm)
    shutil.rmtree(output, ignore_errors=True)
    rng = random.Random(0)
    kills = 0
    while kills < KILLS:
        child = subprocess.Popen(
            command("embedded", raw, output), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        try:
            child.wait(rng.uniform(0.3, 1) * whole["seconds"])
            shutil.rmtree(output)  # done, so from the start again
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            child.wait()
            kills += 1
    measured = _finish(raw, output)
    same = _digest(calm) == _digest(output)
    shutil.rmtree(calm)
    shutil.rmtree(output)
    return row_for(part, raw, [measured], kills=kills, same_bytes=same)


def _finish(raw: Path, output: Path) -> dict[str, Any]:
    started = time.perf_counter()
    run = subprocess.run(command("embedded", raw, output), stdout=subprocess.PIPE, check=True)
    phases = json.loads(run.stdout.decode().splitlines()[-1])
    return {"seconds": time.perf_counter() - started, "peak_mb": 0.0, "phase_seconds": phases}


def _digest(folder: Path) -> dict[str, str]:
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            digests[str(path.relative_to(folder))] = digest
    return digests


# --- the whole


def generate(size: str, folder: Path) -> Path:
    """A log, kept for the next time."""
    from trainmark.clicklog import synthetic

    raw = folder / f"raw-{size}"
    synthetic.prepare(
        synthetic.Options(
            output=raw, format="raw", rows=SIZES[size], days=DAYS, cardinalities=CARDINALITIES
        )
    )
    return raw


def check_disk(parts: list[str], folder: Path) -> None:
    sizes = {part.partition("-")[2] for part in parts}
    needed = sum(SIZES[size] * DISK_BYTES_PER_ROW for size in sizes)
    there = sum(path.stat().st_size for path in folder.rglob("day_*"))
    free = shutil.disk_usage(folder).free
    print(f"needs {needed / 1e9:.0f} GB of disk in {folder}; {free / 1e9:.0f} GB are free")
    if needed - there > free:
        raise SystemExit("Too little. Choose another --folder, or fewer parts with --only.")


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("engine", "rows", "seconds", "MB/s", "peak MB", "phases", "embedded is")
    ours = {row["rows"]: row["seconds"] for row in rows if row["engine"] == "embedded"}
    for row in rows:
        phases = ", ".join(
            f"{name} {seconds:.2f}" for name, seconds in row["phase_seconds"].items()
        )
        ratio = row["seconds"] / ours[row["rows"]] if row["rows"] in ours else None
        table.add_row(
            row["engine"],
            f"{row['rows']:,}",
            f"{row['seconds']:.2f}",
            f"{row['mb_per_s']:.0f}",
            f"{row['peak_mb']:.0f}",
            phases,
            f"{ratio:.1f} x as fast" if ratio and row["engine"] != "embedded" else "",
        )
    Console().print(table)
    if len(ours) == 2:
        linear = ours[SIZES["40m"]] / (10 * ours[SIZES["4m"]])
        print(f"40 M rows took {linear:.2f} x ten times as long as 4 M")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", choices=PARTS, help="parts to run")
    parser.add_argument("--folder", type=Path, default=Path("build/benchmarks/prepare"))
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    for flag in ("--input", "--output"):
        parser.add_argument(flag, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(CHILDREN[arguments.child](arguments)))
        return
    parts = [part for part in PARTS if part in (arguments.only or PARTS)]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    check_disk(parts, arguments.folder)
    path = RESULTS / "prepare.json"
    earlier = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = {(row["engine"], row["rows"]): row for row in earlier}
    for part in parts:
        raw = generate(part.partition("-")[2], arguments.folder)
        row = run_part(part, raw, arguments.folder)
        key = (row["engine"], row["rows"])
        if part in SIDE_PARTS:
            # What they find belongs to the engine's own row.
            key = ("embedded", row["rows"])
            found = SIDE_PARTS[part](row)
            print(part, found)
            if key not in rows:
                continue
            row = rows[key] | found
        rows[key] = row
        write_results("prepare", list(rows.values()))
    show(list(rows.values()))


if __name__ == "__main__":
    main()
