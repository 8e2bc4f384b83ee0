"""What a device can do at best, how a cluster is written, and what this machine is.

Importing this module is cheap (`--help` does it); torch, psutil and NVML are imported on use.
"""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from trainmark.errors import InputError, unknown
from trainmark.hardware import backends, known
from trainmark.hardware.datasheets import ACCELERATORS, find_cpu

Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
PRECISIONS: tuple[str, ...] = get_args(Precision)


# --- peaks


@dataclass(frozen=True)
class Peak:
    flops: float
    """Operations per second of one device."""
    dtype: str
    source: str


@dataclass(frozen=True)
class Unknown:
    reason: str


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or the CPUs of one machine."""

    key: str
    """A key of `ACCELERATORS` or of a `hardware.toml`, `cpu`, or the driver's name as a slug."""
    name: str
    """The name that the driver (or the kernel) gives."""
    memory_bytes: int
    cores: int | None = None
    """Physical cores that this process may use; CPUs only."""


def peak_flops(hardware: str | Device, precision: str) -> Peak | Unknown:
    """The dense peak of one device in one precision, with its source; or why there is none.

    Args:
        hardware: a `Device` from `identify`, or a key such as `h200`. For a CPU it must be the
            `Device`, because the key `cpu` does not say which one.
        precision: of the matrix products: fp32, tf32, bf16, fp16 or fp8.
    """
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    key = hardware if isinstance(hardware, str) else hardware.key
    found = known.lookup(key)
    if found and precision in found.peaks:
        return Peak(found.peaks[precision].value, precision, found.peaks[precision].source)
    if key == "cpu":
        if isinstance(hardware, str):
            return Unknown("the peak of a CPU depends on its model, and only 'cpu' was given")
        return _cpu_peak(hardware, precision)
    if found is None or not found.peaks:
        name = hardware if isinstance(hardware, str) else hardware.name
        return Unknown(f"no peak is known for {name!r}")
    sources = ", ".join(dict.fromkeys(peak.source for peak in found.peaks.values()))
    return Unknown(f"{key} has no {precision} peak in its source ({sources})")


def lacks(hardware: str, precision: str) -> bool:
    """Whether this is known to be hardware without units for a precision."""
    return hardware in ACCELERATORS and precision not in ACCELERATORS[hardware].tflops


def _cpu_peak(device: Device, precision: str) -> Peak | Unknown:
    cpu = find_cpu(device.name)
    if cpu is None or device.cores is None:
        return Unknown(f"no peak is known for the CPU {device.name!r}")
    if precision not in cpu.flop_per_cycle:
        return Unknown(f"no {precision} peak is known for the CPU {device.name!r}")
    per_cycle = cpu.flop_per_cycle[precision]
    formula = f"{device.cores} cores x {cpu.max_ghz} GHz x {per_cycle} FLOP/cycle"
    flops = device.cores * cpu.max_ghz * 1e9 * per_cycle
    return Peak(flops, precision, f"{formula}; {cpu.source}")


# --- clusters


@dataclass(frozen=True)
class Cluster:
    """So many nodes with so many devices each: `a100-40gx2x8`, `cpux1x1`."""

    hardware: str
    nodes: int
    devices: int
    """Devices of each node."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.devices < 1:
            raise InputError(f"Cluster {self}: nodes and devices must be at least 1.")

    def __str__(self) -> str:
        return f"{self.hardware}x{self.nodes}x{self.devices}"

    @property
    def world(self) -> int:
        """All devices."""
        return self.nodes * self.devices

    @classmethod
    def parse(cls, text: str, keys: Collection[str] | None = None) -> "Cluster":
        """Read HARDWARExNODESxDEVICES; by default of all hardware that is known."""
        keys = known.keys() if keys is None else keys
        # Greedy on purpose: a key may itself contain an x (`mi300xx1x8`).
        match = re.fullmatch(r"(.+)x(\d{1,6})x(\d{1,6})", text.strip().lower())
        if match is None:
            raise InputError(
                f"Cluster {text!r} cannot be read: expected HARDWARExNODESxDEVICES, "
                "such as a100-40gx2x8 or cpux1x1."
            )
        hardware, nodes, devices = match.groups()
        if hardware not in keys and re.sub(r"(x\d+)+$", "", hardware) in keys:
            raise InputError(
                f"Cluster {text!r} has more than two numbers: expected HARDWARExNODESxDEVICES, "
                "such as a100-40gx2x8."
            )
        if hardware not in keys:
            raise _unknown_hardware(hardware, keys)
        return cls(hardware, int(nodes), int(devices))


def _unknown_hardware(received: str, keys: Collection[str]) -> InputError:
    kinds = [key for key in keys if key.startswith(f"{received}-")]
    if kinds:
        return InputError(f"Hardware {received!r} comes in several kinds: {', '.join(kinds)}.")
    told = unknown("hardware", received, keys)
    return InputError(f"{told} Another one is described by a hardware.toml (--hardware).")


# --- this machine


def identify(device: Any = "cpu") -> Device:
    """What `device` (a string or a `torch.device`) is."""
    import torch

    device = torch.device(device)
    if device.type == "cpu":
        return Device(
            key="cpu", name=cpu_name(), memory_bytes=host_memory_bytes(), cores=usable_cores()
        )
    name, memory = backends.name_and_memory(device)
    return Device(key=key_of(name), name=name, memory_bytes=memory)


def accelerators() -> list[str]:
    """The key of each accelerator that a process on this machine sees.

    Asked of another process: this one would keep memory of the devices, and whoever measures what
    is in use there, as a run does, would count it.
    """
    code = (
        "from trainmark.hardware import backends, devices; "
        "print(*(devices.identify(device).key for device in backends.all_here()))"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise InputError(
            f"PyTorch cannot say which accelerators are here (exit code {done.returncode})."
        )
    return done.stdout.split()


def key_of(name: str) -> str:
    """The table's key for a driver's device name; a slug of the name where there is none.

    A slice of an accelerator (MIG) is not the accelerator, so only whole names match.
    """
    if key := known.key_of_described(name):
        return key
    lower = name.strip().lower()
    for key, accelerator in ACCELERATORS.items():
        if re.fullmatch(accelerator.names, lower):
            return key
    return re.sub(r"[^a-z0-9]+", "-", lower).strip("-") or "unknown"


def cpu_name() -> str:
    cpuinfo = read_if_there("/proc/cpuinfo") or ""
    match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def usable_cores() -> int:
    """Physical cores that this process may run on."""
    import psutil

    physical = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    try:
        return min(physical, len(os.sched_getaffinity(0)))
    except AttributeError:  # not on macOS
        return physical


def host_memory_bytes() -> int:
    """Memory of the machine, or the container's limit where that is lower."""
    import psutil

    total: int = psutil.virtual_memory().total
    limit = read_if_there("/sys/fs/cgroup/memory.max")
    return min(total, int(limit)) if limit and limit.isdigit() else total


def read_if_there(path: str) -> str | None:
    try:
        return Path(path).read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None
