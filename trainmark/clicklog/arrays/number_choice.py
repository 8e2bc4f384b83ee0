"""`--numerical auto`: what becomes of a column that nobody has said it of, by its training rows.

The number is standardised; where few numbers lie far from the others, its logarithm is, lest all
others become one. Where numbers repeat, as ages and prices do, it stands beside its bin: a small
network follows a line well and a step badly, and an embedding of each bin follows any curve. But
bins of many columns in which hardly two rows agree, such as measurements, let a small log be
learned by heart. A missing number has an indicator, too. benchmarks/own_data.py compares the result
with logistic regression and gradient boosting.
"""

import numpy as np
from numpy.typing import NDArray

from trainmark.clicklog.arrays import number_transforms

HEAVY_TAILS = 6.0
"""The kurtosis from which on the logarithm may be taken; 3 is that of a normal distribution."""

REPEATS = 4
"""Rows that have the same number, on average, where numbers repeat."""


def choose(sample: NDArray[np.float64], *, has_missing: bool, needs_bins: bool = False) -> str:
    """The reading of a column, as number_readings.py has it.

    Args:
        sample: numbers of training rows, none of them missing.
        has_missing: whether training rows lack the number.
        needs_bins: whether the dataset would have no categorical feature else.
    """
    distinct = len(np.unique(sample))
    words = ["standard" if distinct < 2 else _transform(sample)]
    if distinct > 1 and (needs_bins or distinct <= len(sample) / REPEATS):
        words.append("bins")
    return "+".join([*words, "missing"] if has_missing else words)


def _transform(sample: NDArray[np.float64]) -> str:
    plain, log = _kurtosis("standard", sample), _kurtosis("standard_log", sample)
    return "standard_log" if plain > HEAVY_TAILS and log < plain else "standard"


def _kurtosis(transform: str, sample: NDArray[np.float64]) -> float:
    scores = number_transforms.apply(transform, number_transforms.fit(transform, sample), sample)
    return float((scores**4).mean())
