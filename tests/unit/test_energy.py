"""Joules: counters that start anew, what belongs to training, and what a result says of it."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.results import make_result
from trainmark.hardware import monitor as monitors
from trainmark.hardware.energy import cpu_counter, gpu_counter
from trainmark.hardware.nvidia import Nvml
from trainmark.report.comparison import compare
from trainmark.report.sections import energy_facts
from trainmark.run.clocks import Clocks
from trainmark.run.energy import energy_note
from trainmark.run.result import Energy


def write_package(folder: Path, name: str, microjoules: int) -> Path:
    package = folder / name
    package.mkdir(exist_ok=True)
    (package / "energy_uj").write_text(f"{microjoules}\n")
    (package / "max_energy_range_uj").write_text("1000000000\n")
    return package


def test_rapl_adds_packages_up_and_survives_registers_that_start_anew(tmp_path: Path) -> None:
    write_package(tmp_path, "intel-rapl:0", 999_000_000)
    write_package(tmp_path, "intel-rapl:1", 5_000_000)
    write_package(tmp_path, "intel-rapl:0:0", 7)  # a part of package 0: counted there already
    counter = cpu_counter(tmp_path)
    assert counter.source == "RAPL of 2 CPU package(s)"
    assert counter.joules() == 0
    write_package(tmp_path, "intel-rapl:0", 3_000_000)
    write_package(tmp_path, "intel-rapl:1", 6_000_000)
    assert counter.joules() == pytest.approx(4 + 1)
    write_package(tmp_path, "intel-rapl:0", 4_000_000)
    assert counter.joules() == pytest.approx(6)


def test_without_a_counter_there_is_a_reason(tmp_path: Path) -> None:
    assert "no RAPL counter" in (cpu_counter(tmp_path).reason or "")
    package = write_package(tmp_path, "intel-rapl:0", 1)
    (package / "energy_uj").write_text("nothing")
    assert cpu_counter(tmp_path).reason
    assert cpu_counter(tmp_path).joules() is None
    assert gpu_counter(Nvml(reason="no driver")).reason == "no driver"


def test_a_gpu_that_does_not_count_or_stops_counting_costs_the_figure_only() -> None:
    def unsupported(handle: object) -> int:
        raise RuntimeError("Not Supported")

    old = SimpleNamespace(nvmlDeviceGetTotalEnergyConsumption=unsupported)
    assert "Not Supported" in (gpu_counter(Nvml(old, "handle")).reason or "")
    values: Iterator[int] = iter([1_000, 251_000])
    new = SimpleNamespace(nvmlDeviceGetTotalEnergyConsumption=lambda handle: next(values))
    counter = gpu_counter(Nvml(new, "handle"))
    assert counter.joules() == 250  # NVML counts millijoules
    assert counter.joules() is None
    assert counter.source is None
    assert "NVML" in (counter.reason or "")


class Meter:
    """A device that has used what the test says."""

    def __init__(self) -> None:
        self.now: float | None = 1000.0

    def __call__(self) -> float | None:
        return self.now

    def uses(self, joules: float) -> None:
        assert self.now is not None
        self.now += joules


def session(clocks: Clocks, meter: Meter) -> None:
    """10 J of init, 20 of warm-up, two measured steps of 3 with an evaluation of 50 between."""
    meter.uses(10)
    clocks.train_starts()
    meter.uses(20)
    clocks.step_done(samples=1, tokens=0, partial=False)
    meter.uses(3)
    clocks.step_done(samples=1, tokens=0, partial=False)
    with clocks.pause("evaluation"):
        meter.uses(50)
    meter.uses(3)
    clocks.step_done(samples=1, tokens=0, partial=False)
    clocks.last_step_done()
    meter.uses(7)  # the final evaluation


def test_training_is_charged_for_its_steps_only_over_sessions() -> None:
    meter = Meter()
    meter.now = 0.0
    first = Clocks(0.0, 1, joules=meter)
    session(first, meter)
    state = dataclasses.asdict(first.so_far())
    assert (state["train_joules"], state["joules"]) == (6, 93)
    meter.now = 0.0  # another process, another monitor
    second = Clocks(0.0, 1, joules=meter)
    second.restore(state)
    session(second, meter)
    second.run_ends()
    assert (second.totals.train_joules, second.totals.joules) == (12, 186)


def test_a_session_that_did_not_count_makes_the_sum_unknown() -> None:
    meter = Meter()
    clocks = Clocks(0.0, 1, joules=meter)
    old = {
        k: v
        for k, v in dataclasses.asdict(clocks.so_far()).items()
        if k not in ("joules", "train_joules")
    }
    clocks.restore(old)
    session(clocks, meter)
    clocks.run_ends()
    assert clocks.totals.joules is None
    assert clocks.totals.train_joules is None


def found(**changes: Any) -> dict[str, Any]:
    energy = {"source": "the counter", "joules": 1000.0, "sampled_joules": 1000.0, "reason": None}
    return {"samples": 60, "interval_s": 1.0, "energy": energy | changes}


def test_a_counter_that_disagrees_with_the_samples_has_a_note() -> None:
    assert energy_note(found(sampled_joules=1049.0)) == []
    assert energy_note(found(joules=None)) == []
    assert energy_note(found(sampled_joules=None)) == []
    [note] = energy_note(found(sampled_joules=940.0))
    assert "1,000 J" in note
    assert "940 J (-6.0%)" in note
    assert energy_note(found(sampled_joules=500.0) | {"samples": 5}) == []


def test_sampled_power_is_integrated() -> None:
    integral = monitors._Integral()
    for seconds, watts in ((10, 100.0), (11, 300.0), (13, 300.0)):
        integral.add(seconds, watts)
    assert integral.joules == 200 + 600


def test_every_result_has_the_same_lines_and_old_ones_have_dashes() -> None:
    energy = Energy(
        source="NVML",
        joules=151_000.0,
        train_joules=120_000.0,
        joules_per_sample=2.92e-5,
        joules_per_token=None,
        samples_per_joule=34_200.0,
        mean_power_w=690.0,
        peak_power_w=712.0,
        reason=None,
        cost=1.25,
    )
    old, new = dict(energy_facts(None)), dict(energy_facts(energy))
    assert list(old) == list(new)
    assert new["energy"] == "151 kJ"
    assert new["energy per sample"] == "29.2 uJ"
    assert new["cost"] == "1.25"
    assert set(old.values()) == {"—"}
    assert compare(make_result(), dataclasses.replace(make_result(), energy=energy))
