"""What the monitor samples of a device while a run trains, and where it cannot."""

import json
import mmap
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tests.waiting import wait_until
from trainmark.hardware import monitor
from trainmark.hardware.monitor import Monitor
from trainmark.hardware.nvidia import Nvml


def run(device: Any, samples: int) -> dict[str, Any]:
    with Monitor(device, interval_s=0.02) as watching:
        wait_for(watching, samples)
    return watching.summary()


def wait_for(watching: Monitor, more: int) -> None:
    """So many more samples, however long a busy machine takes for them."""
    enough = watching.summary()["samples"] + more
    wait_until(lambda: watching.summary()["samples"] >= enough)


def test_a_cpu_is_read_through_psutil() -> None:
    summary = run("cpu", 3)
    assert summary["samples"] >= 3
    assert 0 <= summary["utilisation"]["mean"] <= summary["utilisation"]["max"] <= 1.01
    assert 2**20 < summary["memory_bytes"]["mean"] <= summary["memory_bytes"]["max"] < 2**36
    assert summary["host_memory_bytes"]["max"] == summary["memory_bytes"]["max"]
    assert summary["power_w"] == {"mean": None, "max": None}
    assert summary["temperature_c"] == {"max": None}
    assert summary["reason"] is None
    json.dumps(summary)


def test_the_peak_follows_memory_that_is_allocated_and_freed() -> None:
    with Monitor("cpu", interval_s=0.02) as watching:
        wait_for(watching, 2)
        before = watching.summary()["host_memory_bytes"]["max"]
        # Not from malloc, which may have as much that others have freed.
        with mmap.mmap(-1, 150_000_000) as block:
            for page in range(0, len(block), mmap.PAGESIZE):
                block[page] = 1
            wait_for(watching, 2)
    assert watching.summary()["host_memory_bytes"]["max"] - before > 100_000_000


def test_it_stops_at_once_and_leaves_no_thread() -> None:
    with Monitor("cpu", interval_s=10**7):  # a test that waited for the next sample would hang
        pass
    assert not [t for t in threading.enumerate() if t.name == "trainmark-monitor"]


def test_an_error_of_the_run_passes_through() -> None:
    with pytest.raises(KeyError), Monitor("cpu", interval_s=60):
        raise KeyError("training failed")


def test_a_missing_driver_gives_a_reason_and_still_the_host_memory() -> None:
    """On a machine without NVIDIA's driver `cuda` cannot be read; on one with it, it can."""
    summary = run("cuda:7", 1)
    assert "NVML" in summary["reason"]
    assert summary["power_w"]["mean"] is None
    assert summary["host_memory_bytes"]["max"] > 2**20


class FakeNvml:
    """One GPU whose power sensor fails after the first reading."""

    NVML_TEMPERATURE_GPU = 0
    nvmlMemory_v2 = 2

    def __init__(self) -> None:
        self.readings = 0

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        self.readings += 1
        if self.readings > 1:
            raise RuntimeError("sensor lost")
        return 350_000

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(gpu=75)

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int) -> SimpleNamespace:  # noqa: N802
        assert version == self.nvmlMemory_v2
        return SimpleNamespace(used=5_000_000_000)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:  # noqa: N802
        return 61


def test_a_gpu_is_read_through_nvml_and_a_lost_sensor_costs_only_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Opened:
        def __enter__(self) -> Nvml:
            return Nvml(FakeNvml(), "handle")

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(monitor, "nvml_device", lambda device: Opened())
    summary = run("cuda", 3)
    assert summary["power_w"] == {"mean": 350.0, "max": 350.0}
    assert summary["utilisation"] == {"mean": 0.75, "max": 0.75}
    assert summary["memory_bytes"]["max"] == 5_000_000_000
    assert summary["temperature_c"] == {"max": 61}
    assert summary["reason"] == "power_w: sensor lost"
    assert summary["samples"] > 2


def test_power_is_the_mean_between_two_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    times, joules = iter([10.0, 11.0, 13.0, 14.0]), iter([100.0, 400.0, 800.0, 900.0])
    monkeypatch.setattr(monitor, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    watching = Monitor("cpu")
    watching._counter, watching._counts = SimpleNamespace(joules=lambda: next(joules)), True  # type: ignore[assignment]
    assert watching.power_w() is None  # nothing was sampled
    for _ in range(3):
        watching._sample({})
    assert watching.power_w() == pytest.approx(700 / 3)
    assert watching.power_w() is None  # no sample since
    watching._sample({})
    assert watching.power_w() == pytest.approx(100)


@pytest.mark.parametrize("sampled", [True, False])
def test_without_a_counter_power_is_that_of_the_sensor(
    sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, watts = 0.0, iter([100.0, 200.0, 300.0, 300.0])
    monkeypatch.setattr(monitor, "time", SimpleNamespace(perf_counter=lambda: now))
    queries = {"power_w": lambda: next(watts)} if sampled else {}
    watching = Monitor("cpu")
    watching._counter, watching._counts = SimpleNamespace(joules=lambda: None), False  # type: ignore[assignment]
    for _ in range(4):
        watching._sample(queries)
        found = watching.power_w()
        now += 1.0
    assert found == (300.0 if sampled else None)
