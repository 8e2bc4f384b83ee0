"""`--numerical auto`: what becomes of a column that nobody has said it of, by its training rows."""

import numpy as np
from numpy.typing import NDArray


def choose(sample: NDArray[np.float64], *, has_missing: bool) -> str:
    """The reading of a column, as number_readings.py has it.

    Args:
        sample: numbers of training rows, none of them missing.
        has_missing: whether training rows lack the number.
    """
    if len(sample) == 0 or sample.min() == sample.max():
        return "standard+missing" if has_missing else "standard"
    return "quantile+bins+missing" if has_missing else "quantile+bins"
