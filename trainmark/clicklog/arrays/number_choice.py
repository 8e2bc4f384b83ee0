"""`--numerical auto`: what becomes of a column that nobody has said it of, by its training rows.

The number is standardised, and stands beside its bin: a small network follows a line well and a
step badly, and an embedding of each bin follows any curve. Where few numbers lie far from the
others, the logarithm is standardised, lest all others become one. A missing number has an
indicator, too. benchmarks/own_data.py compares the result with logistic regression and gradient
boosting.
"""

import numpy as np
from numpy.typing import NDArray

from trainmark.clicklog.arrays import number_transforms

HEAVY_TAILS = 6.0
"""The kurtosis from which on the logarithm may be taken; 3 is that of a normal distribution."""


def choose(sample: NDArray[np.float64], *, has_missing: bool) -> str:
    """The reading of a column, as number_readings.py has it.

    Args:
        sample: numbers of training rows, none of them missing.
        has_missing: whether training rows lack the number.
    """
    is_constant = len(sample) == 0 or sample.min() == sample.max()
    words = ["standard"] if is_constant else [_transform(sample), "bins"]
    return "+".join([*words, "missing"] if has_missing else words)


def _transform(sample: NDArray[np.float64]) -> str:
    plain, log = _kurtosis("standard", sample), _kurtosis("standard_log", sample)
    return "standard_log" if plain > HEAVY_TAILS and log < plain else "standard"


def _kurtosis(transform: str, sample: NDArray[np.float64]) -> float:
    scores = number_transforms.apply(transform, number_transforms.fit(transform, sample), sample)
    return float((scores**4).mean())
