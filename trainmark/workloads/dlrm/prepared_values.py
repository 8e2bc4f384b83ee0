"""Requests that hold what the dataset holds: numbers as they are, and ids."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainmark.clicklog.raw_values import Encoded, Rows, refusal


class PreparedValues:
    """Checks numbers and ids; in the place of `RawValues` where there are no vocabularies.

    Args:
        numerical, categorical: names of the features.
        table_rows: number of ids of each categorical feature.
    """

    def __init__(
        self, numerical: Sequence[str], categorical: Sequence[str], table_rows: Sequence[int]
    ) -> None:
        self.numerical, self.categorical = tuple(numerical), tuple(categorical)
        self.tables = self.categorical
        self.expects: Mapping[str, str] = dict.fromkeys(numerical, "a finite number") | {
            name: f"a whole number from 0 to {rows - 1}"
            for name, rows in zip(categorical, table_rows, strict=True)
        }
        self._table_rows = np.array(table_rows)

    def encode(self, numerical: Rows, categorical: Rows) -> Encoded:
        numbers = self._numbers(numerical, self.numerical, kinds="iuf")
        with np.errstate(over="ignore"):
            numbers = numbers.astype(np.float32)
        self._check(np.isfinite(numbers), numerical, self.numerical)
        ids = self._numbers(categorical, self.categorical, kinds="iu")
        self._check((ids >= 0) & (ids < self._table_rows), categorical, self.categorical)
        return numbers, ids.astype(np.int64)

    def _numbers(self, rows: Rows, names: Sequence[str], kinds: str) -> NDArray[Any]:
        """An array of one of these kinds of numpy's, or a refusal of what is in its way."""
        if not names:
            return np.empty((len(rows), 0))
        try:
            array: NDArray[Any] = np.array(rows)
        except ValueError:  # a list among the values
            array = np.array(None)
        if array.ndim != 2 or array.dtype.kind not in kinds:
            wanted = (int, float) if "f" in kinds else (int,)
            good = [[type(v) in wanted and abs(v) < 2**63 for v in row] for row in rows]
            self._check(np.array(good), rows, names)
        return array

    def _check(self, good: NDArray[np.bool_], rows: Rows, names: Sequence[str]) -> None:
        if not good.all():
            row, column = divmod(int(np.argmin(good)), len(names))
            name = names[column]
            raise refusal(row, name, rows[row][column], self.expects[name])

    def example(self) -> tuple[list[Any], list[Any]]:
        return [1.0] * len(self.numerical), [0] * len(self.categorical)
