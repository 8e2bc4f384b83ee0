"""What dropout multiplies by on a CPU, compiled by numba (extra `fast`): the bits of `random_bits`.

Plain torch makes a dozen passes over memory for a hash, which here never leaves the registers.

Shapes: B samples, N outputs of a layer.
"""

import numba
import numpy as np
import torch
from torch import Tensor

from trainmark.kernels.compiled import in_threads
from trainmark.kernels.rounding import MIXER, SPREAD, SPREAD_HIGH

_U32 = np.uint32  # around each operation: numba makes 64 bits of the product of two
_SPREAD, _SPREAD_HIGH = _U32(SPREAD), _U32(SPREAD_HIGH)
(_SHIFT_1, _FACTOR_1), (_SHIFT_2, _FACTOR_2) = ((_U32(a), _U32(b)) for a, b in MIXER)
_HALF = _U32(16)
_ZERO = np.float32(0)

_compiled = numba.njit(nogil=True, cache=True)
_inlined = numba.njit(nogil=True, cache=True, forceinline=True)


def factors(seed: int, samples_B: Tensor, width: int, first_kept: int, scale: float) -> Tensor:
    """[B, N] fp32: `scale` where the 16 random bits, as a signed number, are at least `first_kept`,
    and 0 elsewhere."""
    factors_BN = torch.empty(len(samples_B), width)
    bound, kept = np.int16(first_kept), np.float32(scale)
    in_threads(
        _factors, len(samples_B), _U32(seed), samples_B.contiguous(), bound, kept, factors_BN
    )
    return factors_BN


@_inlined
def _mixed(x):
    x = _U32((x ^ (x >> _SHIFT_1)) * _FACTOR_1)
    x = _U32((x ^ (x >> _SHIFT_2)) * _FACTOR_2)
    return _U32(x ^ (x >> _HALF))


@_compiled
def _factors(seed, samples_B, bound, kept, factors_BN, begin, end):
    key, N = _mixed(seed), factors_BN.shape[1]
    for b in range(begin, end):
        sample, row = samples_B[b], factors_BN[b]
        low, high = _U32(sample) * _SPREAD, _U32(sample >> 32) * _SPREAD_HIGH
        stream = _mixed(_U32(key + low + high))
        for pair in range(N // 2):
            bits = _mixed(_U32(stream + _U32(pair) * _SPREAD))
            row[2 * pair] = kept if np.int16(bits) >= bound else _ZERO
            row[2 * pair + 1] = kept if np.int16(bits >> _HALF) >= bound else _ZERO
        if N % 2:
            bits = _mixed(_U32(stream + _U32(N // 2) * _SPREAD))
            row[N - 1] = kept if np.int16(bits) >= bound else _ZERO
