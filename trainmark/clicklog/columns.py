"""Rows of a Criteo log between parsing and writing: integer columns."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_NUMERICAL, NUM_CATEGORICAL = 13, 26


@dataclass(frozen=True)
class Categorical:
    """A column as codes into the distinct values that occur in this batch."""

    codes: NDArray[np.int32]
    """[rows]; -1 is a missing value."""
    values: NDArray[np.uint32]
    """Not necessarily distinct: two spellings of one value have two codes."""

    def counts(self) -> NDArray[np.int64]:
        """How often each of `values` occurs."""
        return np.bincount(self.codes + 1, minlength=len(self.values) + 1)[1:]


@dataclass(frozen=True)
class Batch:
    """Consecutive rows of a file, as integer columns."""

    labels: NDArray[np.bool_]
    numerical: NDArray[np.float16]
    categorical: list[Categorical]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: slice) -> "Batch":
        return Batch(
            self.labels[rows],
            self.numerical[rows],
            [Categorical(column.codes[rows], column.values) for column in self.categorical],
        )
