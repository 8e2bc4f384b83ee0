"""The sweep that the planner is fitted to: its design, its rows, and that a failure ends one row.

What is measured here, on a CPU, means nothing.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import plan_design, plan_sweep
from benchmarks.common import Options


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "plan_sweep.jsonl").read_text().splitlines()]


# --- the design


def test_half_is_held_out() -> None:
    cases = plan_design.designed()
    assert len(cases) == 48
    assert sum(case.held_out for case in cases) == 24


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
    kept = [row | {name: found[i][name] for name in row} for i, row in enumerate(document["rows"])]
    assert document["rows"] == kept
    assert len(kept) == len(found)


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
    failed = {"case": second.name, "kind": "train", "error": "it ran out of time"}
    earlier.write_text(json.dumps({"rows": [{"case": first.name, "kind": "train"}, failed]}))
    words = ["--tiny", "--output", str(tmp_path), "--only", "dlrm", "--after", str(earlier)]
    plan_sweep.main(words)
    assert [row["case"] for row in rows(tmp_path)] == [second.name]
    document = json.loads((tmp_path / "plan_sweep_tiny.json").read_text())
    assert [row["case"] for row in document["rows"]] == [first.name, second.name]
    # Limits of a configuration that was trained already are measured, and kept.
    limits = dataclasses.replace(first, kind="limits")
    monkeypatch.setitem(plan_design.SECTIONS, "memory", lambda: [limits])
    words[words.index("dlrm")] = "memory"
    plan_sweep.main(words)
    document = json.loads((tmp_path / "plan_sweep_tiny.json").read_text())
    assert [row["kind"] for row in document["rows"]] == ["train", "train", "limits"]
    # And what is there is not measured again, a kind at a time.
    (tmp_path / "plan_sweep_tiny.json").rename(earlier)
    (tmp_path / "plan_sweep.jsonl").unlink()
    words.insert(words.index("memory"), "dlrm")
    plan_sweep.main(words)
    assert not (tmp_path / "plan_sweep.jsonl").exists()


def test_a_row_has_the_time_of_its_kernels_by_part(tmp_path: Path) -> None:
    first = {"case": "first", "kind": "train", "workload": "dlrm"}
    kernels = [
        ("void at::native::vectorized_elementwise_kernel<4, FillFunctor>", 7, 2.0),
        ("_forward_kernel", 7, 10.0),
        ("nvjet_hsh_128x256_64x4", 7, 30.0),
        ("_masked_gemm_kernel", 7, 20.0),
        ("_masked_sums_kernel", 7, 4.0),
        ("void cub::DeviceRadixSortOnesweepKernel", 13, 50.0),
        ("_column_sums_kernel", 7, 1.0),
        ("void at::native::index_elementwise_kernel", 13, 9.0),
        ("_update_kernel", 7, 8.0),
    ]
    (tmp_path / "plan_sweep.jsonl").write_text(json.dumps(first | {"measured_s": 1e-4}) + "\n")
    (tmp_path / "kernels.jsonl").write_text(json.dumps(first | {"kernels": kernels}) + "\n")
    options = Options(device=torch.device("cpu"), tiny=True, seconds=0.0, output=tmp_path)
    plan_sweep.collect(options)
    (row,) = json.loads((tmp_path / "plan_sweep_tiny.json").read_text())["rows"]
    assert row["kernels_us"] == {
        "small": 3.0, "forward": 10.0, "products": 50.0, "masks": 4.0, "update": 8.0,
    }  # fmt: skip


def test_trials_come_nearer_to_the_least_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a configuration that was planned to need 100 bytes needed 102."""

    def trial(case: plan_design.Case, options: Options, limit: float | None) -> dict[str, Any]:
        if limit is not None:
            return {"fits": limit >= 102}
        sizes = {"allocated_bytes": 100, "reserved_bytes": 150}
        return {"fits": True, "predicted": {"memory_bytes": 100}} | sizes

    monkeypatch.setattr(plan_sweep, "in_its_own_process", trial)
    options = Options(device=torch.device("cuda"), tiny=True, seconds=0.0, output=Path())
    case = plan_design.near_limits()[0]
    found = [(row["limit_bytes"], row["fits"]) for row in plan_sweep.measure_limits(case, options)]
    assert found[:3] == [(None, True), (96, False), (104, True)]
    assert found[3:] == [(100, False), (102, True), (101, False)]


def test_out_of_memory_is_known_behind_another_error() -> None:
    failed = RuntimeError("the capture failed")
    assert not plan_sweep.ran_out(failed)
    failed.__context__ = torch.OutOfMemoryError()
    assert plan_sweep.ran_out(failed)
