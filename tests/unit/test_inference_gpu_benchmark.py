"""benchmarks/inference_gpu.py, at tiny sizes on the CPU: every part of it gives its rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common, dlrm_systems, inference_gpu


@pytest.fixture(autouse=True)
def few_requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(dlrm_systems, "POOL", 2)
    monkeypatch.setattr(common, "RESULTS", tmp_path)


def measured(folder: Path, *parts: str) -> list[dict[str, Any]]:
    words = ["--tiny", "--requests", "2", "--output", str(folder), "--only", *parts]
    inference_gpu.main(words)
    rows: list[dict[str, Any]] = json.loads((folder / "inference_tiny.json").read_text())["rows"]
    return rows


def asked(part: str) -> int:
    """Rows that differ: of tiny sizes, some are one."""
    case = inference_gpu.tiny(inference_gpu.CASES[part])
    sizes = (case.ours, case.pageable, case.eager, case.compiled)
    return sum(len(set(one)) for one in sizes)


@pytest.mark.parametrize("part", [part for part in inference_gpu.CASES if part != "compiled"])
def test_every_part_gives_its_rows(part: str, tmp_path: Path) -> None:
    rows = measured(tmp_path, part)
    assert len(rows) == asked(part)
    assert all(row["samples_per_s"] > 0 and row["p99_ms"] >= row["median_ms"] for row in rows)
    case = inference_gpu.CASES[part]
    assert {row["run"] for row in rows} == {case.run}
    assert {row["tables_precision"] for row in rows} == {case.tables}
    assert {row["tables_memory"] for row in rows} == {"host" if case.host_tables else "device"}


def test_a_row_that_fails_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure_size = inference_gpu.latency.measure_size

    def fails_at_32(predictors: Any, size: int, *others: Any) -> Any:
        if size == 32:
            raise RuntimeError("no memory for 32")
        return measure_size(predictors, size, *others)

    monkeypatch.setattr(inference_gpu.latency, "measure_size", fails_at_32)
    rows = measured(tmp_path, "fp32")
    assert sorted(row["batch"] for row in rows) == [1, 512, 512]
    assert "no memory for 32" in capsys.readouterr().out


def test_parts_that_are_not_measured_keep_their_rows(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    first = measured(elsewhere, "host-tables")
    both = measured(elsewhere, "bf16-tables")
    assert both[: len(first)] == first
    assert len(both) == len(first) + asked("bf16-tables")


def test_the_commit_that_is_given_counts_more_than_that_of_the_files(tmp_path: Path) -> None:
    """A machine with a GPU may have an older one, and what is measured as changes to it."""
    rows = measured(tmp_path, "bf16-tables", "--commit", "ac1cb3c")
    document = json.loads((tmp_path / "inference_tiny.json").read_text())
    named = [document["commit"], document["software"]["commit"], *(row["commit"] for row in rows)]
    assert set(named) == {"ac1cb3c"}
