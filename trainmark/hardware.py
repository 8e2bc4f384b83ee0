"""What accelerators can do at best, what this machine is, and how a cluster is written.

Peaks are dense (no sparsity) and come with their source. Hardware that is not in the tables has
no peak, only a reason: a stand-in would turn every MFU computed with it into fiction.

Importing this module is cheap (`--help` does it); torch, psutil and NVML are imported on use.
"""

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmark.errors import InputError, unknown

TERA = 1e12
GIB = 2**30

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")


# --- accelerators


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One row of a vendor's datasheet."""

    names: str
    """Regular expression over the whole lower-case name that the driver gives."""
    memory_gib: int
    """Nominal. The driver reports up to 2 % less; `identify` gives the real number."""
    bandwidth: float
    """Device memory, bytes/s."""
    tflops: dict[str, float]
    """Dense peak by precision; a precision that is missing has no units of its own."""
    source: str

    @property
    def memory_bytes(self) -> int:
        return self.memory_gib * GIB


_V100_SOURCE = "NVIDIA V100 datasheet, January 2020"
_V100_SXM = {"fp32": 15.7, "fp16": 125.0}
_V100_PCIE = {"fp32": 14.0, "fp16": 112.0}

_A100_SOURCE = "NVIDIA A100 datasheet, June 2021"
_A800_SOURCE = "NVIDIA A800 datasheet, 2022 (the compute of an A100)"
_A100 = {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0}

# The whitepaper gives dense figures with one decimal (494.7, 989.4, 1978.9); published results
# divide by whole teraflops, and so do we.
_H100_SOURCE = "NVIDIA H100 architecture whitepaper v1.04, 2023, dense, in whole TFLOPS"
_H100_SXM = {"fp32": 67.0, "tf32": 495.0, "bf16": 989.0, "fp16": 989.0, "fp8": 1979.0}
_H100_PCIE = {"fp32": 51.0, "tf32": 378.0, "bf16": 756.0, "fp16": 756.0, "fp8": 1513.0}
_HOPPER_NVL = {"fp32": 60.0, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5, "fp8": 1670.5}

ACCELERATORS = {
    "v100-16g": Accelerator(
        names=r"tesla v100-sxm[23]-16gb",
        memory_gib=16,
        bandwidth=0.9e12,
        tflops=_V100_SXM,
        source=_V100_SOURCE,
    ),
    "v100-32g": Accelerator(
        names=r"tesla v100-(sxm[23](-lp)?|dgxs)-32gb",
        memory_gib=32,
        bandwidth=0.9e12,
        tflops=_V100_SXM,
        source=_V100_SOURCE,
    ),
    "v100-pcie-16g": Accelerator(
        names=r"tesla v100-pcie-16gb",
        memory_gib=16,
        bandwidth=0.9e12,
        tflops=_V100_PCIE,
        source=_V100_SOURCE,
    ),
    "v100-pcie-32g": Accelerator(
        names=r"tesla v100-pcie-32gb",
        memory_gib=32,
        bandwidth=0.9e12,
        tflops=_V100_PCIE,
        source=_V100_SOURCE,
    ),
    "a100-40g": Accelerator(
        names=r"(nvidia )?a100-sxm4?-40gb",
        memory_gib=40,
        bandwidth=1.555e12,
        tflops=_A100,
        source=_A100_SOURCE,
    ),
    "a100-80g": Accelerator(
        names=r"(nvidia )?a100-sxm4?-80gb",
        memory_gib=80,
        bandwidth=2.039e12,
        tflops=_A100,
        source=_A100_SOURCE,
    ),
    "a100-pcie-40g": Accelerator(
        names=r"(nvidia )?a100-pcie-40gb",
        memory_gib=40,
        bandwidth=1.555e12,
        tflops=_A100,
        source=_A100_SOURCE,
    ),
    "a100-pcie-80g": Accelerator(
        names=r"(nvidia )?a100(-pcie-80gb| 80gb pcie)",
        memory_gib=80,
        bandwidth=1.935e12,
        tflops=_A100,
        source=_A100_SOURCE,
    ),
    "a800-40g": Accelerator(
        names=r"(nvidia )?a800(-sxm4-40gb|-pcie-40gb| 40gb active)",
        memory_gib=40,
        bandwidth=1.555e12,
        tflops=_A100,
        source=_A800_SOURCE,
    ),
    "a800-80g": Accelerator(
        names=r"(nvidia )?a800-sxm4-80gb",
        memory_gib=80,
        bandwidth=2.039e12,
        tflops=_A100,
        source=_A800_SOURCE,
    ),
    "a800-pcie-80g": Accelerator(
        names=r"(nvidia )?a800(-pcie-80gb| 80gb pcie)",
        memory_gib=80,
        bandwidth=1.935e12,
        tflops=_A100,
        source=_A800_SOURCE,
    ),
    "h100": Accelerator(
        names=r"nvidia h100 80gb hbm3",
        memory_gib=80,
        bandwidth=3.35e12,
        tflops=_H100_SXM,
        source=_H100_SOURCE,
    ),
    "h100-pcie": Accelerator(
        names=r"nvidia h100 pcie",
        memory_gib=80,
        bandwidth=2.0e12,
        tflops=_H100_PCIE,
        source=_H100_SOURCE,
    ),
    "h100-nvl": Accelerator(
        names=r"nvidia h100 nvl",
        memory_gib=94,
        bandwidth=3.9e12,
        tflops=_HOPPER_NVL,
        source="NVIDIA H100 datasheet, 2024, half of the figures with sparsity",
    ),
    "h200": Accelerator(
        names=r"nvidia h200",
        memory_gib=141,
        bandwidth=4.8e12,
        tflops=_H100_SXM,
        source="NVIDIA H200 datasheet, 2024, half of the figures with sparsity, in whole TFLOPS",
    ),
    "h200-nvl": Accelerator(
        names=r"nvidia h200 nvl",
        memory_gib=141,
        bandwidth=4.8e12,
        tflops=_HOPPER_NVL,
        source="NVIDIA H200 datasheet, 2024, half of the figures with sparsity",
    ),
    "b200": Accelerator(
        names=r"nvidia b200",
        memory_gib=180,
        bandwidth=7.7e12,
        tflops={"fp32": 75.0, "tf32": 1100.0, "bf16": 2250.0, "fp16": 2250.0, "fp8": 4500.0},
        source="NVIDIA Blackwell datasheet, 2025, HGX B200, half of the figures with sparsity",
    ),
    "mi300x": Accelerator(
        names=r"amd instinct mi300x( oam)?",
        memory_gib=192,
        bandwidth=5.3e12,
        tflops={"fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9},
        source="AMD Instinct MI300X data sheet, December 2023",
    ),
}

KEYS = ("cpu", *ACCELERATORS)


# --- CPUs


@dataclass(frozen=True)
class _Cpu:
    """A server CPU: its peak is cores x clock x operations per cycle and core.

    The clock is the highest that one core may reach, so that the peak is a true upper bound and
    no MFU can exceed 1 because of a turbo.
    """

    max_ghz: float
    flop_per_cycle: dict[str, int]
    source: str


_XEON_E5_V4 = "Intel ARK, Xeon E5 v4 family, 2016"
_XEON_1 = "Intel ARK, Xeon Scalable 1st generation, 2017"
_XEON_2 = "Intel ARK, Xeon Scalable 2nd generation, 2019"
_XEON_3 = "Intel ARK, Xeon Scalable 3rd generation, 2021"
_XEON_4 = "Intel ARK, Xeon Scalable 4th generation, 2023"
_XEON_5 = "Intel ARK, Xeon Scalable 5th generation, 2023"
_EPYC_7002 = "AMD EPYC 7002 product pages, 2019"
_EPYC_7003 = "AMD EPYC 7003 product pages, 2021"
_EPYC_9004 = "AMD EPYC 9004 product pages, 2022"
_EPYC_9005 = "AMD EPYC 9005 product pages, 2024"

_AVX2 = {"fp32": 32}  # two 256-bit fused multiply-adds: 2 x 8 lanes x 2
_AVX512 = {"fp32": 64}  # two 512-bit fused multiply-adds: 2 x 16 lanes x 2
_AMX = {"fp32": 64, "bf16": 1024}  # one 16x16x32 tile product every 16 cycles

# By a part of the model name that no other model has (a trailing space excludes longer names).
_CPUS = {
    "E5-2680 v4 ": _Cpu(3.3, _AVX2, _XEON_E5_V4),
    "E5-2690 v4 ": _Cpu(3.5, _AVX2, _XEON_E5_V4),
    "E5-2698 v4 ": _Cpu(3.6, _AVX2, _XEON_E5_V4),
    "E5-2699 v4 ": _Cpu(3.6, _AVX2, _XEON_E5_V4),
    "Gold 6148 ": _Cpu(3.7, _AVX512, _XEON_1),
    "Platinum 8168 ": _Cpu(3.7, _AVX512, _XEON_1),
    "Platinum 8180 ": _Cpu(3.8, _AVX512, _XEON_1),
    "Gold 6248 ": _Cpu(3.9, _AVX512, _XEON_2),
    "Platinum 8280 ": _Cpu(4.0, _AVX512, _XEON_2),
    "Gold 6348 ": _Cpu(3.5, _AVX512, _XEON_3),
    "Platinum 8358 ": _Cpu(3.4, _AVX512, _XEON_3),
    "Platinum 8380 ": _Cpu(3.4, _AVX512, _XEON_3),
    "Platinum 8468 ": _Cpu(3.8, _AMX, _XEON_4),
    "Platinum 8480+ ": _Cpu(3.8, _AMX, _XEON_4),
    "Platinum 8480C ": _Cpu(3.8, _AMX, "NVIDIA DGX H100 user guide, 2023"),
    "Platinum 8558 ": _Cpu(4.0, _AMX, _XEON_5),
    "Platinum 8570 ": _Cpu(4.0, _AMX, _XEON_5),
    "Platinum 8592+ ": _Cpu(3.9, _AMX, _XEON_5),
    "EPYC 7742 ": _Cpu(3.4, _AVX2, _EPYC_7002),
    "EPYC 7543 ": _Cpu(3.7, _AVX2, _EPYC_7003),
    "EPYC 7713 ": _Cpu(3.675, _AVX2, _EPYC_7003),
    "EPYC 7763 ": _Cpu(3.5, _AVX2, _EPYC_7003),
    "EPYC 9554 ": _Cpu(3.75, _AVX2, _EPYC_9004),  # Zen 4 splits 512-bit operations in two
    "EPYC 9654 ": _Cpu(3.7, _AVX2, _EPYC_9004),
    "EPYC 9655 ": _Cpu(4.5, _AVX512, _EPYC_9005),
    "EPYC 9755 ": _Cpu(4.1, _AVX512, _EPYC_9005),
}


def _find_cpu(name: str) -> _Cpu | None:
    padded = f"{name.lower()} "  # so that a name that ends with the model matches, too
    return next((cpu for part, cpu in _CPUS.items() if part.lower() in padded), None)


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
    """A key of `ACCELERATORS`, `cpu`, or the driver's name as a slug where it is in no table."""
    name: str
    """As the driver (or the kernel) gives it."""
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
    if key == "cpu":
        if isinstance(hardware, str):
            return Unknown("the peak of a CPU depends on its model, and only 'cpu' was given")
        return _cpu_peak(hardware, precision)
    if key not in ACCELERATORS:
        name = hardware if isinstance(hardware, str) else hardware.name
        return Unknown(f"no peak is known for {name!r}")
    accelerator = ACCELERATORS[key]
    if precision not in accelerator.tflops:
        return Unknown(f"{key} has no {precision} peak in its source ({accelerator.source})")
    return Peak(accelerator.tflops[precision] * TERA, precision, accelerator.source)


def lacks(hardware: str, precision: str) -> bool:
    """Whether this is known to be hardware without units for a precision."""
    return hardware in ACCELERATORS and precision not in ACCELERATORS[hardware].tflops


def _cpu_peak(device: Device, precision: str) -> Peak | Unknown:
    cpu = _find_cpu(device.name)
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
    """Per node."""

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
    def parse(cls, text: str) -> "Cluster":
        """Read HARDWARExNODESxDEVICES."""
        # Greedy on purpose: a key may itself contain an x (`mi300xx1x8`).
        match = re.fullmatch(r"(.+)x(\d{1,6})x(\d{1,6})", text.strip().lower())
        if match is None:
            raise InputError(
                f"Cluster {text!r} cannot be read: expected HARDWARExNODESxDEVICES, "
                "such as a100-40gx2x8 or cpux1x1."
            )
        hardware, nodes, devices = match.groups()
        if hardware not in KEYS and re.search(r"x\d+$", hardware):
            raise InputError(
                f"Cluster {text!r} has more than two numbers: expected HARDWARExNODESxDEVICES, "
                "such as a100-40gx2x8."
            )
        if hardware not in KEYS:
            raise _unknown_hardware(hardware)
        return cls(hardware, int(nodes), int(devices))


def _unknown_hardware(received: str) -> InputError:
    kinds = [key for key in KEYS if key.startswith(f"{received}-")]
    if kinds:
        return InputError(f"Hardware {received!r} comes in several kinds: {', '.join(kinds)}.")
    return unknown("hardware", received, KEYS)


# --- this machine


def identify(device: Any = "cpu") -> Device:
    """What `device` (a string or a `torch.device`) is."""
    import torch

    device = torch.device(device)
    if device.type == "cpu":
        return Device(
            key="cpu", name=cpu_name(), memory_bytes=host_memory_bytes(), cores=usable_cores()
        )
    properties = torch.cuda.get_device_properties(device)
    key = key_of(properties.name)
    return Device(key=key, name=properties.name, memory_bytes=properties.total_memory)


def key_of(name: str) -> str:
    """The table's key for a driver's device name; a slug of the name where there is none.

    A slice of an accelerator (MIG) is not the accelerator, so only whole names match.
    """
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
