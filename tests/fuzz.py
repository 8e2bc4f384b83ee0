"""Hostile words and files for the command line: whatever is given, it ends in a sentence.

    for words in cases(random.Random(7), folder, "flags", 100): ...

`tests/unit/test_fuzz.py` runs a few of each kind, and 10,000 under `make test-slow`.
"""

import dataclasses
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import yaml

from tests.small import write_dataset
from trainmark import workloads
from trainmark.cli import main

Words = list[str]
RUNS = ("dlrm-demo", "distilbert-demo", "llama3-demo")
VALUES = (
    "-1", "0", "1", "inf", "-inf", "nan", "1e400", "-0.0", "2147483648", str(2**63), str(10**40),
    "", " ", "None", "True", "[/nope]", "\x1b[31m", "\n", "é", "$(touch pwned)", "../..",
    "/dev/null", "{}", "--", "-", "a" * 300, "\udcff", "1,2,3", "0x10", "١", "auto", "synthetic",
)  # fmt: skip
BYTES = (
    b"",
    b"\x00",
    b"\xff\xfe",
    b"{",
    b"[" * 2000,
    b"\x1b[2J",
    b"1e999",
    b"\n\n",
    b"'''",
    b"\xf0\x9f",
)


def cases(draw: random.Random, folder: Path, kind: str, count: int) -> Iterator[Words]:
    """So many command lines of a kind; what they name lies in `folder`."""
    make = KINDS[kind](draw, folder)
    for _ in range(count):
        yield make()


# --- damage


def damaged(draw: random.Random, data: bytes) -> bytes:
    """Bytes cut, flipped, repeated or replaced."""
    for _ in range(draw.randint(1, 3)):
        start = draw.randrange(len(data) + 1)
        stop = min(len(data), start + draw.choice((0, 1, 1, 2, 8, 64)))
        how = draw.randrange(5)
        if how == 0:
            data = data[:start]
        elif how == 1 and data:
            place = min(start, len(data) - 1)
            data = (
                data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :]
            )
        elif how == 2:
            data = data[:start] + data[start:stop] * draw.choice((0, 2, 50)) + data[stop:]
        else:
            data = data[:start] + draw.choice(BYTES) + data[stop:]
    return data


def changed(draw: random.Random, data: Any) -> Any:
    """Plain data with one of its values replaced, removed or renamed."""
    if isinstance(data, dict) and data and draw.random() < 0.85:
        key = draw.choice(list(data))
        rest = dict(data)
        value = rest.pop(key)
        how = draw.random()
        if how < 0.1:
            return rest
        if how < 0.2:
            return rest | {
                draw.choice(("", "x", "é", key.upper() if isinstance(key, str) else "y")): value
            }
        return data | {key: changed(draw, value)}
    if isinstance(data, list) and data and draw.random() < 0.7:
        place = draw.randrange(len(data))
        return [*data[:place], changed(draw, data[place]), *data[place + 1 :]]
    return draw.choice(
        (
            None,
            True,
            -1,
            0,
            1.5,
            2**63,
            10**30,
            "",
            "x",
            [],
            {},
            [[]],
            float("nan"),
            float("inf"),
            "\x1b[31m",
        )
    )


# --- kinds


def _flags(draw: random.Random, folder: Path) -> Callable[[], Words]:
    names = {run: _flag_names(type(workloads.named_run(run))) for run in RUNS}

    def make() -> Words:
        run = draw.choice(RUNS)
        words = ["show", run]
        for flag in draw.sample(names[run], draw.choice((1, 1, 1, 2))):
            words += [f"--{flag}", draw.choice(VALUES)]
        return words

    return make


def _flag_names(kind: type[Any], prefix: str = "") -> list[str]:
    from typing import get_type_hints

    found = []
    for name, hint in get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            inside = "" if name in ("sharding", "table_format") else f"{name}."
            found += _flag_names(hint, f"{prefix}{inside}")  # type: ignore[arg-type]
        elif not name.startswith("_") and name not in ("name", "workload"):
            found.append(prefix + name.replace("_", "-"))
    return found


def _configs(draw: random.Random, folder: Path) -> Callable[[], Words]:
    plain = {
        run: json.loads(json.dumps(dataclasses.asdict(workloads.named_run(run)))) for run in RUNS
    }
    toml = b"lr = 0.5\nseed = 3\n[model]\nlayers = 2\n[schedule]\nwarmup_steps = 5\n"

    def make() -> Words:
        run = draw.choice(RUNS)
        if draw.random() < 0.3:
            path = folder / "c.toml"
            path.write_bytes(damaged(draw, toml))
        else:
            path = folder / "c.json"
            text = json.dumps(changed(draw, plain[run])).encode()
            path.write_bytes(damaged(draw, text) if draw.random() < 0.3 else text)
        return ["show", run, "--config", str(path)]

    return make


def _specs(draw: random.Random, folder: Path) -> Callable[[], Words]:
    data = write_dataset(folder / "data", train_rows=200)
    good = (data / "feature_spec.yaml").read_bytes()

    def make() -> Words:
        text = damaged(draw, good)
        if draw.random() < 0.6:
            text = yaml.dump(changed(draw, yaml.safe_load(good))).encode()
        (data / "feature_spec.yaml").write_bytes(text)
        return ["show", "dlrm-demo", "--data", str(data)]

    return make


def _columns(draw: random.Random, folder: Path) -> Callable[[], Words]:
    (folder / "log.csv").write_text("click,age,city\n" + "1,30,x\n0,,y\n0,5,\n" * 30)
    parts = (
        "label=click", "categorical=city", "numerical=age", "label=", "=", "x=click", "",
        "é=é", "categorical=*",
        "timestamp=age", "numerical=age:log", "categorical=nope", "label=click,age",
    )  # fmt: skip

    def make() -> Words:
        text = " ".join(draw.choice(parts) for _ in range(draw.randint(0, 4)))
        text = (
            damaged(draw, text.encode()).decode(errors="replace") if draw.random() < 0.4 else text
        )
        return _prepare(draw, folder, "csv", "log.csv", text)

    return make


def _lines(draw: random.Random, folder: Path) -> Callable[[], Words]:
    good = b"click,age,city\n" + b"1,30,x\n0,,y\n0,5,\n" * 30

    def make() -> Words:
        (folder / "lines.csv").write_bytes(damaged(draw, good))
        words = _prepare(
            draw, folder, "csv", "lines.csv", "label=click numerical=age categorical=city"
        )
        return [*words, "--bad-rows", draw.choice(("stop", "skip", "keep"))]

    return make


def _parquet(draw: random.Random, folder: Path) -> Callable[[], Words]:
    table = pa.table({"click": [1, 0] * 40, "age": [1.5, None] * 40, "city": ["x", "y"] * 40})
    pyarrow.parquet.write_table(table, folder / "good.parquet")
    good = (folder / "good.parquet").read_bytes()

    def make() -> Words:
        (folder / "log.parquet").write_bytes(damaged(draw, good))
        return _prepare(
            draw, folder, "parquet", "log.parquet", "label=click numerical=age categorical=city"
        )

    return make


def _prepare(draw: random.Random, folder: Path, kind: str, file: str, columns: str) -> Words:
    output = folder / "out" / str(draw.randrange(10**9))
    return [
        "prepare",
        kind,
        "--input",
        str(folder / file),
        "--columns",
        columns,
        "--output",
        str(output),
    ]


def _npy(draw: random.Random, folder: Path) -> Callable[[], Words]:
    days = folder / "days"
    days.mkdir()
    good = {}
    for day in range(2):
        arrays = {"dense": np.ones((20, 13), np.float32), "sparse": np.ones((20, 26), np.int32),
                  "labels": np.ones((20, 1), np.int32)}  # fmt: skip
        for name, array in arrays.items():
            path = days / f"day_{day}_{name}.npy"
            np.save(path, array)
            good[path] = path.read_bytes()

    def make() -> Words:
        for path, data in good.items():
            path.write_bytes(data)
        path = draw.choice(list(good))
        header = damaged(draw, good[path][:128])
        path.write_bytes(header + good[path][128:])
        output = folder / "out" / str(draw.randrange(10**9))
        return ["prepare", "npy", "--input", str(days), "--output", str(output)]

    return make


def _suites(draw: random.Random, folder: Path) -> Callable[[], Words]:
    good = b"""[[case]]
run = "dlrm-demo"
case = "cpux1x1"
name = "a"
flags = "--max-steps 2"
repeats = 1
"""

    def make() -> Words:
        (folder / "cases.toml").write_bytes(damaged(draw, good))
        return ["suite", str(folder / "cases.toml"), "--dry-run", "--output", str(folder / "suite")]

    return make


def _results(draw: random.Random, folder: Path) -> Callable[[], Words]:
    from tests.small import train

    assert train(folder / "run[/nope]", "--max-steps", "2") == 0
    path = folder / "run[/nope]" / "result.json"
    good = json.loads(path.read_text())
    del good["checksum"]

    def make() -> Words:
        text = json.dumps(changed(draw, good)).encode()
        path.write_bytes(damaged(draw, text) if draw.random() < 0.3 else text)
        run = str(path.parent)
        return draw.choice(
            (["compare", run, run], ["report", run], ["show", "dlrm-demo", "--config", str(path)])
        )

    return make


COLUMNS = ("--columns", "label=click numerical=age categorical=city")


def _datasets(draw: random.Random, folder: Path) -> Callable[[], Words]:
    good, log = _prepared(folder), str(folder / "log.csv")

    def make() -> Words:
        data = str(_with_damage(draw, good, folder / "damaged"))
        output = str(folder / "out" / str(draw.randrange(10**9)))
        grow = ["prepare", "csv", "--input", log, *COLUMNS, "--output", output]
        return draw.choice(
            (["show", "dlrm-demo", "--data", data], [*grow, "--vocabulary", data, "--grow"])
        )

    return make


def _exports(draw: random.Random, folder: Path) -> Callable[[], Words]:
    from tests.small import train

    data, run, good = _prepared(folder), folder / "run", folder / "export"
    assert train(run, "--data", str(data), "--model.table-rows", "4", "3", "--max-steps", "2") == 0
    assert main(["export", str(run), "--output", str(good)]) == 0
    given = ["--input", str(folder / "log.csv"), "--output", str(folder / "scores.csv")]

    def make() -> Words:
        (folder / "scores.csv").unlink(missing_ok=True)
        return ["predict", str(_with_damage(draw, good, folder / "damaged")), *given]

    return make


def _prepared(folder: Path) -> Path:
    """A dataset of one column of each kind."""
    log, data = folder / "log.csv", folder / "data"
    log.write_text("click,age,city\n" + "1,30,x\n0,,y\n0,5,\n" * 30)
    assert main(["prepare", "csv", "--input", str(log), *COLUMNS, "--output", str(data)]) == 0
    return data


def _with_damage(draw: random.Random, good: Path, place: Path) -> Path:
    """A copy in which one file is another, and no checksum tells."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(good, place)
    for file in place.rglob("checksums.json"):
        file.unlink()
    file = draw.choice(sorted(path for path in place.rglob("*") if path.is_file()))
    content = file.read_bytes()
    if file.suffix == ".json" and draw.random() < 0.7:
        plain = changed(draw, json.loads(content))
        if isinstance(plain, dict):
            plain.pop("checksum", None)
        content = json.dumps(plain).encode()
    else:
        content = damaged(draw, content)
    file.write_bytes(content)
    return place


KINDS: dict[str, Callable[[random.Random, Path], Callable[[], Words]]] = {
    "flags": _flags,
    "configurations": _configs,
    "feature specifications": _specs,
    "column descriptions": _columns,
    "log lines": _lines,
    "parquet": _parquet,
    "npy": _npy,
    "case lists": _suites,
    "results": _results,
    "datasets": _datasets,
    "exports": _exports,
}
