"""`trainmark calibrate`: what it writes, alone and on ranks. No rate is judged."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import rank_processes
from tests.distributed import joining
from trainmark.cli import main
from trainmark.hardware import hardware_file
from trainmark.hardware.devices import cpu_name
from trainmark.hardware.known import Measured
from trainmark.verbs import calibrate

SMALL = calibrate.Scale(
    rows=32, widest=256, table_bytes=2**16, lookups=256, copy_bytes=2**16, file_bytes=2**20,
    budget_s=0.0,
)  # fmt: skip


def test_a_calibrated_cpu_can_be_planned_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "CPU_SCALE", SMALL)
    file = tmp_path / "hardware.toml"
    assert main(["calibrate", "--device", "cpu", "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{file}: give it as --hardware.\n"
    found = hardware_file.read(file)
    assert (found.key, found.name) == ("cpu", cpu_name())
    measured = found.measured
    for rates in (measured.gather, measured.update, measured.adagrad, measured.rowwise_adagrad):
        assert sorted(rates) == [64, 256, 512]
    assert sorted(measured.interaction) == [16, 64, 128]
    assert {name: sorted(rates) for name, rates in measured.gemm.items()} == {
        "fp32": [16, 64, 256],
        "bf16": [16, 64, 256],
    }
    assert min(measured.copy or 0, measured.launch_s or 0, measured.threads_s or 0) > 0
    assert (measured.disk or 0) > 0
    assert measured.node is measured.network is measured.host is None
    assert "calibrate" in measured.source
    assert main(["plan", "dlrm-demo", "--hardware", str(file)]) == 0
    assert "Predicted, not measured" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hardware.toml"]


def _one_second(action: Callable[[], object], here: torch.device, budget_s: float) -> float:
    action()
    return 1.0


def test_the_bytes_of_a_rate_are_those_that_were_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every action taking a second, a rate is what it moved, or computed."""
    monkeypatch.setattr(calibrate, "seconds_of", _one_second)
    here = torch.device("cpu")
    assert calibrate._copy(here, SMALL) == 2 * 2**16
    assert calibrate._gemm(here, SMALL, "fp32", 64) == 2 * 32 * 64 * 64
    assert calibrate._interaction(here, SMALL, 8) == 32 * 6 * 8 * (27 * 26 // 2)
    small = dataclasses.replace(SMALL, table_bytes=64 * 16)
    distinct = len(torch.randint(16, (256,), generator=torch.Generator().manual_seed(0)).unique())
    assert calibrate._gather(here, small, 16) == 256 * (64 + 64)
    for optimizer, state in (("sgd", 0), ("rowwise_adagrad", 4), ("adagrad", 64)):
        changed = 256 * (64 + 64) + 2 * distinct * (64 + state)
        assert calibrate._update(here, small, 16, optimizer) == changed


def test_the_first_two_times_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    durations = [9.0, 9.0, 3.0, 1.0, 2.0, 5.0, 9.0]
    clock = iter([t for d in durations for t in (0.0, d)])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    assert calibrate.seconds_of(lambda: None, torch.device("cpu"), -10.0) == 4.0


def _rank(rank: int, folder: Path) -> None:
    os.environ["WORLD_SIZE"] = "2"
    here = joining.join(rank, 2, folder / "store")
    node, network, collective_s = calibrate._links(here, SMALL)
    assert node is not None
    assert collective_s is not None
    assert node > 0
    assert 0 < collective_s < 1
    assert network is None
    own = Measured(copy=float(rank + 1), gather={64: 2.0})
    together = calibrate._over_ranks(own, shared=True)
    assert (together.copy, together.gather) == (3.0, {64: 4.0})
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

    monkeypatch.setattr(calibrate.backends, "synchronizer", lambda _: wait)
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: clock)
    found = calibrate.seconds_of(operate, torch.device("cuda"), 0.1)
    assert found == pytest.approx(10e-6, rel=0.1)
    assert calibrate.seconds_of(operate, torch.device("cpu"), 0.1) == pytest.approx(60e-6)


def test_ranks_measure_their_links_and_add_up_their_rates(tmp_path: Path) -> None:
    rank_processes.run(_rank, tmp_path, world=2)
