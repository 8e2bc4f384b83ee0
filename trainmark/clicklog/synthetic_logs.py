"""The logs that `prepare synthetic` writes: the demo's, and the planted Terabyte's."""

from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trainmark.clickdata import terabyte
from trainmark.clickdata.planted import BestAuc, PlantedClicks, Rows, mixed_values

LogRows = Rows | terabyte.Rows
Counts = NDArray[np.int64]
"""[2, bins]: clicks and other rows by their true probability."""


class Log(Protocol):
    """A log as a function of the row."""

    num_bins: int
    """Of probabilities."""

    def rows(self, start: int, stop: int) -> tuple[LogRows, Counts]: ...

    def values(self, column: int, ids: NDArray[np.int32]) -> NDArray[np.uint32]:
        """The numbers that stand for ids in raw text."""
        ...

    def auc(self, counts: Counts) -> float:
        """Of the true probabilities."""
        ...


class PlantedLog:
    """The demo's."""

    num_bins = BestAuc.BINS

    def __init__(self, log: PlantedClicks) -> None:
        self._log = log

    def rows(self, start: int, stop: int) -> tuple[LogRows, Counts]:
        made, counted = self._log.rows(start, stop), BestAuc()
        counted.add(made)
        return made, np.stack([counted.clicks, counted.others])

    def values(self, column: int, ids: NDArray[np.int32]) -> NDArray[np.uint32]:
        return self._log.values(column, ids)

    def auc(self, counts: Counts) -> float:
        counted = BestAuc()
        counted.clicks, counted.others = counts
        return counted.value


class TerabyteLog:
    """The planted Terabyte's first rows and then, for the last day, the first of those held out.

    Args:
        last_day: the row that it begins with.
        table_rows: ids beyond these are 0; None keeps all.
    """

    num_bins = terabyte.LEVELS

    def __init__(self, last_day: int, table_rows: tuple[int, ...] | None) -> None:
        self._last_day, self._table_rows = last_day, table_rows

    def rows(self, start: int, stop: int) -> tuple[LogRows, Counts]:
        shift = terabyte.TRAIN_ROWS - self._last_day if start >= self._last_day else 0
        made = terabyte.rows(start + shift, stop + shift)
        counted = terabyte.LevelCounts.of_rows(made)
        if self._table_rows is not None:
            known = made.categorical < np.array(self._table_rows)[:, None]
            made = replace(made, categorical=made.categorical * known)
        return made, np.stack([counted.clicks, counted.others])

    def values(self, column: int, ids: NDArray[np.int32]) -> NDArray[np.uint32]:
        return mixed_values(column, ids, terabyte.SEED)

    def auc(self, counts: Counts) -> float:
        return terabyte.LevelCounts(*counts).auc
