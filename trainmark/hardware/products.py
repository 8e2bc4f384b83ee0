"""How long matrix products take on an accelerator.

A product of B samples by a layer of M inputs and N outputs takes

    start + (computing^1.6 + moving^1.6)^(1/1.6)

where computing is 2 B M N operations over a share of the peak and, where a tile's outputs are
written by themselves, those bytes; moving is all operands' bytes. The exponent lies between one
hiding the other (infinite) and neither hiding (1). Shares and rates are those of cuBLAS and of our
Triton kernels on one H200, fitted to the kernels of 20 DLRMs (docs/predictions.md).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trainmark.hardware.devices import Cluster
from trainmark.hardware.machine import Machine, needed_peak

MEASURED = Cluster("h200", 1, 1)
"""Where the constants come from."""

Kind = Literal["forward", "input", "masked", "weight"]
"""With bias and ReLU; the gradient of the inputs, plain or with the mask of a ReLU and its sums
(our own kernel); the gradient of the weights."""

# Of the peak, where products are large and nothing else counts.
SHARES: Mapping[str, Mapping[Kind, float]] = {
    "fp32": {"forward": 0.77, "input": 0.76, "weight": 0.78},
    "tf32": {"forward": 1.00, "input": 0.69, "weight": 0.43},
    "bf16": {"forward": 0.97, "input": 0.88, "masked": 0.88, "weight": 0.96},
    "fp8": {"forward": 0.96, "input": 0.79, "weight": 0.95},
}
# Of the peak, by the widest GEMMs of `trainmark calibrate` on an H200, which its power limits.
LARGE = {"fp32": 0.76, "tf32": 0.57, "bf16": 0.67, "fp16": 0.67, "fp8": 0.57}
# Of the rate of a copy, itself this share of an H200's bandwidth.
COPY_OF_BANDWIDTH = 0.855
WRITTEN, WRITTEN_FP8 = 0.83, 0.61
OPERANDS: Mapping[Kind, float] = {"forward": 1.67, "input": 0.98, "masked": 0.98, "weight": 0.98}
HIDING = 1.6
# Seconds before the first and after the last tile; gradients of weights add up several parts.
START = {4: 5.0e-6, 2: 3.0e-6, 1: 3.0e-6}
START_WEIGHT = {4: 9.4e-6, 2: 5.4e-6, 1: 5.4e-6}
# Kernels of 4-byte types have tiles of 128 x 128, one for each of an H200's processors, and take
# inputs' gradients more slowly where their width is no multiple of a tile's.
TILE, PROCESSORS, ODD_WIDTH = 128, 132, 0.83


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device reaches."""

    copy: float
    """Bytes per second, read and written in order."""
    peaks: Mapping[str, float]
    """Operations per second by precision."""
    of_gemms: bool
    """Whether these follow from GEMMs that were measured, not from the datasheet."""


def rates_of(cluster: Cluster, machine: Machine, precision: str) -> Rates:
    """Those of a precision, and in fp8 of bf16.

    Raises:
        NotKnownError: they are not known.
    """
    found, measured = {}, machine.measured
    names = {"fp8": ("fp8", "bf16")}.get(precision, (precision,))
    for name in names:
        if name in measured.gemm:
            found[name] = measured.gemm[name][max(measured.gemm[name])] / LARGE[name]
        else:
            found[name] = needed_peak(cluster, measured, name)
    machine.check_known()
    of_gemms = precision in measured.gemm
    return Rates(copy=machine.streaming(COPY_OF_BANDWIDTH), peaks=found, of_gemms=of_gemms)


def shares_of(precision: str) -> Mapping[Kind, float]:
    return SHARES["bf16" if precision == "fp16" else precision]


def product_s(
    rates: Rates, precision: str, kind: Kind, samples: int, fan_in: int, fan_out: int
) -> float:
    """Seconds of one product; `fan_in` is padded to a multiple of 8, as kernels like it."""
    fan_in = -(-fan_in // 8) * 8
    size = {"fp8": 1, "fp32": 4, "tf32": 4}.get(precision, 2)
    read, written = {
        "forward": (fan_in, fan_out),
        "input": (fan_out, fan_in),
        "masked": (fan_out, fan_in),
        "weight": (fan_in + fan_out, 0),
    }[kind]
    share = shares_of(precision)[kind] * _filled(kind, size, samples, written)
    computing = 2 * samples * fan_in * fan_out / (rates.peaks[precision] * share)
    if kind in ("forward", "masked"):  # the mask is read for every number that is written
        passes = 2 if kind == "masked" else 1
        at = rates.copy * (WRITTEN_FP8 if size == 1 else WRITTEN)
        computing += passes * samples * written * size / at
    moving = samples * (read + written) * size / (rates.copy * OPERANDS[kind])
    start = (START_WEIGHT if kind == "weight" else START)[size]
    return start + math.pow(computing**HIDING + moving**HIDING, 1 / HIDING)


def _filled(kind: Kind, size: int, samples: int, written: int) -> float:
    """The share of the processors that the tiles of a 4-byte product fill, and how well."""
    if size < 4 or kind == "weight":
        return 1.0
    tiles = -(-samples // TILE) * -(-written // TILE)
    odd = ODD_WIDTH if kind == "input" and written % TILE else 1.0
    return min(1.0, tiles / PROCESSORS) * odd
