"""The transform of a click log's integers: ln(x + 3), the same in preparation and in training."""

import numpy as np
from numpy.typing import NDArray

MISSING = np.iinfo(np.int32).min
"""Stands for an empty field among int32 values."""


def log_transform(values: NDArray[np.int32]) -> NDArray[np.float16]:
    """ln(x + 3); 0.0 where x is missing or not above -3, as NVIDIA's preparation has it.

    So a missing value (0.0) differs from a zero (ln 3 = 1.0986).
    """
    # float64 from int32 cannot overflow, and x + 3 is exact.
    shifted = np.maximum(values.astype(np.float64) + 3, 1)
    return np.log(shifted).astype(np.float16)
