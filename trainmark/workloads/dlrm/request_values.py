"""What the rows of requests hold: raw values here, numbers and ids in `prepared_values.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainmark.clicklog.raw_values import Encoded, RawValues, Rows
from trainmark.clicklog.sources import lists
from trainmark.errors import InputError


@dataclass(frozen=True)
class ClickRows:
    """The rows of a request: raw values in lists, or arrays of what was encoded."""

    numerical: Any
    categorical: Any

    def __len__(self) -> int:
        return len(self.numerical)


class RawRequestValues:
    """Values as in the log that was prepared, which may be wrong or missing.

    They are encoded last, those of several requests together, which costs hardly more than those of
    one.
    """

    kind = "raw"
    about = "Rows of raw values, as in the log that was prepared."
    datatypes = ("FP64", "BYTES")
    """Of the tensors with numerical and with categorical values."""

    def __init__(self, values: RawValues) -> None:
        self._values, self.example = values, values.example
        self.numerical, self.categorical = values.numerical, values.categorical
        self.tables, self.expects = values.tables, values.expects
        self.width = len(values.categorical)
        """Columns of the latter."""

    def of_lists(self, numerical: Rows, categorical: Rows) -> ClickRows:
        """Rows as they come in JSON."""
        return ClickRows(numerical, categorical)

    def of_tensors(self, numbers: NDArray[Any], categorical: NDArray[Any]) -> ClickRows:
        """Rows as they come in tensors."""
        return ClickRows(_as_json_has_them(numbers), self._with_lists(_decoded(categorical)))

    def encode(self, requests: Sequence[ClickRows]) -> Encoded:
        """The rows of several requests, in their order, as the model takes them."""
        return self._values.encode(
            list(chain.from_iterable(rows.numerical for rows in requests)),
            list(chain.from_iterable(rows.categorical for rows in requests)),
        )

    def _with_lists(self, rows: list[list[Any]]) -> list[list[Any]]:
        """Texts in columns of lists as lists."""
        for name, separator in self._values.separators.items():
            place = self.categorical.index(name)
            for row in rows:
                row[place] = lists.split(row[place], separator) if row[place] else []
        return rows


def _as_json_has_them(numbers: NDArray[np.floating]) -> list[list[Any]]:
    """Whole numbers as integers, NaN as None: a missing value."""
    values = numbers.astype(object)
    whole = (numbers == np.trunc(numbers)) & (np.abs(numbers) < 2.0**63)
    values[whole] = numbers[whole].astype(np.int64)
    values[np.isnan(numbers)] = None
    return list(values.tolist())


def _decoded(texts: NDArray[Any]) -> list[list[str]]:
    try:
        return [[text.decode() for text in row] for row in texts.tolist()]
    except UnicodeDecodeError as error:
        raise InputError(f"'categorical' has a text that is not UTF-8: {error}.") from None
