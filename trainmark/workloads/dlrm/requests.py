"""Requests to a trained DLRM: rows of features in, click probabilities out.

A request comes as JSON, of records or of lists, or as two tensors. `request_values.py` knows what
its values are.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainmark.errors import InputError, unknown
from trainmark.scoring import TensorSpec
from trainmark.workloads.dlrm.prepared_values import PreparedValues
from trainmark.workloads.dlrm.request_values import ClickRows, RawRequestValues

Clicks = Callable[[NDArray[np.floating], NDArray[np.int64]], NDArray[np.float32]]
"""From rows of numbers and ids to probabilities."""
Values = RawRequestValues | PreparedValues
"""How the values of requests become inputs of the model: each has what the other has."""
Lists = tuple[list[list[Any]], list[list[Any]]]
"""Numerical and categorical values of each row."""


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
        self, config: dict[str, Any], clicks: Clicks, values: Values, facts: dict[str, Any]
    ) -> None:
        self._values, self._clicks = values, clicks
        self._names = [*values.numerical, *values.categorical]
        self.facts = facts | {
            "values": values.kind,
            "requests": values.about,
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
        numbers, ids = self._values.datatypes
        found = {
            "numerical": (numbers, len(self._values.numerical)),
            "categorical": (ids, self._values.width),
        }
        return [
            TensorSpec(name=name, datatype=datatype, shape=(-1, columns))
            for name, (datatype, columns) in found.items()
            if columns
        ]

    def score(self, requests: Sequence[Any]) -> NDArray[np.float32]:
        return self._clicks(*self._values.encode(requests))

    # --- tensors

    def read_tensors(self, tensors: Mapping[str, NDArray[Any]]) -> ClickRows:
        rows = len(next(iter(tensors.values())))
        numbers = tensors.get("numerical", np.empty((rows, 0), np.float32))
        ids = tensors.get("categorical", np.empty((rows, 0), np.int64))
        return self._values.of_tensors(numbers, ids)

    # --- JSON

    def read(self, body: dict[str, Any]) -> ClickRows:
        return self._values.of_lists(*self._lists(body))

    def _lists(self, body: dict[str, Any]) -> Lists:
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
        return numerical, categorical

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

    def _records(self, rows: Any) -> Lists:
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
        return numerical, categorical

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
