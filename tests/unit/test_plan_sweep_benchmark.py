"""The sweep that the planner is fitted to: its design, its rows, and that a failure ends one row.

What is measured here, on a CPU, means nothing.
"""

import dataclasses
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import plan_design, plan_sweep


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "plan_sweep.jsonl").read_text().splitlines()]


# --- the design


def test_every_level_occurs_with_every_precision() -> None:
    factors = plan_design.drawn()
    assert len(factors) == 48
    for name, levels in plan_design.LEVELS.items():
        counts = Counter(row[name] for row in factors)
        assert counts.keys() == set(levels)
    for precision in ("bf16", "fp8", "fp16", "tf32", "fp32"):
        own = [row for row in factors if row["precision"] == precision]
        assert {row["batch"] for row in own} == set(plan_design.BATCHES)
        assert {row["optimizer"] for row in own} == set(plan_design.LEVELS["optimizer"])


def test_half_is_held_out_and_factors_are_hardly_correlated() -> None:
    cases = plan_design.designed()
    assert sum(case.held_out for case in cases) == len(cases) // 2
    assert plan_design.largest_correlation(plan_design.drawn()) < 0.27
    assert plan_design.largest_correlation(plan_design.drawn(1)) > 0.3  # an ordinary seed


def test_tables_stay_small_enough() -> None:
    for case in plan_design.designed():
        model, factors = case.changes["model"], case.factors
        weight = plan_design.WEIGHT[factors["tables"]] + plan_design.STATE[factors["optimizer"]]
        assert len(model["table_rows"]) == factors["features"]
        assert sum(model["table_rows"]) * model["embedding_dim"] * weight <= 10e9


def test_names_are_unique() -> None:
    names = [case.name for case in [*plan_design.dlrm(), *plan_design.others()]]
    assert len(names) == len(set(names))


# --- rows


@pytest.mark.parametrize(
    ("section", "kinds"),
    [
        ("distilbert", {"train"}),
        ("others", {"train", "evaluate", "infer"}),
        ("memory", {"limits"}),
    ],
)
def test_rows(
    section: str, kinds: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = {case.kind: case for case in plan_design.SECTIONS[section]()}
    monkeypatch.setitem(plan_design.SECTIONS, section, lambda: list(cases.values()))
    plan_sweep.main(["--tiny", "--output", str(tmp_path), "--only", section])
    found = rows(tmp_path)
    assert {row["kind"] for row in found} == kinds
    assert not any("error" in row for row in found)
    for row in found:
        assert row.get("fits") or row["measured_s"] > 0
    document = json.loads((tmp_path / "plan_sweep_tiny.json").read_text())
    assert document["rows"] == found


def test_a_configuration_that_fails_costs_its_own_row_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = plan_design.designed()[9]
    broken = plan_design.Case(
        name="broken", run=good.run, changes=good.changes | {"optimizer": {"name": "none"}}
    )
    monkeypatch.setitem(plan_design.SECTIONS, "dlrm", lambda: [broken, good])
    plan_sweep.main(["--tiny", "--output", str(tmp_path), "--only", "dlrm"])
    first, second = rows(tmp_path)
    assert first["case"] == "broken"
    assert "error" in first
    assert second["measured_s"] > 0
    assert second["predicted"]["memory_bytes"] > 0
    assert second["skipped"] == 0


def test_a_sweep_goes_on_after_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = plan_design.designed()[9], plan_design.designed()[20]
    monkeypatch.setitem(plan_design.SECTIONS, "dlrm", lambda: [first, second])
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps({"rows": [{"case": first.name, "kind": "train"}]}))
    words = ["--tiny", "--output", str(tmp_path), "--only", "dlrm", "--after", str(earlier)]
    plan_sweep.main(words)
    assert [row["case"] for row in rows(tmp_path)] == [second.name]
    document = json.loads((tmp_path / "plan_sweep_tiny.json").read_text())
    assert [row["case"] for row in document["rows"]] == [first.name, second.name]
    # Limits of a configuration that was trained already are measured, and kept.
    limits = dataclasses.replace(first, limits=True)
    monkeypatch.setitem(plan_design.SECTIONS, "memory", lambda: [limits])
    words[words.index("dlrm")] = "memory"
    plan_sweep.main(words)
    document = json.loads((tmp_path / "plan_sweep_tiny.json").read_text())
    assert [row["kind"] for row in document["rows"]] == ["train", "train", "limits"]


def test_processes_that_fail_or_hang_do_not_stop_the_others(tmp_path: Path) -> None:
    def fails() -> None:
        raise ValueError("wrong")

    works = [(tmp_path / "done").touch, fails, lambda: time.sleep(600)]
    plan_sweep.side_by_side(works, seconds=3)
    assert (tmp_path / "done").exists()


def test_out_of_memory_is_known_behind_another_error() -> None:
    failed = RuntimeError("the capture failed")
    assert not plan_sweep.ran_out(failed)
    failed.__context__ = torch.OutOfMemoryError()
    assert plan_sweep.ran_out(failed)
