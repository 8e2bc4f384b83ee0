r"""Preparation of click logs: the embedded engine beside Spark, pandas, Polars and DuckDB.

Generates logs like Criteo's, with power-law columns of up to 8 million values, of 4 and of 40
million rows (1 and 10 GB of text), and prepares them with frequency threshold 3, each time in a
process of its own, whose memory (with its children's) is sampled. About ten minutes on 2 cores.

    PYTHONPATH=. python benchmarks/prepare.py                      everything
    PYTHONPATH=. python benchmarks/prepare.py --only embedded-4m   one part: embedded-4m, -40m,
                                                    pandas-, polars-, duckdb-, parse-4m
    PYTHONPATH=. python benchmarks/prepare.py --folder /big/disk   where the logs go, and stay
    PYTHONPATH=. python benchmarks/prepare.py --cores 1 2 --kinds criteo csv     how it scales, with
                                                    4 million rows: two minutes for each kind
    PYTHONPATH=. python benchmarks/prepare.py --cores 1 2 4 8 16 --rows 100000000 --kinds criteo \
        --warm-up --folder /dev/shm/prepare         on 16 cores and 70 GB of memory: 8 minutes
    PYTHONPATH=. python benchmarks/prepare.py --cores 1 2 4 8 16 --kinds csv parquet npy --warm-up \
        --folder /dev/shm/prepare                   likewise; 6 minutes
    PYTHONPATH=. python benchmarks/prepare.py --against FOLDER      beside an earlier version, which
                                                    `git archive COMMIT trainmark` packs
    PYTHONPATH=. python benchmarks/prepare.py --spark 1 2    on so many cores: --engine spark beside
                                                    a plain Spark job, 4 and 16 million rows

Results of the parts that ran, of --against and of --spark, replace those in
benchmarks/results/prepare.json; of --cores, those of the same kind, cores and rows in
prepare_cores.json.
"""

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Literal

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.common import RESULTS, read_rows, write_results
from benchmarks.prepare_children import CHILDREN

CARDINALITIES = (
    *(7912889, 33823, 17139, 7339, 20046, 4, 7105, 1382, 63, 5554114, 582469, 245828, 11),
    *(2209, 10667, 104, 4, 968, 15, 8165896, 2675940, 7156453, 302516, 12022, 97, 35),
)
"""Criteo's own, at frequency threshold 15."""
SIZES = {"4m": 4_000_000, "16m": 16_000_000, "40m": 40_000_000}
DAYS = 8
HERE = Path(__file__).resolve().parents[1]
VERSION_ROUNDS = 7
REPEATS = 3
"""Runs of a part that takes less than a minute; the median counts."""
TEXTS, TEXT_MB = 16, 2
ROW_BYTES = 267
DISK_BYTES_PER_ROW = ROW_BYTES + 300
"""The log, the store, the dataset, and the dataset of another engine to compare."""
PARTS = ("embedded-4m", "parse-4m", "polars-4m", "duckdb-4m", "pandas-4m", "embedded-40m")


# --- measuring


def command(kind: str, raw: Path, output: Path, *more: str) -> list[str]:
    paths = ["--input", str(raw), "--output", str(output)]
    return [sys.executable, str(Path(__file__).resolve()), "--child", kind, *paths, *more]


def measure(
    kind: str,
    raw: Path,
    output: Path,
    *more: str,
    cores: int | None = None,
    package: Path | None = None,
) -> dict[str, Any]:
    """Run a child; seconds from start to end, peak memory of its processes, its phases.

    Args:
        cores: how many it may use; all, if not given.
        package: where an earlier version of ours lies.
    """
    shutil.rmtree(output, ignore_errors=True)
    chosen = sorted(os.sched_getaffinity(0))[:cores]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    child = subprocess.Popen(
        command(kind, raw, output, *more),
        stdout=subprocess.PIPE,
        env=os.environ | ({"PYTHONPATH": f"{package}:{HERE}"} if package else {}),
        preexec_fn=lambda: os.sched_setaffinity(0, chosen),
    )
    peak, times = [0], dict[int, float]()
    watcher = threading.Thread(target=_watch, args=(child, peak, times))
    watcher.start()
    text, _ = child.communicate()
    seconds = time.perf_counter() - started
    watcher.join()
    if child.returncode:
        raise SystemExit(f"{kind} failed; see above")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Nobody waits for the processes that Spark starts.
    waited = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    cpu = max(waited, sum(times.values()))
    phases = json.loads(text.decode().splitlines()[-1])
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "peak_mb": peak[0] / 1e6,
        "phase_seconds": phases,
    }


def _watch(child: subprocess.Popen, peak: list[int], times: dict[int, float]) -> None:
    """Note the most memory, and the processor time of every process."""
    process = psutil.Process(child.pid)
    while child.poll() is None:
        total, started = 0, time.perf_counter()
        try:
            for one in (process, *process.children(recursive=True)):
                total += one.memory_full_info().pss  # pages that several share count once
                times[one.pid] = sum(one.cpu_times()[:2])
        except psutil.Error:  # one has ended
            continue
        peak[0] = max(peak[0], total)
        time.sleep(max(0.02, 20 * (time.perf_counter() - started)))


def row_for(part: str, raw: Path, measured: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    middle = sorted(measured, key=lambda one: one["seconds"])[len(measured) // 2]
    mb = sum(path.stat().st_size for path in raw.glob("day_*")) / 1e6
    engine, _, size = part.partition("-")
    return {
        "system": "trainmark" if engine in ("embedded", "spark") else engine.replace("_", " "),
        "engine": engine,
        "cores": 2,
        "rows": SIZES[size],
        "mb": round(mb, 1),
        "seconds": round(middle["seconds"], 3),
        "mb_per_s": round(mb / middle["seconds"], 1),
        "rows_per_s": round(SIZES[size] / middle["seconds"]),
        "peak_mb": round(max(one["peak_mb"] for one in measured), 1),
        "cpu_seconds": round(middle.get("cpu_seconds", 0.0), 1),
        "phase_seconds": {name: round(s, 3) for name, s in middle["phase_seconds"].items()},
        "all_seconds": [round(one["seconds"], 3) for one in measured],
        **more,
    }


def run_part(part: str, raw: Path, folder: Path) -> dict[str, Any]:
    engine = part.partition("-")[0]
    output = folder / "out"
    more = ("--memory", "1G") if part == "embedded-40m" else ()
    repeats = 1 if part in ("pandas-4m", "embedded-40m") else REPEATS
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


def _digest(folder: Path) -> dict[str, str]:
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            digests[str(path.relative_to(folder))] = digest
    digests.pop("checksums.json", None)  # which the Spark engine does not write
    return digests


# --- the whole


def generate(rows: int, folder: Path, form: Literal["raw", "npy"] = "raw") -> Path:
    """A log, kept for the next time."""
    from trainmark.clicklog import synthetic

    output = folder / f"{form}-{rows}"
    synthetic.prepare(
        synthetic.Options(
            output=output, format=form, rows=rows, days=DAYS, cardinalities=CARDINALITIES
        )
    )
    return output


def as_parquet(raw: Path) -> Path:
    """The same log as Parquet files, values as strings."""
    import pyarrow as pa
    import pyarrow.csv as csv
    import pyarrow.parquet as pq

    output = raw.with_name(raw.name.replace("raw", "parquet"))
    names = ["label", *(f"I{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 27))]
    types = dict.fromkeys(names[:14], pa.int64()) | dict.fromkeys(names[14:], pa.string())
    output.mkdir(exist_ok=True)
    for day in raw.glob("day_*"):
        if (output / f"{day.name}.parquet").exists():
            continue
        table = csv.read_csv(
            day,
            csv.ReadOptions(column_names=names),
            csv.ParseOptions(delimiter="\t", quote_char=False),
            csv.ConvertOptions(column_types=types, strings_can_be_null=True),
        )
        pq.write_table(table, output / f"{day.name}.parquet")
    return output


def corpus(folder: Path) -> Path:
    """Texts of made-up words, and a tokenizer that was trained on them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    output, rng = folder / "corpus", random.Random(0)
    if (output / f"{TEXTS - 1}.txt").exists():
        return output
    output.mkdir(exist_ok=True)
    syllables = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(1, 4))) for _ in range(900)]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(50_000)]
    weights = [1 / (rank + 10) for rank in range(len(words))]
    text = " ".join(rng.choices(words, weights, k=200_000))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8000, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(output / "tokenizer.json"))
    for number in range(TEXTS):
        lines = [" ".join(rng.choices(words, weights, k=100)) for _ in range(100)]
        block = "\n".join(lines) + "\n"
        (output / f"{number}.txt").write_text(block * (TEXT_MB * 1_000_000 // len(block)))
    return output


# --- how it scales

KINDS = ("criteo", "csv", "parquet", "npy", "tokens")
PEERS = {"pandas": "pandas", "parse": "pyarrow, parsing alone"}
"""Of a log in Criteo's text; systems by their children."""


def scale(arguments: argparse.Namespace) -> None:
    """Each kind of input with each number of cores."""
    earlier = read_rows("prepare_cores", arguments.results)
    rows = {_scale_key(row): row for row in earlier}
    output = (arguments.output_folder or arguments.folder) / "out"
    for kind in arguments.kinds:
        size = arguments.rows
        if kind == "tokens":
            made = corpus(arguments.folder)
        elif kind == "npy":
            made = generate(size, arguments.folder, "npy")
        else:
            made = generate(size, arguments.folder)
            made = as_parquet(made) if kind == "parquet" else made
        mb = sum(file.stat().st_size for file in made.iterdir() if file.suffix != ".json") / 1e6
        child = "embedded" if kind == "criteo" else kind
        if arguments.warm_up:  # compiled loops, of which a first run fills numba's cache
            measure(child, made, output)
        for cores in arguments.cores:
            found = measure(child, made, output, cores=cores)
            digest = _digest(output) if arguments.digest else {}
            shutil.rmtree(output, ignore_errors=True)
            row = {
                "system": PEERS.get(kind, "trainmark"),
                "kind": "criteo" if kind in PEERS else kind,
                "cores": cores,
                "rows": 0 if kind == "tokens" else size,
                "mb": round(mb, 1),
                "seconds": round(found["seconds"], 3),
                "mb_per_s": round(mb / found["seconds"], 1),
                "cpu_seconds": round(found["cpu_seconds"], 3),
                "load": round(os.getloadavg()[0], 1),
                "peak_mb": round(found["peak_mb"], 1),
                "output": arguments.stored,
                "phase_seconds": {n: round(s, 3) for n, s in found["phase_seconds"].items()},
            }
            if digest:
                row["digest"] = hashlib.sha256(json.dumps(digest).encode()).hexdigest()
            print(row, flush=True)
            rows[_scale_key(row)] = row
            write_results("prepare_cores", list(rows.values()), folder=arguments.results)


def _scale_key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["system"], row["kind"], row["rows"], row["cores"], row["output"]


# --- an earlier version


def compare_versions(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What a user types, with this version and the earlier one in turns, on two cores."""
    raw, output = generate(SIZES["4m"], arguments.folder), arguments.folder / "out"
    packages = {"command": HERE, "earlier command": arguments.against}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in packages}
    for number in range(1 + VERSION_ROUNDS):
        for name, package in packages.items():
            _warm(raw)
            measured = measure("command", raw, output, cores=2, package=package)
            if number:  # the first fills numba's cache
                found[name].append(measured)
    shutil.rmtree(output)
    load = round(os.getloadavg()[0], 1)
    return [
        row_for(f"{name}-4m", raw, measured) | {"system": "trainmark", "load": load}
        for name, measured in found.items()
    ]


# --- Spark


def compare_spark(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Our engine and a plain job in turns, on the same files, with the embedded engine's bytes."""
    found = []
    output = arguments.folder / "out"
    for size in arguments.sizes:
        raw = generate(SIZES[size], arguments.folder)
        _warm(raw)
        embedded = measure("embedded", raw, output)
        expected = _digest(output)
        found.append(row_for(f"embedded-{size}", raw, [embedded]))
        for cores in arguments.spark:
            for engine in ("spark", "plain_spark"):
                load = os.getloadavg()[0]
                more = ("--master", f"local[{cores}]")
                measured = measure(engine, raw, output, *more, cores=cores)
                row = row_for(f"{engine}-{size}", raw, [measured], cores=cores, load=round(load, 1))
                if engine == "spark":
                    row["same_bytes"] = _digest(output) == expected
                print(row, flush=True)
                found.append(row)
                shutil.rmtree(output)
    return found


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
    if {SIZES["4m"], SIZES["40m"]} <= set(ours):
        linear = ours[SIZES["40m"]] / (10 * ours[SIZES["4m"]])
        print(f"40 M rows took {linear:.2f} x ten times as long as 4 M")


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["engine"], row["rows"], row.get("cores", 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", choices=PARTS, help="parts to run")
    parser.add_argument("--folder", type=Path, default=Path("build/benchmarks/prepare"))
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    for flag in ("--input", "--output"):
        parser.add_argument(flag, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    parser.add_argument("--master", default="local[2]", help=argparse.SUPPRESS)
    parser.add_argument("--spark", type=int, nargs="+", help="compare Spark on so many cores")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["4m", "16m"], help="of it")
    parser.add_argument("--against", type=Path, help="an earlier version's folder to compare with")
    parser.add_argument("--cores", type=int, nargs="+", help="measure how it scales")
    kinds = (*KINDS, *PEERS)
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=KINDS, help="of input")
    parser.add_argument("--rows", type=int, default=SIZES["4m"], help="of the log, with --cores")
    parser.add_argument("--output-folder", type=Path, help="another one for what is written")
    parser.add_argument("--stored", default="memory", help="what that folder is: memory or disk")
    parser.add_argument("--digest", action="store_true", help="of all that is written")
    parser.add_argument("--warm-up", action="store_true", help="run each kind once before")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(CHILDREN[arguments.child](arguments)))
        return
    if arguments.cores:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        scale(arguments)
        return
    wanted = arguments.only or ([] if arguments.spark or arguments.against else PARTS)
    parts = [part for part in PARTS if part in wanted]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    check_disk(parts, arguments.folder)
    rows = {_key(row): row for row in read_rows("prepare")}
    for row in compare_versions(arguments) if arguments.against else ():
        rows[_key(row)] = row
        write_results("prepare", list(rows.values()))
    for row in compare_spark(arguments) if arguments.spark else ():
        rows.setdefault(_key(row), row)
        if row["engine"] != "embedded":  # which its own part measures better
            rows[_key(row)] = row
        write_results("prepare", list(rows.values()))
    for part in parts:
        raw = generate(SIZES[part.partition("-")[2]], arguments.folder)
        row = run_part(part, raw, arguments.folder)
        key = _key(row)
        if part == "parse-4m":  # belongs to the engine's own row
            print(part, row["seconds"])
            key = ("embedded", row["rows"], row["cores"])
            if key not in rows:
                continue
            row = rows[key] | {"arrow_parse_alone_seconds": row["seconds"]}
        rows[key] = row
        write_results("prepare", list(rows.values()))
    show(list(rows.values()))


if __name__ == "__main__":
    main()
