"""The embedded engine: any limits, with and without numba, killed or not, the same exact bytes."""

import ast
import gzip
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.criteo_oracle import Line, Oracle, Row, random_lines, write_day
from trainmark.clickdata import feature_spec
from trainmark.clicklog import criteo
from trainmark.clicklog.arrays import counting, primitives, shuffle
from trainmark.clicklog.engine import encode_phase, vocabulary_builder
from trainmark.clicklog.engine import phases as engine
from trainmark.clicklog.engine.limits import Limits
from trainmark.clicklog.engine.vocabulary_builder import VocabularyBuilder
from trainmark.errors import InputError

ROOMY = Limits(memory=1 << 28, workers=2, piece_bytes=1 << 20)
ALONE = replace(ROOMY, workers=1)
TIGHT = Limits(memory=1 << 13, workers=2, piece_bytes=1 << 12)


def prepare(pattern: Path, output: Path, limits: Limits = ROOMY, **options: Any) -> Path:
    job = criteo.make_job(criteo.Options(input=str(pattern), output=output, **options))
    engine.prepare(job, limits)
    return output


@contextmanager
def failing_at_the_end() -> Iterator[None]:
    """A preparation that finds all columns written, and fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.split_binary, "write_specs", lambda *args, **named: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            yield


def lines_of(log: Path) -> list[Line]:
    """Those of all three days."""
    days = ((log / f"day_{day}").read_text() for day in range(3))
    return [line.split("\t") for day in days for line in day.splitlines()]


def files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def read_rows(output: Path, mapping: str) -> list[Row]:
    spec = feature_spec.read(feature_spec.path_of(output, mapping))
    labels = np.fromfile(output / mapping / "label.bin", np.uint8).tolist()
    numbers = (output / mapping / "numerical.bin").read_bytes()
    columns = [
        np.fromfile(output / mapping / name, spec.feature_spec[name].dtype).tolist()
        for name in spec.categorical
    ]
    ids = zip(*columns, strict=True)
    return [
        (label, numbers[26 * row : 26 * row + 26], row_ids)
        for row, (label, row_ids) in enumerate(zip(labels, ids, strict=True))
    ]


def assert_agrees(output: Path, oracle: Oracle) -> None:
    for mapping, rows in oracle.rows.items():
        assert read_rows(output, mapping) == rows, mapping
    expected = tuple(oracle.cardinality(column) for column in range(26))
    assert feature_spec.read(output).cardinalities == expected


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffle, "BUCKET_ROWS", 32)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_agrees_with_the_rules(
    data: st.DataObject, tmp_path_factory: Any, small_buckets: None
) -> None:
    folder = tmp_path_factory.mktemp("log")
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    sizes = data.draw(st.lists(st.integers(2, 60), min_size=1, max_size=4))
    sizes[0] += 20
    days = [random_lines(rng, size) for size in sizes]
    for number, lines in enumerate(days):
        write_day(folder / f"day_{number}", lines, data.draw(st.sampled_from(["\n", "\r\n"])))
    recipe = data.draw(st.sampled_from(["nvidia", "torchrec", "dlrm"]))
    threshold = 0 if recipe == "dlrm" else data.draw(st.integers(0, 6))
    thresholds = [threshold] * 26
    max_rows: list[int | None] = [data.draw(st.sampled_from([None, None, 1, 7, 1000]))] * 26
    flags: dict[str, Any] = {"frequency_threshold": str(threshold)}
    if max_rows[0]:
        flags["max_rows"] = str(max_rows[0])
    if recipe != "dlrm" and data.draw(st.booleans()):
        thresholds[19], max_rows[2] = 3, 5
        flags["frequency_threshold"] += ",C20=3"
        flags["max_rows"] = f"{max_rows[0]},C3=5" if max_rows[0] else "C3=5"
    shared: dict[str, Any] = {
        "test_half": data.draw(st.sampled_from([None, "first", "second"])),
        "vocabulary_from": data.draw(st.sampled_from(["all", "train"])),
        "seed": data.draw(st.integers(0, 2**40)),
    }
    holdout = data.draw(st.sampled_from([None, 0.25]))
    if holdout:
        flags["holdout"] = str(holdout)
    limits = data.draw(st.sampled_from([ROOMY, TIGHT]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(primitives, "FAST", data.draw(st.booleans()))
        output = prepare(folder / "day_*", folder / "out", limits, recipe=recipe, **flags, **shared)
    oracle = Oracle(days, recipe, thresholds, max_rows, holdout, **shared)
    assert_agrees(output, oracle)


@pytest.fixture(scope="module")
def log(tmp_path_factory: Any) -> Path:
    """Three days of 400 rows."""
    folder = tmp_path_factory.mktemp("log")
    rng = random.Random(5)
    for day in range(3):
        write_day(folder / f"day_{day}", random_lines(rng, 400))
    return folder


@pytest.fixture(scope="module")
def undisturbed(log: Path) -> dict[str, bytes]:
    """What comes of the log, with threshold 3."""
    output = prepare(log / "day_*", log / "undisturbed", frequency_threshold="3")
    return files(output)


@pytest.mark.parametrize("recipe", ["nvidia", pytest.param("torchrec", marks=pytest.mark.slow)])
def test_limits_and_numba_do_not_matter(
    recipe: str, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_buckets: None
) -> None:
    expected = prepare(log / "day_*", tmp_path / "roomy", recipe=recipe)
    monkeypatch.setattr(vocabulary_builder, "LARGE_COUNT", 20)
    monkeypatch.setattr(vocabulary_builder, "WINDOW_ROWS", 100)
    passes = []
    count = counting.counter
    monkeypatch.setattr(counting, "counter", lambda *args: passes.append(1) or count(*args))
    for workers, fast, share_rows in ((1, True, 9999), (3, False, 200), (16, True, 200)):
        monkeypatch.setattr(primitives, "FAST", fast)
        monkeypatch.setattr(encode_phase, "SHARE_ROWS", share_rows)
        monkeypatch.setattr(encode_phase, "SHARES_OF_A_PROCESS", 99)
        limits = Limits(memory=workers * 4096, workers=workers, piece_bytes=5_000)
        output = prepare(log / "day_*", tmp_path / f"tight {workers}", limits, recipe=recipe)
        assert files(output) == files(expected)
    assert len(passes) > 26  # so that values were counted in several ranges, here in this process


def test_counts_are_kept_without_headers_that_python_parses(
    log: Path, tmp_path: Path, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """numpy's own files have one; CPython 3.11 may fail to parse several at a time."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a header is parsed")

    monkeypatch.setattr(ast, "parse", refuse)
    limits = Limits(memory=4096, workers=1, piece_bytes=1 << 15)
    output = prepare(log / "day_*", tmp_path / "out", limits, frequency_threshold="3")
    assert files(output) == undisturbed


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_compressed_files(
    kind: str, log: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    for day in range(3):
        text = (log / f"day_{day}").read_bytes()
        if kind == "gz":  # in two members, as concatenated files are
            data = gzip.compress(text[:20_000]) + gzip.compress(text[20_000:])
        else:
            data = pa.compress(text, "zstd", asbytes=True)
        (tmp_path / f"day_{day}.{kind}").write_bytes(data)
    pattern = tmp_path / f"day_*.{kind}"
    output = prepare(pattern, tmp_path / "out", TIGHT, frequency_threshold="3")
    binary = {name: data for name, data in files(output).items() if not name.endswith("json")}
    assert binary == {n: data for n, data in undisturbed.items() if not n.endswith("json")}


# --- killed


def _child(log: Path, output: Path) -> None:
    os.setpgrp()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    limits = Limits(memory=1 << 16, workers=2, piece_bytes=1 << 13)
    prepare(log / "day_*", output, limits, frequency_threshold="3")


def _kill_again_and_again(log: Path, output: Path, kills: int, seed: int) -> int:
    """Start the run and kill it after random times until so many kills have hit it at work."""
    rng = random.Random(seed)
    context = multiprocessing.get_context("fork")
    longest = 0.5
    hits = 0
    for _ in range(20 * kills):
        if hits == kills:
            break
        child = context.Process(target=_child, args=(log, output))
        started = time.perf_counter()
        child.start()
        child.join(rng.uniform(0, longest))
        if child.is_alive():
            child.kill()
            hits += 1
        else:
            longest = time.perf_counter() - started
        child.join()
        shutil.rmtree(output, ignore_errors=True)
    limits = Limits(memory=1 << 20, workers=1, piece_bytes=1 << 15)
    prepare(log / "day_*", output, limits, frequency_threshold="3")
    return hits


def test_killed_runs_continue(log: Path, tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    output = tmp_path / "out"
    assert _kill_again_and_again(log, output, 3, seed=1) == 3
    assert files(output) == undisturbed
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_killed_twenty_times(log: Path, tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    for seed in range(3):
        output = tmp_path / f"out {seed}"
        assert _kill_again_and_again(log, output, 20, seed) == 20
        assert files(output) == undisturbed


def test_a_finished_phase_is_not_done_again(
    log: Path, tmp_path: Path, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with failing_at_the_end():
        prepare(log / "day_*", tmp_path / "out", frequency_threshold="3")
    # All blocks and columns are there; a torn block and a torn column are done again, alone.
    work = tmp_path / ".out.work"
    for path in (work / "blocks" / "000002.bin", work / "dataset" / "test" / "cat_3.bin"):
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    parsed, built = [], []
    parse, build = criteo.CriteoSource.parse, VocabularyBuilder.build
    monkeypatch.setattr(
        criteo.CriteoSource, "parse", lambda *args: parsed.append(1) or parse(*args)
    )
    monkeypatch.setattr(VocabularyBuilder, "build", lambda *args: built.append(1) or build(*args))
    prepare(log / "day_*", tmp_path / "out", ALONE, frequency_threshold="3")
    assert (len(parsed), len(built)) == (1, 1)
    assert files(tmp_path / "out") == undisturbed


def test_unfinished_work_of_other_settings_is_refused(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with failing_at_the_end():
        prepare(log / "day_*", tmp_path / "out")
    with pytest.raises(InputError, match=r"unfinished work with other settings \(seed: 0 there"):
        prepare(log / "day_*", tmp_path / "out", seed=1)
    with monkeypatch.context() as another:
        another.setattr(engine, "STORE", engine.STORE + 1)
        with pytest.raises(InputError, match="unfinished work of another version of Trainmark"):
            prepare(log / "day_*", tmp_path / "out")
    prepare(log / "day_*", tmp_path / "out")


@pytest.mark.parametrize("change", ["content", "time", "size"])
def test_unfinished_work_on_other_input_is_refused(log: Path, tmp_path: Path, change: str) -> None:
    days = shutil.copytree(log, tmp_path / "log")
    with failing_at_the_end():
        prepare(days / "day_*", tmp_path / "out")
    day, then = days / "day_1", (days / "day_1").stat()
    if change == "content":  # of the same name, size and time
        day.write_bytes(b"1" + day.read_bytes()[1:-2] + b"f\n")
        os.utime(day, ns=(then.st_atime_ns, then.st_mtime_ns))
    elif change == "time":
        os.utime(day)
    else:
        day.write_bytes(2 * day.read_bytes())
    with pytest.raises(InputError, match=r"day_1 has changed since .*\.out\.work"):
        prepare(days / "day_*", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    shutil.rmtree(tmp_path / ".out.work")
    prepare(days / "day_*", tmp_path / "out")


def test_two_at_a_time_are_refused(log: Path, tmp_path: Path) -> None:
    from trainmark.clicklog.engine.work import Work

    with (
        Work(tmp_path / "out").opened(),
        pytest.raises(InputError, match="Another process is preparing"),
    ):
        prepare(log / "day_*", tmp_path / "out")


# --- vocabularies


def test_vocabulary_is_kept_and_used_again(log: Path, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    first = prepare(log / "day_*", tmp_path / "first", frequency_threshold="3")
    lines = lines_of(log)
    oracle = Oracle([lines], thresholds=[3] * 26)
    ids = oracle.ids[7]
    table = pq.read_table(first / "vocabulary" / "cat_7.parquet").to_pydict()
    assert dict(zip(table["value"], table["id"], strict=True)) == ids
    assert table["value"] == sorted(table["value"])
    counts = [sum(line[21] != "" and int(line[21], 16) == v for line in lines) for v in ids]
    assert [table["count"][table["value"].index(value)] for value in ids] == counts

    new_lines = random_lines(random.Random(99), 300)
    write_day(tmp_path / "new_0", new_lines)
    second = prepare(tmp_path / "new_0", tmp_path / "second", TIGHT, vocabulary=first)
    held = 300 // 7
    test = new_lines[300 - held : 300 - held + held // 2]
    assert read_rows(second, "test") == [oracle.row(line) for line in test]
    assert feature_spec.read(second).cardinalities == feature_spec.read(first).cardinalities
    with pytest.raises(InputError, match="was made by the recipe nvidia, not torchrec"):
        prepare(tmp_path / "new_0", tmp_path / "third", recipe="torchrec", vocabulary=first)
    with pytest.raises(InputError, match=r"there is no vocabulary\.json"):
        prepare(tmp_path / "new_0", tmp_path / "third", vocabulary=tmp_path)


def test_counts_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "HALF_A_COUNTER", 1 << 10)
    counter = counting.HashCounter(np.uint32, (0, 100), 100, keyed=False)
    for _ in range(7):
        counter.add(np.array([3, 5], np.uint32), np.array([1000, 1], np.uint32))
    counts = counter.result(8)
    assert (counts.values.tolist(), counts.counts.tolist(), counts.distinct) == ([3], [7000], 2)


@pytest.mark.parametrize("huge_bytes", [0, 1 << 30])
@pytest.mark.parametrize("fast", [True, False])
def test_tables_of_ids_are_read_as_they_were_written(
    huge_bytes: int, fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(primitives, "HUGE_BYTES", huge_bytes)
    monkeypatch.setattr(primitives, "FAST", fast)
    for count in (0, 1, 5000):
        values = np.arange(1, 3 * count, 3, dtype=np.uint32)
        known = primitives.IdLookup(values, np.arange(7, 7 + count, dtype=np.int32))
        known.write(tmp_path / "table")
        read = primitives.IdLookup.read(tmp_path / "table", np.uint32)
        ids = np.empty(3 * count + 2, np.int32)
        read(np.arange(3 * count + 2, dtype=np.uint32), ids, -5)
        expected = np.full(3 * count + 2, primitives.UNKNOWN, np.int32)
        expected[values] = np.arange(7, 7 + count)
        expected[0] = -5
        assert ids.tolist() == expected.tolist()


def test_summary(log: Path, tmp_path: Path) -> None:
    output = prepare(log / "day_*", tmp_path / "out", frequency_threshold="3")
    facts = json.loads((output / "prepare.json").read_text())
    lines = lines_of(log)
    values = [int(line[20], 16) for line in lines if line[20]]
    kept = {value for value in values if values.count(value) >= 3}
    feature = facts["features"]["C7"]
    assert feature["distinct"] == len(set(values))
    assert feature["kept"] == len(kept) == feature["cardinality"] - 1
    assert feature["missing_share"] == sum(line[20] == "" for line in lines) / 1200
    assert feature["rare_share"] == sum(value not in kept for value in values) / 1200
    assert facts["click_rate"]["train"] == sum(line[0] == "1" for line in lines[:800]) / 800
    assert facts["bad_rows"] == 0
    assert facts["model"]["parameters"] == 128 * sum(facts["cardinalities"])


@pytest.mark.slow
def test_two_million_rows_within_their_memory(tmp_path: Path) -> None:
    """The flag is kept to, and nothing but time depends on it."""
    from trainmark.clicklog import synthetic

    cardinalities = (3_000_000,) * 4 + synthetic.CARDINALITIES[4:]
    synthetic.prepare(
        synthetic.Options(
            output=tmp_path / "raw", rows=2_000_000, days=4, cardinalities=cardinalities
        )
    )
    script = (
        "import sys; from pathlib import Path; from trainmark.clicklog import criteo; "
        "criteo.prepare(criteo.Options(input=sys.argv[1], output=Path(sys.argv[2]), "
        "frequency_threshold='0', memory=sys.argv[3]))"
    )
    peaks = {}
    for memory in ("500M", "4G"):
        command = [sys.executable, "-c", script, str(tmp_path / "raw" / "day_*")]
        with subprocess.Popen([*command, str(tmp_path / memory), memory]) as run:
            peaks[memory] = peak_bytes(run) / 2**20
        assert run.returncode == 0
    assert peaks["500M"] < 500 * 1.1
    assert files(tmp_path / "500M") == files(tmp_path / "4G")


def peak_bytes(run: "subprocess.Popen[bytes]") -> int:
    """Of a process and those that it forks: pages that several share count once."""
    peak, process = 0, psutil.Process(run.pid)
    while run.poll() is None:
        try:
            family = [process, *process.children(recursive=True)]
            peak = max(peak, sum(each.memory_full_info().pss for each in family))
        except psutil.Error:  # one has ended
            pass
        time.sleep(0.02)
    return peak
