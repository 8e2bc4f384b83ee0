"""Random numbers by counter: those of any row, without those of the rows before it."""

import numpy as np
from numpy.typing import NDArray

_STEP = np.uint64(0x9E3779B97F4A7C15)


def random_bits(numbers: NDArray[np.uint64], stream: np.uint64) -> NDArray[np.uint64]:
    """SplitMix64: 64 random bits for each number of a stream."""
    x = numbers * _STEP
    x += stream
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    return x


def mixed(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """MurmurHash3's finaliser."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x85EBCA6B)
    x = x ^ (x >> np.uint32(13))
    x = x * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))
