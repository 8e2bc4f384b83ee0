"""Power, utilisation, memory and energy while a run trains, sampled by a background thread.

    with Monitor(device) as monitor:
        ...  # train
    monitor.summary()

A query that fails costs one null in the summary and never the run.
"""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

from trainmark.hardware.energy import cpu_counter, gpu_counter
from trainmark.hardware.nvidia import Nvml, nvml_device

QUANTITIES = ("power_w", "utilisation", "memory_bytes", "host_memory_bytes", "temperature_c")


class Monitor:
    """Samples one device and this process once a second.

    Args:
        device: a string or a `torch.device`. An NVIDIA GPU is read through NVML; for a CPU,
            utilisation is that of the machine and memory is the resident set of this process.
        interval_s: between two samples. The first is taken at once and one more at the end, so
            that short runs have at least two.
    """

    def __init__(self, device: Any = "cpu", interval_s: float = 1.0) -> None:
        import torch  # here, so that its import does not count as the first second

        self.interval_s = interval_s
        self._device = torch.device(device)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainmark-monitor", daemon=True)
        self._series = {quantity: _Series() for quantity in QUANTITIES}
        self._samples = 0
        self._reason: str | None = None
        self._opened = ExitStack()
        self._lock = threading.Lock()
        self._integral = _Integral()
        # Time and joules of the latest sample, and of the one that it was at the last call.
        self._latest: tuple[float, float | None] | None = None
        self._asked: tuple[float, float | None] | None = None

    def __enter__(self) -> Self:
        self._nvml = self._opened.enter_context(nvml_device(self._device))
        on_cpu = self._device.type == "cpu"
        self._counter = cpu_counter() if on_cpu else gpu_counter(self._nvml)
        self._counts = self._counter.source is not None
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        # A driver call that hangs must not keep a finished run from writing its result.
        self._thread.join(timeout=10)
        self.joules()
        if not self._thread.is_alive():
            self._opened.close()

    def joules(self) -> float | None:
        """What the device (of CPUs: the machine) has used since the start, by its own counter."""
        with self._lock:
            return self._counter.joules()

    def power_w(self) -> float | None:
        """The mean power between two samples: the latest, and the one that was it at the last call.

        By the energy counter or, without one, by sampled power. None where there is neither, or no
        later sample.
        """
        before, self._asked = self._asked, self._latest
        if before is None or self._asked is None or before == self._asked:
            return None
        (then, used), (now, more) = before, self._asked
        return None if used is None or more is None else (more - used) / (now - then)

    def summary(self) -> dict[str, Any]:
        """Means and maxima; null where a quantity cannot be read, with the first reason.

        Utilisation is a fraction. `memory_bytes` is what the device reports as used, other
        processes included; on a CPU it is the memory of this process.
        """
        means = ("power_w", "utilisation", "memory_bytes")
        counter = self._counter
        summary: dict[str, Any] = {"interval_s": self.interval_s, "samples": self._samples}
        for quantity, series in self._series.items():
            summary[quantity] = {"mean": series.mean} if quantity in means else {}
            summary[quantity]["max"] = series.max
        summary["reason"] = self._reason
        summary["energy"] = {
            "source": counter.source,
            "joules": self.joules(),
            "sampled_joules": self._integral.joules,
            "reason": counter.reason,
        }
        return summary

    def _run(self) -> None:
        try:
            self._sample_until_stopped()
        except Exception as error:
            self._reason = self._reason or f"monitoring stopped: {error}"

    def _sample_until_stopped(self) -> None:
        import psutil

        process = psutil.Process()
        psutil.cpu_percent()  # only sets the start of the first interval
        if self._device.type == "cpu":
            queries = _cpu_queries(psutil, process)
        else:
            queries = _gpu_queries(self._nvml, process)
            self._reason = self._nvml.reason
        # Utilisation is over the time since the last sample: the first has no such time.
        self._sample({name: query for name, query in queries.items() if name != "utilisation"})
        while not self._stop.wait(self.interval_s):
            self._sample(queries)
        self._sample(queries)

    def _sample(self, queries: dict[str, Callable[[], float]]) -> None:
        self._samples += 1
        for quantity, query in queries.items():
            try:
                value = query()
                self._series[quantity].add(value)
                if quantity == "power_w":
                    self._integral.add(time.perf_counter(), value)
            except Exception as error:
                self._reason = self._reason or f"{quantity}: {error}"
        counted = self.joules()  # a CPU's register wraps around after minutes: read it before
        self._latest = (time.perf_counter(), counted if self._counts else self._integral.joules)
        self._asked = self._asked or self._latest


class _Series:
    """Mean and maximum without keeping the values: a run may last for days."""

    def __init__(self) -> None:
        self._count = 0
        self._sum = 0.0
        self.max: float | None = None

    def add(self, value: float) -> None:
        self._count += 1
        self._sum += value
        self.max = value if self.max is None else max(self.max, value)

    @property
    def mean(self) -> float | None:
        return self._sum / self._count if self._count else None


class _Integral:
    """Energy from samples of power, by the trapezoidal rule."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None
        self.joules: float | None = None

    def add(self, seconds: float, watts: float) -> None:
        if self._last is not None:
            before, then = self._last
            self.joules = (self.joules or 0.0) + (seconds - before) * (watts + then) / 2
        self._last = (seconds, watts)


def _cpu_queries(psutil: Any, process: Any) -> dict[str, Callable[[], float]]:
    return {
        "utilisation": lambda: psutil.cpu_percent() / 100,
        "memory_bytes": lambda: process.memory_info().rss,
        "host_memory_bytes": lambda: process.memory_info().rss,
    }


def _gpu_queries(nvml: Nvml, process: Any) -> dict[str, Callable[[], float]]:
    host = {"host_memory_bytes": lambda: process.memory_info().rss}
    if nvml.handle is None:
        return host
    library, handle = nvml.library, nvml.handle
    return host | {
        "power_w": lambda: library.nvmlDeviceGetPowerUsage(handle) / 1000,
        "utilisation": lambda: library.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        # Version 2 leaves out what the driver reserves, as nvidia-smi does.
        "memory_bytes": lambda: (
            library.nvmlDeviceGetMemoryInfo(handle, version=library.nvmlMemory_v2).used
        ),
        "temperature_c": lambda: library.nvmlDeviceGetTemperature(
            handle, library.NVML_TEMPERATURE_GPU
        ),
    }
