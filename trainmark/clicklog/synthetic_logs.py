"""The logs that `prepare synthetic` writes: the demo's (`PlantedClicks`), and the planted
Terabyte's."""

from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trainmark.clickdata import planted, terabyte

LogRows = planted.Rows | terabyte.Rows


class Log(Protocol):
    """A log as a function of the row."""

    def rows(self, start: int, stop: int) -> LogRows: ...

    def values(self, column: int, ids: NDArray[np.int32]) -> NDArray[np.uint32]:
        """The numbers that stand for ids in raw text."""
        ...


class TerabyteLog:
    """The planted Terabyte's first rows and then, for the last day, the first of those held out.

    Args:
        last_day: the row that it begins with.
        table_rows: ids beyond these are 0; None keeps all.
    """

    def __init__(self, last_day: int, table_rows: tuple[int, ...] | None) -> None:
        self._last_day, self._table_rows = last_day, table_rows

    def rows(self, start: int, stop: int) -> terabyte.Rows:
        shift = terabyte.TRAIN_ROWS - self._last_day if start >= self._last_day else 0
        made = terabyte.rows(start + shift, stop + shift)
        if self._table_rows is None:
            return made
        known = made.categorical < np.array(self._table_rows)[:, None]
        return replace(made, categorical=made.categorical * known)

    def values(self, column: int, ids: NDArray[np.int32]) -> NDArray[np.uint32]:
        return planted.mixed_values(column, ids, terabyte.SEED)
