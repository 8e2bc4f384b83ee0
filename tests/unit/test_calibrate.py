"""`trainmark calibrate`: what it writes, alone and on ranks. No rate is judged."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import rank_processes
from tests.distributed import joining
from trainmark.cli import main
from trainmark.hardware import hardware_file
from trainmark.hardware.devices import cpu_name
from trainmark.hardware.known import Known, Measured
from trainmark.verbs import bench, calibrate, calibrate_steps
from trainmark.verbs.bench import Bench, Scale

OF_ROWS = ["gather", "update", "adagrad", "rowwise_adagrad"]
SMALL = Scale(
    rows=32, widest=256, table_bytes=2**16, lookups=256, copy_bytes=2**16, file_bytes=2**20,
    budget_s=0.0, samples=32,
)  # fmt: skip


def test_a_calibrated_cpu_can_be_planned_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "CPU_SCALE", SMALL)
    steps_s = calibrate_steps._measured_s
    monkeypatch.setattr(  # so that their parts take less, however busy the machine is
        calibrate_steps, "_measured_s", lambda *of: {n: 60 + s for n, s in steps_s(*of).items()}
    )
    monkeypatch.setattr(calibrate_steps, "STEPS", {16: 4, 4096: 2})
    file = tmp_path / "hardware.toml"
    assert main(["calibrate", "--device", "cpu", "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{file}: give it as --hardware.\n"
    found = hardware_file.read(file)
    assert (found.key, found.name) == ("cpu", cpu_name())
    measured = found.measured
    of_rows = {name: getattr(measured, name) for name in OF_ROWS}
    for rates in (of_rows, measured.small):
        assert list(rates) == OF_ROWS
        assert all(sorted(found) == [64, 256, 512] for found in rates.values())
    assert sorted(measured.interaction) == [16, 64, 128]
    for by_precision in (measured.gemm, measured.layer, measured.layer_s):
        assert {name: sorted(rates) for name, rates in by_precision.items()} == {
            "fp32": [16, 64, 256],
            "bf16": [16, 64, 256],
        }
    figures = [measured.copy, measured.launch_s, measured.step_s, measured.disk]
    assert min(figure or 0 for figure in figures) > 0
    assert measured.node is measured.network is measured.host is None
    assert "calibrate" in measured.source
    assert main(["plan", "dlrm-demo", "--hardware", str(file)]) == 0
    assert "Predicted, not measured" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hardware.toml"]


CPU = torch.device("cpu")


def _one_second(_: Bench, action: Callable[[], object]) -> float:
    action()
    return 1.0


def test_the_bytes_of_a_rate_are_those_that_were_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every action taking a second, a rate is what it moved, or computed."""
    monkeypatch.setattr(Bench, "seconds_of", _one_second)
    timed = Bench(CPU, SMALL)
    assert timed._copy() == 2 * 2**16
    assert timed._gemm("fp32", 64) == 2 * 32 * 64 * 64
    # With the lookup as long as all, half of it is taken to be products.
    assert timed._interaction(8) == 2 * 32 * 6 * 8 * (27 * 26 // 2)
    distinct = len(torch.randint(16, (256,), generator=torch.Generator().manual_seed(0)).unique())
    assert timed._gather(64 * 16, 16) == 256 * (64 + 64)
    for optimizer, state in (("sgd", 0), ("rowwise_adagrad", 4), ("adagrad", 64)):
        changed = 256 * (64 + 64) + 2 * distinct * (64 + state)
        assert timed._update(64 * 16, 16, optimizer) == changed
    several = Bench(CPU, dataclasses.replace(SMALL, tables=4))
    store, ids, rows = several._table(64 * 16, 16, "sgd")
    assert store.weight.shape == (4 * 16, 16)
    assert ids.view(4, 64).div(16, rounding_mode="floor").tolist() == [[n] * 64 for n in range(4)]
    assert len(rows) == 256


def test_a_layer_has_a_rate_and_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds_of(samples: int) -> float:
        return 3e-6 + 6 * 64 * 64 * samples / 5e10

    monkeypatch.setattr(Bench, "_mlp_s", lambda *arguments: seconds_of(arguments[-1]))
    timed = Bench(CPU, dataclasses.replace(SMALL, samples=4096))
    assert timed._layer("fp32", 64) == pytest.approx((5e10, 3e-6))
    # Noise of a busy machine must not make either of them negative.
    monkeypatch.setattr(Bench, "_mlp_s", lambda *arguments: 1 / arguments[-1])
    assert min(timed._layer("fp32", 64)) > 0


def test_whole_steps_tell_what_their_parts_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no rates but these: a step that takes 5 ms, and 2 us of each sample."""
    rates = {"fp32": {64: 1e15}}
    tables: Any = {name: {64: 1e15} for name in OF_ROWS}
    measured = Measured(source="fast", copy=1e15, gemm=rates, interaction={16: 1e15}, **tables)
    monkeypatch.setattr(
        calibrate_steps, "_measured_s", lambda runs, mesh: {n: 5e-3 + 2e-6 * n for n in runs}
    )
    found = calibrate_steps.with_whole_steps(
        Known(key="cpu", name="fast", measured=measured), torch.device("cpu")
    )
    assert found.measured.step_s == pytest.approx(5e-3, rel=1e-3)
    assert found.measured.id_s == pytest.approx(2e-6 / 26, rel=1e-3)
    assert found.measured.gemm == rates


def test_the_first_two_times_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    durations = [9.0, 9.0, 3.0, 1.0, 2.0, 5.0, 9.0]
    clock = iter([t for d in durations for t in (0.0, d)])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    timed = Bench(CPU, dataclasses.replace(SMALL, budget_s=-10.0))
    assert timed.seconds_of(lambda: None) == 4.0


def _rank(rank: int, folder: Path) -> None:
    os.environ["WORLD_SIZE"] = "2"
    here = joining.join(rank, 2, folder / "store")
    node, network, collective_s = calibrate._links(here, SMALL.copy_bytes)
    assert node is not None
    assert collective_s is not None
    assert node > 0
    assert 0 < collective_s < 1
    assert network is None
    own = Measured(copy=float(rank + 1), gather={64: 2.0}, disk=None if rank else 5.0)
    together = calibrate._over_ranks(own, shared=True)
    assert (together.copy, together.gather, together.disk) == (3.0, {64: 4.0}, 5.0)
    assert calibrate._over_ranks(own, shared=False).copy == 1.5
    dist.destroy_process_group()


def test_a_device_is_not_waited_for_after_each_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes as long as a small one."""
    clock, waits = 0.0, 0

    def wait() -> None:
        nonlocal clock, waits
        clock += 50e-6
        waits += 1

    def operate() -> None:
        nonlocal clock
        clock += 10e-6

    monkeypatch.setattr(bench.backends, "synchronizer", lambda _: wait)
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock)
    scale = dataclasses.replace(SMALL, budget_s=0.1)
    found = Bench(torch.device("cuda"), scale).seconds_of(operate)
    assert found == pytest.approx(10e-6, rel=0.1)
    assert Bench(CPU, scale).seconds_of(operate) == pytest.approx(60e-6)


def test_ranks_measure_their_links_and_add_up_their_rates(tmp_path: Path) -> None:
    rank_processes.run(_rank, tmp_path, world=2)
