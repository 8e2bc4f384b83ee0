"""Requests that hold what the dataset holds: numbers as they are, and ids."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainmark.clicklog.raw_values import Encoded, Rows, refusal
from trainmark.workloads.dlrm.request_values import ClickRows


class PreparedValues:
    """Checks numbers and ids, where there are no vocabularies; as `RawRequestValues` otherwise.

    Args:
        numerical, categorical: names of the features.
        table_rows: number of ids of each categorical feature.
        hotness: how many of them a row may have, in a list; None: one of each, and no list.
    """

    kind = "prepared"
    about = "Rows of prepared values: numbers and ids, as in the dataset."
    datatypes = ("FP32", "INT64")

    def __init__(
        self,
        numerical: Sequence[str],
        categorical: Sequence[str],
        table_rows: Sequence[int],
        hotness: Sequence[int] | None = None,
    ) -> None:
        self.numerical, self.categorical = tuple(numerical), tuple(categorical)
        self.tables = self.categorical
        self.expects: Mapping[str, str] = dict.fromkeys(numerical, "a finite number") | {
            name: f"a whole number from 0 to {rows - 1}"
            for name, rows in zip(categorical, table_rows, strict=True)
        }
        self._table_rows, self._hotness = np.array(table_rows), hotness
        self._rows_of_ids = np.repeat(self._table_rows, hotness or 1)
        self._names_of_ids = np.repeat(self.categorical, hotness or 1).tolist()
        self.width = len(self._names_of_ids)
        if hotness is not None:
            self.expects = dict(self.expects) | {
                name: f"a list of at most {most} whole numbers from 0 to {rows - 1}"
                for name, rows, most in zip(categorical, table_rows, hotness, strict=True)
            }

    def of_tensors(self, numbers: NDArray[Any], categorical: NDArray[Any]) -> ClickRows:
        """Arrays as the model takes them, with -1 for an id that a list does not have."""
        self._check(np.isfinite(numbers), numbers, self.numerical)
        least, ids = 0 if self._hotness is None else -1, categorical
        self._check((ids >= least) & (ids < self._rows_of_ids), ids, self._names_of_ids)
        return ClickRows(numbers, ids)

    def encode(self, requests: Sequence[ClickRows]) -> Encoded:
        return _joined([rows.numerical for rows in requests]), _joined(
            [rows.categorical for rows in requests]
        )

    def of_lists(self, numerical: Rows, categorical: Rows) -> ClickRows:
        if not len(numerical):
            return ClickRows(numerical, categorical)
        numbers = self._numbers(numerical, self.numerical, kinds="iuf")
        with np.errstate(over="ignore"):
            numbers = numbers.astype(np.float32)
        self._check(np.isfinite(numbers), numerical, self.numerical)
        if self._hotness is not None:
            return ClickRows(numbers, self._bags(categorical, self._hotness))
        ids = self._numbers(categorical, self.categorical, kinds="iu")
        self._check((ids >= 0) & (ids < self._table_rows), categorical, self.categorical)
        return ClickRows(numbers, ids.astype(np.int64))

    def _bags(self, rows: Rows, hotness: Sequence[int]) -> NDArray[np.int64]:
        """[rows, ids of all features], -1 behind those that a row has. A single id needs no
        list."""
        ids = np.full((len(rows), sum(hotness)), -1, np.int64)
        ends = np.cumsum(hotness).tolist()
        for number, row in enumerate(rows):
            for place, (value, most, end) in enumerate(zip(row, hotness, ends, strict=True)):
                found = value if isinstance(value, list) else [value]
                good = [type(v) is int and 0 <= v < self._table_rows[place] for v in found]
                if len(found) > most or not all(good):
                    name = self.categorical[place]
                    raise refusal(number, name, value, self.expects[name])
                ids[number, end - most : end - most + len(found)] = found
        return ids

    def _numbers(self, rows: Rows, names: Sequence[str], kinds: str) -> NDArray[Any]:
        """An array of one of these kinds of numpy's, or a refusal of what is in its way."""
        if not names:
            return np.empty((len(rows), 0))
        wanted = {int, float} if "f" in kinds else {int}
        # numpy would give every value the room of the longest text.
        alike = set(map(type, chain.from_iterable(rows))) <= wanted
        array: NDArray[Any] = np.array(rows if alike else None)
        if array.dtype.kind not in kinds:
            good = [[type(v) in wanted and abs(v) < 2**63 for v in row] for row in rows]
            self._check(np.array(good), rows, names)
        return array

    def _check(self, good: NDArray[np.bool_], rows: Any, names: Sequence[str]) -> None:
        if not good.all():
            row, column = divmod(int(np.argmin(good)), len(names))
            name = names[column]
            received = rows[row][column]
            if isinstance(received, np.generic):
                received = received.item()
            raise refusal(row, name, received, self.expects[name])

    def example(self) -> tuple[list[Any], list[Any]]:
        ids = [0] * len(self.categorical)
        return [1.0] * len(self.numerical), ids if self._hotness is None else [[0] for _ in ids]


def _joined(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
