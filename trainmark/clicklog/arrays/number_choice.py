"""`--numerical auto`: what becomes of a column that nobody has said it of, by its training rows.

The number is standardised. Where few numbers lie far from the others, their logarithm is, lest all
others become one. Numbers that repeat stand beside their bins: a small network follows a line well
and a step badly, and an embedding of each bin follows any curve; but bins of numbers that are
nearly all distinct let a small log be learned by heart. A missing number has an indicator, too.
"""

import numpy as np
from numpy.typing import NDArray

from trainmark.clicklog.arrays import number_transforms

HEAVY_TAILS = 6.0
"""The kurtosis from which on the logarithm may be taken; 3 is that of a normal distribution."""
REPEATS = 4
"""How many times a number occurs on average, at least, where there are bins."""


def choose(sample: NDArray[np.float64], *, has_missing: bool) -> str:
    """The reading of a column, as number_readings.py has it.

    Args:
        sample: numbers of training rows, none of them missing.
        has_missing: whether training rows lack the number.
    """
    distinct = len(np.unique(sample))
    words = [_transform(sample) if distinct > 1 else "standard"]
    if distinct > 1 and len(sample) >= REPEATS * distinct:
        words.append("bins")
    if has_missing:
        words.append("missing")
    return "+".join(words)


def _transform(sample: NDArray[np.float64]) -> str:
    plain, log = _kurtosis("standard", sample), _kurtosis("standard_log", sample)
    return "standard_log" if plain > HEAVY_TAILS and log < plain else "standard"


def _kurtosis(transform: str, sample: NDArray[np.float64]) -> float:
    scores = number_transforms.apply(transform, number_transforms.fit(transform, sample), sample)
    return float((scores**4).mean())
