"""benchmarks/dlrm_exchange_gpu.py at tiny sizes on the CPU, over gloo."""

from pathlib import Path

import pytest
import torch

from benchmarks import dlrm_exchange_gpu as bench
from benchmarks import dlrm_systems, timing
from benchmarks.common import read_rows
from trainmark.workloads.dlrm.runs import THRESHOLD_0

pytestmark = pytest.mark.usefixtures("no_process_group_is_left")


def test_every_case_writes_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlrm_systems, "POOL", 2)
    for name in ("WINDOW", "WARMUP"):
        monkeypatch.setattr(timing, name, 1)
    options = bench.Options(
        device=torch.device("cpu"), tiny=True, seconds=0.0, host_gib=0.001, output=tmp_path
    )
    for case in bench.CASES:
        bench.measure(case, options)
    rows = {row["case"]: row for row in read_rows("dlrm_exchange_tiny", tmp_path)}
    assert list(rows) == ["native", "direct", "exchange", "eager", "host", "int8"]
    for row in rows.values():
        assert row["samples_per_s"] * row["step_ms"] == pytest.approx(256 * 1000)
        assert row["split_ms"]["mlp"] > 0
    assert rows["direct"]["engine"] == "FusedEngine"
    for case in ("exchange", "eager"):
        assert rows[case]["engine"] == rows["host"]["engine"] == "ShardedEngine"
        ratio = rows[case]["step_ms"] / rows["direct"]["step_ms"]
        assert rows[case]["ratio_to_fused"] == pytest.approx(ratio)
        assert rows[case]["exchanged_bytes"]["rows"] == 256 * 8 * 16 * 2
    assert "ratio_to_fused" not in rows["host"]
    host = rows["host"]
    # The five largest of eight tables are on the host, and most of their rows there.
    assert host["host_gib"] == pytest.approx((3000 + 2000 + 1000 + 700 + 600) * 16 * 4 / 2**30)
    assert 0 < host["distinct_rows_on_host"] <= host["lookups_on_host"] == 256 * 5
    step_bytes = host["distinct_rows_on_host"] * 16 * 4
    for name, link in host["links"].items():
        assert link["bytes"] == step_bytes * (2 if "read and written" in name else 1)
        assert link["ms"] == pytest.approx(link["bytes"] / link["gb_s"] / 1e6)


def test_extra_bytes_are_those_of_the_buffers() -> None:
    B, F, D = 64, 3, 8
    found = bench.extra_bytes(B, F, D, element=2)
    rows = B * F * D * 2
    # Gathered once; read and written twice, by the exchanges of rows and of gradients; read by
    # both passes, of which the backward one then leaves the table's fp32 rows alone.
    expected = rows + 4 * rows + 2 * rows - B * F * D * 4
    ids = B * F * (4 + 4 + 4)  # written, then read and written
    places = B * F * 2 * (8 - 4)  # by both passes, in 64 bits instead of 32
    assert found["total"] == expected + ids + places
    assert sum(found.values()) == 2 * found["total"]


def test_large_tables_are_cut_to_the_room_there_is() -> None:
    assert bench.largest(THRESHOLD_0) == (0, 9, 19, 20, 21)
    for room in (96 * 2**30 / 512, 190_000_000 * 2.0):
        rows = bench.cut_rows(THRESHOLD_0, room)
        kept = [rows[table] for table in bench.largest(THRESHOLD_0)]
        assert room - 5 <= sum(kept) <= room
        assert all(
            a == b for i, (a, b) in enumerate(zip(rows, THRESHOLD_0, strict=True))
            if i not in bench.largest(THRESHOLD_0)
        )  # fmt: skip
