"""Stochastic rounding: updates too small for a number's type add up on average.

The random bits are a hash of what they are for, so that they cost no memory, do not depend on the
order of the work, and a run that is continued rounds as if it had never stopped. The versions in
torch and in Triton give the same bits and, from them, the same numbers.
"""

import torch
from torch import Tensor

from trainmark.kernels.triton_here import tl, triton

SPREAD = 0x9E3779B1  # the golden ratio in 32 bits: neighbours start far apart
SPREAD_HIGH = 0x85EBCA77  # for the upper half of a row number
MIXER = ((16, 0x7FEB352D), (15, 0x846CA68B))

# Of each type: bits of fp32's fraction that it lacks, its smallest normal number, and the distance
# of the numbers below that. bf16 has fp32's exponents, so there the first number says it all.
_LACKS = {torch.bfloat16: 16, torch.float16: 13, torch.float8_e4m3fn: 20}
_TINY = {torch.float16: (2.0**-14, 2.0**-24), torch.float8_e4m3fn: (2.0**-6, 2.0**-9)}


# --- plain torch


def random_bits(key: Tensor, rows_N: Tensor, width: int) -> Tensor:
    """[N, width] int32: 32 random bits for each column of each row.

    Args:
        key: int32 scalar, different for every step and every tensor that is rounded.
        rows_N: row numbers, of 32 or 64 bits.
    """
    rows = rows_N.to(torch.int64)
    low, high = _low_bits(rows), _low_bits(rows >> 32)
    streams_N = mix(mix(key) + low * signed(SPREAD) + high * signed(SPREAD_HIGH))
    columns = torch.arange(width, dtype=torch.int32, device=rows.device)
    return mix(streams_N[:, None] + columns * signed(SPREAD))


def round_stochastically(values: Tensor, bits: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 to `dtype`: up with a probability equal to the fraction that is lost.

    Values beyond the largest finite number are not looked after: scale or clamp first.
    """
    if dtype == torch.float32:
        return values
    if dtype == torch.int8:
        return round_to_integer(values, bits).to(dtype)
    lacks = _LACKS[dtype]
    raised = values.view(torch.int32) + (bits & ((1 << lacks) - 1))
    rounded = (raised & -(1 << lacks)).view(torch.float32)
    if dtype in _TINY:
        smallest, distance = _TINY[dtype]
        tiny = round_to_integer(values / distance, bits) * distance
        rounded = torch.where(values.abs() < smallest, tiny, rounded)
    return rounded.to(dtype)  # exact by now


def round_to_integer(values: Tensor, bits: Tensor) -> Tensor:
    """The integer below or above, in fp32. Exactly: adding a fraction first would round itself."""
    below = values.floor()
    uniform = _shifted(bits, 8).float() * 2.0**-24
    return below + (uniform < values - below)


def other_bits(bits: Tensor) -> Tensor:
    """16 more random bits, of the same 32: any 16 of those, if the rest is unknown, tell nothing
    of them."""
    return _shifted(bits * signed(SPREAD), 16)


def mix(x: Tensor) -> Tensor:
    """An int32 mixer in which every bit of the input moves about half of the output's."""
    for shift, factor in MIXER:
        x = (x ^ _shifted(x, shift)) * signed(factor)
    return x ^ _shifted(x, 16)


def signed(bits: int) -> int:
    """32 bits as torch's int32 reads them."""
    return bits - 2**32 if bits >= 2**31 else bits


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift right, filling with zeros: torch's shift repeats the sign."""
    return (x >> by) & ((1 << (32 - by)) - 1)


def _low_bits(x: Tensor) -> Tensor:
    """The lower half of int64 numbers, as int32."""
    return x.view(torch.int32)[..., ::2] if x.dim() else x.view(1).view(torch.int32)[0]


# --- Triton: the constants once more, because a kernel reads no globals

if triton is not None:

    @triton.jit
    def mixed(x):
        x = (x ^ (x >> 16)) * 0x7FEB352D
        x = (x ^ (x >> 15)) * 0x846CA68B
        return x ^ (x >> 16)

    @triton.jit
    def bits_of_rows(stream, rows, columns):
        """[rows, columns] uint32, from a mixed key, int64 rows and int32 columns."""
        low, high = rows.to(tl.uint32), (rows >> 32).to(tl.uint32)
        streams = mixed(stream + low * 0x9E3779B1 + high * 0x85EBCA77)
        return mixed(streams[:, None] + columns.to(tl.uint32)[None, :] * 0x9E3779B1)

    @triton.jit
    def other_16_bits(bits):
        return (bits * 0x9E3779B1) >> 16

    @triton.jit
    def rounded_to_integer(values, bits):
        below = tl.floor(values)
        uniform = (bits >> 8).to(tl.float32) * (1.0 / 16777216)
        return tl.where(uniform < values - below, below + 1, below)

    @triton.jit
    def shortened(values, bits, LACKS: tl.constexpr):
        """fp32 numbers whose last `LACKS` bits are zero."""
        raised = values.to(tl.int32, bitcast=True) + (bits & ((1 << LACKS) - 1)).to(tl.int32)
        return (raised & -(1 << LACKS)).to(tl.float32, bitcast=True)

    @triton.jit
    def rounded_stochastically(values, bits, dtype: tl.constexpr):
        """fp32 numbers that `dtype` can hold."""
        if dtype == tl.int8:
            return rounded_to_integer(values, bits)
        elif dtype == tl.bfloat16:
            raised = values.to(tl.uint32, bitcast=True) + (bits & 0xFFFF)
            return (raised >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        elif dtype == tl.float16:
            tiny = rounded_to_integer(values * 16777216.0, bits) * (1.0 / 16777216)
            return tl.where(tl.abs(values) < 1.0 / 16384, tiny, shortened(values, bits, 13))
        elif dtype == tl.float8e4nv:
            tiny = rounded_to_integer(values * 512.0, bits) * (1.0 / 512)
            return tl.where(tl.abs(values) < 1.0 / 64, tiny, shortened(values, bits, 20))
        else:
            return values
