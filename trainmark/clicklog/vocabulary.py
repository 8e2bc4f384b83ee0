"""Which categorical values get an id of their own, and which."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class ValueCounts:
    """How often each value of a column occurs, gathered piece by piece."""

    def __init__(self) -> None:
        self.values = np.empty(0, np.uint32)
        self.counts = np.empty(0, np.int64)

    def add(self, values: NDArray[np.uint32], counts: NDArray[np.int64]) -> None:
        """Add occurrences; a value may appear several times in `values`."""
        together = np.concatenate([self.values, values])
        self.values, where = np.unique(together, return_inverse=True)
        # Weights make bincount count in float64, exact up to 2**53 occurrences.
        weights = np.concatenate([self.counts, counts])
        self.counts = np.bincount(where, weights, len(self.values)).astype(np.int64)


@dataclass(frozen=True)
class Vocabulary:
    """The ids of a column's values: 1, 2, ... by falling count, then by rising value."""

    values: NDArray[np.uint32]
    """Sorted."""
    ids: NDArray[np.int32]

    @classmethod
    def of(cls, counts: ValueCounts, frequency_threshold: int) -> "Vocabulary":
        """Keep the values that occur at least `frequency_threshold` times."""
        kept = counts.counts >= max(frequency_threshold, 1)
        values = counts.values[kept]
        order = np.lexsort((values, -counts.counts[kept]))
        ids = np.empty(len(values), np.int32)
        ids[order] = np.arange(1, len(values) + 1, dtype=np.int32)
        return cls(values, ids)

    @property
    def cardinality(self) -> int:
        """Number of ids, 0 included."""
        return len(self.values) + 1

    def lookup(self, values: NDArray[np.uint32]) -> NDArray[np.int32]:
        """The ids of `values`; 0 where there is none."""
        if not len(self.values):
            return np.zeros(len(values), np.int32)
        where = np.searchsorted(self.values, values).clip(max=len(self.values) - 1)
        return np.where(self.values[where] == values, self.ids[where], np.int32(0))
