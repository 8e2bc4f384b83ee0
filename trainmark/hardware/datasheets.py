"""What vendors say of their accelerators and CPUs, each with the source; nothing is measured here.

Peaks are dense (no sparsity). Hardware that is not in these tables has no peak: a stand-in would
turn every MFU computed with it into fiction. How devices are connected: `links.py`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
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
        return self.memory_gib * 2**30


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
_H100_NVL_SOURCE = "NVIDIA H100 datasheet, 2024, half of the figures with sparsity"
_H200_SOURCE = "NVIDIA H200 datasheet, 2024, half of the figures with sparsity"
_HOPPER_NVL = {"fp32": 60.0, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5, "fp8": 1670.5}
_B200_SOURCE = "NVIDIA Blackwell datasheet, 2025, HGX B200, half of the figures with sparsity"
_B200 = {"fp32": 75.0, "tf32": 1100.0, "bf16": 2250.0, "fp16": 2250.0, "fp8": 4500.0}
_MI300X_SOURCE = "AMD Instinct MI300X data sheet, December 2023"
_MI300X = {"fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9}

ACCELERATORS = {
    "v100-16g": Accelerator(r"tesla v100-sxm[23]-16gb", 16, 0.9e12, _V100_SXM, _V100_SOURCE),
    "v100-32g": Accelerator(
        r"tesla v100-(sxm[23](-lp)?|dgxs)-32gb", 32, 0.9e12, _V100_SXM, _V100_SOURCE
    ),
    "v100-pcie-16g": Accelerator(r"tesla v100-pcie-16gb", 16, 0.9e12, _V100_PCIE, _V100_SOURCE),
    "v100-pcie-32g": Accelerator(r"tesla v100-pcie-32gb", 32, 0.9e12, _V100_PCIE, _V100_SOURCE),
    "a100-40g": Accelerator(r"(nvidia )?a100-sxm4?-40gb", 40, 1.555e12, _A100, _A100_SOURCE),
    "a100-80g": Accelerator(r"(nvidia )?a100-sxm4?-80gb", 80, 2.039e12, _A100, _A100_SOURCE),
    "a100-pcie-40g": Accelerator(r"(nvidia )?a100-pcie-40gb", 40, 1.555e12, _A100, _A100_SOURCE),
    "a100-pcie-80g": Accelerator(
        r"(nvidia )?a100(-pcie-80gb| 80gb pcie)", 80, 1.935e12, _A100, _A100_SOURCE
    ),
    "a800-40g": Accelerator(
        r"(nvidia )?a800(-sxm4-40gb|-pcie-40gb| 40gb active)", 40, 1.555e12, _A100, _A800_SOURCE
    ),
    "a800-80g": Accelerator(r"(nvidia )?a800-sxm4-80gb", 80, 2.039e12, _A100, _A800_SOURCE),
    "a800-pcie-80g": Accelerator(
        r"(nvidia )?a800(-pcie-80gb| 80gb pcie)", 80, 1.935e12, _A100, _A800_SOURCE
    ),
    "h100": Accelerator(r"nvidia h100 80gb hbm3", 80, 3.35e12, _H100_SXM, _H100_SOURCE),
    "h100-pcie": Accelerator(r"nvidia h100 pcie", 80, 2.0e12, _H100_PCIE, _H100_SOURCE),
    "h100-nvl": Accelerator(r"nvidia h100 nvl", 94, 3.9e12, _HOPPER_NVL, _H100_NVL_SOURCE),
    "h200": Accelerator(r"nvidia h200", 141, 4.8e12, _H100_SXM, f"{_H200_SOURCE}, in whole TFLOPS"),
    "h200-nvl": Accelerator(r"nvidia h200 nvl", 141, 4.8e12, _HOPPER_NVL, _H200_SOURCE),
    "b200": Accelerator(r"nvidia b200", 180, 7.7e12, _B200, _B200_SOURCE),
    "mi300x": Accelerator(r"amd instinct mi300x( oam)?", 192, 5.3e12, _MI300X, _MI300X_SOURCE),
}

KEYS = ("cpu", *ACCELERATORS)


# --- CPUs


@dataclass(frozen=True)
class Cpu:
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
    "E5-2680 v4 ": Cpu(3.3, _AVX2, _XEON_E5_V4),
    "E5-2690 v4 ": Cpu(3.5, _AVX2, _XEON_E5_V4),
    "E5-2698 v4 ": Cpu(3.6, _AVX2, _XEON_E5_V4),
    "E5-2699 v4 ": Cpu(3.6, _AVX2, _XEON_E5_V4),
    "Gold 6148 ": Cpu(3.7, _AVX512, _XEON_1),
    "Platinum 8168 ": Cpu(3.7, _AVX512, _XEON_1),
    "Platinum 8180 ": Cpu(3.8, _AVX512, _XEON_1),
    "Gold 6248 ": Cpu(3.9, _AVX512, _XEON_2),
    "Platinum 8280 ": Cpu(4.0, _AVX512, _XEON_2),
    "Gold 6348 ": Cpu(3.5, _AVX512, _XEON_3),
    "Platinum 8358 ": Cpu(3.4, _AVX512, _XEON_3),
    "Platinum 8380 ": Cpu(3.4, _AVX512, _XEON_3),
    "Platinum 8468 ": Cpu(3.8, _AMX, _XEON_4),
    "Platinum 8480+ ": Cpu(3.8, _AMX, _XEON_4),
    "Platinum 8480C ": Cpu(3.8, _AMX, "NVIDIA DGX H100 user guide, 2023"),
    "Platinum 8558 ": Cpu(4.0, _AMX, _XEON_5),
    "Platinum 8570 ": Cpu(4.0, _AMX, _XEON_5),
    "Platinum 8592+ ": Cpu(3.9, _AMX, _XEON_5),
    "EPYC 7742 ": Cpu(3.4, _AVX2, _EPYC_7002),
    "EPYC 7543 ": Cpu(3.7, _AVX2, _EPYC_7003),
    "EPYC 7713 ": Cpu(3.675, _AVX2, _EPYC_7003),
    "EPYC 7763 ": Cpu(3.5, _AVX2, _EPYC_7003),
    "EPYC 9554 ": Cpu(3.75, _AVX2, _EPYC_9004),  # Zen 4 splits 512-bit operations in two
    "EPYC 9654 ": Cpu(3.7, _AVX2, _EPYC_9004),
    "EPYC 9655 ": Cpu(4.5, _AVX512, _EPYC_9005),
    "EPYC 9755 ": Cpu(4.1, _AVX512, _EPYC_9005),
}


def find_cpu(name: str) -> Cpu | None:
    """The one that the kernel gives this name, if it is known."""
    padded = f"{name.lower()} "  # so that a name that ends with the model matches, too
    return next((cpu for part, cpu in _CPUS.items() if part.lower() in padded), None)
