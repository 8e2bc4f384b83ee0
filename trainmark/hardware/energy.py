"""Energy by the hardware's own counters: NVML's of a GPU, RAPL's of CPU packages.

A counter is the truth where there is one: power that is sampled once a second misses what happens
in between. It counts the whole device or package, whatever runs on it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainmark.hardware.nvidia import Nvml

RAPL = Path("/sys/class/powercap")
NO_COUNTER = "this device has no energy counter that can be read"


@dataclass(frozen=True)
class Register:
    """A counter of the hardware, which wraps around to 0 beyond `most`."""

    read: Callable[[], float]
    """Reads it, in joules."""
    most: float = float("inf")


class EnergyCounter:
    """Joules since it was made, of all registers; none may pass its `most` twice between two calls.

    Attributes:
        source: what counts, or None.
        reason: why nothing does, or None.
    """

    def __init__(self, source: str | None, registers: list[Register], reason: str | None) -> None:
        self.source, self.reason = source, reason
        self._registers = registers
        self._last = [register.read() for register in registers]
        self._total = 0.0

    def joules(self) -> float | None:
        """Joules so far; None where nothing counts."""
        if self.source is None:
            return None
        try:
            now = [register.read() for register in self._registers]
        except Exception as error:  # a counter that is lost costs its figure, never the run
            self.source, self.reason = None, f"{self.source}: {error}"
            return None
        for register, before, after in zip(self._registers, self._last, now, strict=True):
            self._total += after - before if after >= before else register.most - before + after
        self._last = now
        return self._total


def gpu_counter(nvml: Nvml) -> EnergyCounter:
    """The counter of one NVIDIA GPU (Volta or newer)."""
    if nvml.handle is None:
        return EnergyCounter(None, [], nvml.reason or NO_COUNTER)
    library, handle = nvml.library, nvml.handle
    read = lambda: library.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000  # noqa: E731
    return _opened("NVML's energy counter of the GPU", [Register(read)])


def cpu_counter(folder: Path = RAPL) -> EnergyCounter:
    """The counter of all CPU packages of the machine; most systems let only root read it."""
    packages = sorted(folder.glob("intel-rapl:[0-9]*"))
    packages = [package for package in packages if package.name.count(":") == 1]
    if not packages:
        return EnergyCounter(None, [], f"{folder} has no RAPL counter of a CPU package")
    try:
        registers = [_rapl_register(package) for package in packages]
    except (OSError, ValueError) as error:
        return EnergyCounter(None, [], f"RAPL cannot be read: {error}")
    return _opened(f"RAPL of {len(packages)} CPU package(s)", registers)


def _rapl_register(package: Path) -> Register:
    most = int((package / "max_energy_range_uj").read_text()) / 1e6
    return Register(lambda: int((package / "energy_uj").read_text()) / 1e6, most)


def _opened(source: str, registers: list[Register]) -> EnergyCounter:
    try:
        return EnergyCounter(source, registers, None)
    except Exception as error:  # drivers differ in what they answer
        return EnergyCounter(None, [], f"{source}: {error}")
