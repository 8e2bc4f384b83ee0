"""Requests to a trained DLRM: rows of features in, click probabilities out.

A request comes as JSON, of records or of lists, or as two tensors. Raw values of several requests
are encoded together, which costs hardly more than those of one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainmark.clicklog.raw_values import Encoded, RawValues
from trainmark.clicklog.sources import lists
from trainmark.errors import InputError, unknown
from trainmark.scoring import TensorSpec
from trainmark.workloads.dlrm.prepared_values import PreparedValues

Clicks = Callable[[NDArray[np.floating], NDArray[np.int64]], NDArray[np.float32]]
"""From rows of numbers and ids to probabilities."""


@dataclass(frozen=True)
class ClickRows:
    """The rows of a request: raw values in lists, or arrays of what was encoded."""

    numerical: Any
    categorical: Any

    def __len__(self) -> int:
        return len(self.numerical)


class ClickScorer:
    """Scores rows of features; see `scoring.Scorer`.

    Args:
        config: of the model, as `description` gives it.
        clicks: its probabilities.
        values: encodes a row's values.
        facts: what is known of the model.
    """

    answer = "scores"
    output = TensorSpec(name="clicks", datatype="FP32", shape=(-1,))

    def __init__(
        self, config: dict[str, Any], clicks: Clicks, values: RawValues, facts: dict[str, Any]
    ) -> None:
        self._values, self._clicks = values, clicks
        self._names = [*values.numerical, *values.categorical]
        prepared = isinstance(values, PreparedValues)
        self.facts = facts | {
            "values": "prepared" if prepared else "raw",
            "requests": "Rows of prepared values: numbers and ids, as in the dataset."
            if prepared
            else "Rows of raw values, as in the log that was prepared.",
            "numerical": list(values.numerical),
            "categorical": list(values.categorical),
            "expects": dict(values.expects),
            # Behind these are the tables of crosses, which no request knows of.
            "table_rows": dict(zip(values.tables, config["table_rows"], strict=False)),
            "embedding_dim": config["embedding_dim"],
        }
        numerical, categorical = values.example()
        self.example = {"rows": [dict(zip(self._names, numerical + categorical, strict=True))]}
        self.inputs = self._inputs()

    def _inputs(self) -> list[TensorSpec]:
        """Tensors that have columns."""
        values = self._values
        prepared = isinstance(values, PreparedValues)
        ids = values.width if isinstance(values, PreparedValues) else len(values.categorical)
        found = {
            "numerical": ("FP32" if prepared else "FP64", len(values.numerical)),
            "categorical": ("INT64" if prepared else "BYTES", ids),
        }
        return [
            TensorSpec(name=name, datatype=datatype, shape=(-1, columns))
            for name, (datatype, columns) in found.items()
            if columns
        ]

    def score(self, requests: Sequence[Any]) -> NDArray[np.float32]:
        return self._clicks(*self._encoded(requests))

    def _encoded(self, requests: Sequence[ClickRows]) -> Encoded:
        if isinstance(self._values, PreparedValues):
            return _joined([rows.numerical for rows in requests]), _joined(
                [rows.categorical for rows in requests]
            )
        return self._values.encode(
            list(chain.from_iterable(rows.numerical for rows in requests)),
            list(chain.from_iterable(rows.categorical for rows in requests)),
        )

    # --- tensors

    def read_tensors(self, tensors: Mapping[str, NDArray[Any]]) -> ClickRows:
        rows = len(next(iter(tensors.values())))
        numbers = tensors.get("numerical", np.empty((rows, 0), np.float32))
        if isinstance(self._values, PreparedValues):
            ids = tensors.get("categorical", np.empty((rows, 0), np.int64))
            return ClickRows(*self._values.checked(numbers, ids))
        texts = tensors.get("categorical", np.empty((rows, 0), object))
        return ClickRows(_as_json_has_them(numbers), self._with_lists(_decoded(texts)))

    def _with_lists(self, rows: list[list[Any]]) -> list[list[Any]]:
        """Texts in columns of lists as lists."""
        for name, separator in self._values.separators.items():
            place = self._values.categorical.index(name)
            for row in rows:
                row[place] = lists.split(row[place], separator) if row[place] else []
        return rows

    # --- JSON

    def read(self, body: dict[str, Any]) -> ClickRows:
        found = self._rows(body)
        if isinstance(self._values, PreparedValues) and len(found):
            return ClickRows(*self._values.encode(found.numerical, found.categorical))
        return found

    def _rows(self, body: dict[str, Any]) -> ClickRows:
        if body.keys() == {"rows"}:
            return self._records(body["rows"])
        names = {"numerical": self._values.numerical, "categorical": self._values.categorical}
        lacks_ids = "categorical" not in body and names["categorical"]
        if not body or not body.keys() <= names.keys() or lacks_ids:
            received = ", ".join(map(repr, body)) or "nothing"
            raise InputError(
                f"The body has {received}; expected 'rows', or 'numerical' and 'categorical'."
            )
        given = {key: self._matrix(body[key], key, names[key]) for key in names if key in body}
        rows = max(map(len, given.values()))
        numerical, categorical = (
            given[key] if key in given else self._matrix([[]] * rows, key, names[key])
            for key in names
        )
        if len(numerical) != len(categorical):
            raise InputError(
                f"'numerical' has {len(numerical)} rows and 'categorical' has {len(categorical)}, "
                "expected as many."
            )
        return ClickRows(numerical, categorical)

    def _matrix(self, rows: Any, key: str, names: Sequence[str]) -> list[list[Any]]:
        if not isinstance(rows, list):
            raise InputError(f"{key!r} is {_kind(rows)}, expected a list of rows.")
        for number, row in enumerate(rows):
            if not isinstance(row, list) or len(row) != len(names):
                found = f"{len(row)} values" if isinstance(row, list) else _kind(row)
                raise InputError(
                    f"Row {number}: {key!r} has {found}, expected a list of {len(names)}"
                    f"{_listing(names)}."
                )
        return rows

    def _records(self, rows: Any) -> ClickRows:
        if not isinstance(rows, list):
            raise InputError(f"'rows' is {_kind(rows)}, expected a list of objects.")
        split = len(self._values.numerical)
        numerical, categorical = [], []
        for number, row in enumerate(rows):
            try:
                values = [row[name] for name in self._names]
            except (KeyError, TypeError, IndexError):
                raise self._bad_record(number, row) from None
            if len(row) != len(self._names):
                raise self._bad_record(number, row)
            numerical.append(values[:split])
            categorical.append(values[split:])
        return ClickRows(numerical, categorical)

    def _bad_record(self, number: int, row: Any) -> InputError:
        if not isinstance(row, dict):
            return InputError(f"Row {number} is {_kind(row)}, expected an object of features.")
        missing = [name for name in self._names if name not in row]
        if missing:
            return InputError(
                f"Row {number} has no {missing[0]!r}, expected all {len(self._names)} features; "
                "null stands for a missing value."
            )
        surplus = next(name for name in row if name not in self._names)
        return InputError(f"Row {number}: {unknown('feature', surplus, self._names)}")


def _kind(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


def _listing(names: Iterable[str]) -> str:
    shown = ", ".join(names)
    return f" ({shown})" if shown and len(shown) <= 200 else ""


def _joined(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


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
