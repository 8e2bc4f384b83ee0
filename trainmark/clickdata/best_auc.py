"""The AUC that no model can exceed on planted rows: that of their true probabilities."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class BinCounts:
    """How many clicks and other rows have which true probability: in bins, by rising probability.

    Counts of several pieces add up, so that a whole log is counted in constant memory.
    """

    clicks: NDArray[np.int64]
    others: NDArray[np.int64]

    @staticmethod
    def of(labels: NDArray[np.bool_], bins: NDArray[Any], num_bins: int) -> "BinCounts":
        """Count rows by the bin of each."""
        return BinCounts(*(np.bincount(bins[k], minlength=num_bins) for k in (labels, ~labels)))

    def __add__(self, more: "BinCounts") -> "BinCounts":
        return BinCounts(self.clicks + more.clicks, self.others + more.others)

    @property
    def rows(self) -> int:
        return int(self.clicks.sum() + self.others.sum())

    @property
    def auc(self) -> float:
        """The chance that a click has a higher probability than another row, ties half: the ratio
        of two integers, rounded once. Undefined (NaN) where all labels are the same."""
        below = np.cumsum(self.others) - self.others
        half_pairs = int((self.clicks * (2 * below + self.others)).sum())
        pairs = int(self.clicks.sum()) * int(self.others.sum())
        return half_pairs / (2 * pairs) if pairs else math.nan


NO_ROWS = BinCounts(np.zeros(1, np.int64), np.zeros(1, np.int64))
"""To add others to."""
