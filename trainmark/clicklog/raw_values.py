"""Encodes raw values as inputs of the model, by the rules of a prepared dataset: for scoring.

A dataset that `prepare criteo`, `csv` or `parquet` wrote keeps its vocabularies, and how its
columns were read. `open_dataset` gives an encoder of new rows; None for a dataset from elsewhere,
which has numbers and ids only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trainmark.clicklog import inherit
from trainmark.clicklog.arrays import number_transforms
from trainmark.clicklog.column_ids import ColumnIds, open_bins, open_column
from trainmark.clicklog.engine.job import VOCABULARY
from trainmark.clicklog.engine.numbers import bin_name, features_of
from trainmark.clicklog.engine.vocabulary import Rules
from trainmark.clicklog.sources import (
    arrow_columns,
    column_spec,
    column_values,
    convert,
    criteo_format,
    lists,
    number_readings,
)
from trainmark.clicklog.sources.column_spec import ColumnUse
from trainmark.clicklog.sources.lists import ListReading
from trainmark.clicklog.sources.number_readings import NumberReading
from trainmark.clicklog.sources.recipes import Recipe
from trainmark.clicklog.sources.rows import Column, Values
from trainmark.config import filled
from trainmark.errors import InputError

Rows = Sequence[Sequence[Any]]
Encoded = tuple[NDArray[np.floating], NDArray[np.int64]]
"""Numbers [rows, numerical features] and ids [rows, tables]; of a column of lists, as many ids as a
list may have, -1 for none."""

NOT_ARROW = (pa.ArrowException, OverflowError)
"""What Arrow raises of values that are no column."""
TEXTS = ("string", "hex", "iso")
"""Readings of texts alone."""
INTEGERS, EXACT = ("int64", "uint64"), 2.0**53
"""Readings of whole numbers, and from where on a float does not name one."""


class RawValues(Protocol):
    """Encodes rows of raw values."""

    numerical: tuple[str, ...]
    """Names of the numerical columns, in order."""
    categorical: tuple[str, ...]
    """Names of the other columns, in order. A timestamp is one of them, and has two tables."""
    tables: tuple[str, ...]
    """Names of the tables, in order."""
    expects: Mapping[str, str]
    """What may stand in each column, in words."""
    separators: Mapping[str, str]
    """Columns of lists, and what is between their values where a list is a text."""

    def encode(self, numerical: Rows, categorical: Rows) -> Encoded:
        """Rows of values as JSON has them, None where missing; each as wide as its names.

        Raises:
            InputError: naming the row (from 0), the column, what was received and expected.
        """

    def example(self) -> tuple[list[Any], list[Any]]:
        """A row: of every categorical column the most frequent value."""


def open_dataset(data: Path) -> RawValues | None:
    """The encoder of a prepared dataset; None if it has no vocabularies."""
    if not (data / VOCABULARY / "vocabulary.json").is_file():
        return None
    old = inherit.open_dataset(data)
    rules = old.rules(list(old.facts["columns"]))
    if old.is_criteo:
        return CriteoValues(old.vocabularies, rules, old.recipe)
    return TabularValues(old.vocabularies, rules, old.facts["inputs"])


def _open_columns(
    vocabularies: Path, columns: Sequence[Column], rules: Sequence[Rules]
) -> list[ColumnIds]:
    return [
        open_column(vocabularies / f"cat_{number}.parquet", column.kind, rule)
        for number, (column, rule) in enumerate(zip(columns, rules, strict=True))
    ]


def _ids(columns: Sequence[ColumnIds], values: Sequence[Any], rows: int) -> NDArray[np.int64]:
    ids = np.empty((rows, len(columns)), np.int64)
    for place, (column, of_column) in enumerate(zip(columns, values, strict=True)):
        ids[:, place] = column.look_up(of_column)
    return ids


def _is_missing(values: Any) -> NDArray[np.bool_]:
    """Which rows of a place in lists have no value there."""
    if not isinstance(values, Values):
        return arrow_columns.nulls(values)
    return np.zeros(len(values.numbers), np.bool_) if values.missing is None else values.missing


def refusal(row: int, name: str, received: Any, expected: str) -> InputError:
    """The error for a value that cannot be used."""
    shown = "null" if received is None else f"{received!r:.60}"
    return InputError(f"Row {row}: {name} is {shown}, expected {expected}.")


# --- Criteo's columns


class CriteoValues:
    """13 integers, and 26 numbers of up to 8 hexadecimal digits.

    Args:
        vocabularies: their folder.
        rules: of each column.
        recipe: how integers are transformed.
    """

    def __init__(self, vocabularies: Path, rules: Sequence[Rules], recipe: Recipe) -> None:
        self.numerical = tuple(f"I{i}" for i in range(1, criteo_format.NUM_NUMERICAL + 1))
        self.categorical = self.tables = criteo_format.NAMES
        self.expects: Mapping[str, str] = {
            **dict.fromkeys(self.numerical, "a whole number of at most 64 bits or nothing"),
            **dict.fromkeys(self.categorical, "up to 8 hexadecimal digits or nothing"),
        }
        self.separators: Mapping[str, str] = {}
        self._recipe = recipe
        self._columns = _open_columns(vocabularies, [Column(name) for name in self.tables], rules)

    def encode(self, numerical: Rows, categorical: Rows) -> Encoded:
        integers, missing = self._integers(list(chain.from_iterable(numerical)))
        numbers = self._recipe.transform(integers)
        numbers[missing] = self._recipe.missing_number
        values = self._hexadecimals(list(chain.from_iterable(categorical)))
        return numbers.astype(np.float16).reshape(len(numerical), -1), _ids(
            self._columns, values, len(numerical)
        )

    def _integers(self, values: list[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        column = _inferred(values)
        if column is None or column.type not in (pa.int64(), pa.null()):
            column = pa.array([self._integer(*entry) for entry in enumerate(values)], pa.int64())
        column = column.cast(pa.int64())
        return pc.fill_null(column, 0).to_numpy(), arrow_columns.nulls(column)

    def _integer(self, place: int, value: Any) -> int | None:
        """One that is a text or a float, perhaps."""
        if value is None or value == "":
            return None
        if not isinstance(value, bool | list | dict):
            text = f"{value:.0f}" if isinstance(value, float) and value % 1 == 0 else str(value)
            number = criteo_format.integer(text.encode(errors="replace"))
            if number is not None:
                return number
        row, column = divmod(place, len(self.numerical))
        name = self.numerical[column]
        raise refusal(row, name, value, self.expects[name])

    def _hexadecimals(self, values: list[Any]) -> list[Values]:
        """Of each column."""
        width = len(self.categorical)
        if "" in values:
            values = [None if value == "" else value for value in values]
        column = _inferred(values)
        if column is None or column.type not in (pa.string(), pa.null()):
            bad = np.array([not _is_hexadecimal(value) for value in values])
        else:
            numbers, bad = column_values.hexadecimal(column.cast(pa.string()))
        if bad.any():
            place = int(np.argmax(bad))
            name = self.categorical[place % width]
            raise refusal(place // width, name, values[place], self.expects[name])
        missing = arrow_columns.nulls(column).reshape(-1, width)
        by_column = zip(numbers.numbers.reshape(-1, width).T, missing.T, strict=True)
        return [Values(*column) for column in by_column]

    def example(self) -> tuple[list[Any], list[Any]]:
        hexadecimals = [f"{column.most_frequent or 0:08x}" for column in self._columns]
        return [1] * len(self.numerical), hexadecimals


# --- any columns


class TabularValues:
    """Columns of any kind, as `--columns` described them.

    Args:
        vocabularies: their folder.
        rules: of each table.
        inputs: how the columns were read, from vocabulary.json.
    """

    def __init__(
        self, vocabularies: Path, rules: Sequence[Rules], inputs: Mapping[str, Any]
    ) -> None:
        uses = column_spec.from_inputs(inputs["columns"])
        self._numerical = [use for use in uses if use.role == "numerical"]
        self._categorical = [use for use in uses if use.role != "numerical"]
        self._missing: list[str] = inputs["missing"]
        self.numerical = tuple(use.column for use in self._numerical)
        self.categorical = tuple(use.column for use in self._categorical)
        self.expects: Mapping[str, str] = {use.column: convert.expected(use) for use in uses}
        self.separators: Mapping[str, str] = {
            use.column: of_list.separator for use in uses if (of_list := lists.parse(use.reading))
        }
        columns = column_spec.schema(uses).categorical
        self._binned = [use.column for use in self._numerical if _reading(use).bins]
        self.tables = (*(column.name for column in columns), *map(bin_name, self._binned))
        self._columns = _open_columns(vocabularies, columns, rules[: len(columns)])
        self._columns += [
            open_bins(vocabularies / f"cat_{number}.parquet")
            for number in range(len(columns), len(self.tables))
        ]
        most = [column.most for column in columns] + [None] * len(self._binned)
        self._places = [(c, n is not None) for c, n in enumerate(most) for _ in range(n or 1)]
        """The table of each id, and whether it is one of a list."""

    def encode(self, numerical: Rows, categorical: Rows) -> Encoded:
        uses = self._numerical + self._categorical
        columns = [*zip(*numerical, strict=True), *zip(*categorical, strict=True)]
        arrays = [self._array(c, use) for c, use in zip(columns, uses, strict=True)]
        converted = convert.convert(arrays, uses)
        if converted.problems:
            row = min(converted.problems)
            raise InputError(f"Row {row}: {converted.problems[row]}.")
        numbers = dict(zip(self.numerical, converted.numerical.T, strict=True))
        features = [
            feature
            for use in self._numerical
            for feature in features_of(_reading(use), use.parameters or {}, numbers[use.column])
        ]
        rows = np.stack(features, axis=1) if features else np.empty((len(numerical), 0))
        values = [*converted.categorical, *(numbers[name] for name in self._binned)]
        ids = _ids([self._columns[table] for table, _ in self._places], values, len(numerical))
        for place, (_, of_list) in enumerate(self._places):
            if of_list:
                ids[_is_missing(values[place]), place] = -1
        return number_transforms.narrowed(rows, np.float32), ids

    def _array(self, values: Sequence[Any], use: ColumnUse) -> pa.Array:
        """A column as a file might have it: of its type, or of texts."""
        if of_list := lists.parse(use.reading):
            return self._lists(values, use, of_list)
        # Of Parquet, an empty text is a value: but no number, id or time is written so.
        signs = self._missing if use.reading == "string" else [*self._missing, ""]
        if any(sign in values for sign in signs):
            values = [None if value in signs else value for value in values]
        array = _inferred(values)
        if use.reading in INTEGERS and array is not None and pa.types.is_floating(array.type):
            values = [_whole(*entry, use) for entry in enumerate(values)]
            array = _inferred(values)
        if array is not None and _has_type_for(use, array.type):
            return array
        texts = [self._text(row, value, use) for row, value in enumerate(values)]
        return pa.array(texts, pa.string())

    def _lists(self, values: Sequence[Any], use: ColumnUse, reading: ListReading) -> pa.Array:
        """Lists of texts; null is an empty one."""
        of_values = replace(use, reading=reading.kind)
        found = []
        for row, value in enumerate(values):
            if not isinstance(value, list | None):
                raise refusal(row, use.column, value, self.expects[use.column])
            there = [one for one in value or [] if one not in self._missing]
            found.append([self._text(row, one, of_values) for one in there])
        return pa.array(found, pa.list_(pa.string()))

    def _text(self, row: int, value: Any, use: ColumnUse) -> str | None:
        if value is None or isinstance(value, str):
            return value
        if use.reading in INTEGERS and isinstance(value, float):
            value = _whole(row, value, use)
        is_number = isinstance(value, int | float)
        names_itself = use.reading == "string" and type(value) is int
        if is_number and (use.reading not in TEXTS or names_itself):
            return str(int(value) if isinstance(value, bool) else value)
        raise refusal(row, use.column, value, self.expects[use.column])

    def example(self) -> tuple[list[Any], list[Any]]:
        times = {"iso": "2026-01-31 12:00:00", "unix": 1769860800, "unix_ms": 1769860800000}
        found = dict(zip(self.tables, self._columns, strict=True))
        values = [
            times[str(use.reading)]
            if use.role == "timestamp"
            else _as_read(found[use.column].most_frequent, use)
            for use in self._categorical
        ]
        return [1] * len(self.numerical), values


def _reading(use: ColumnUse) -> NumberReading:
    return number_readings.parse(filled(use.reading))


def _inferred(values: Sequence[Any]) -> pa.Array | None:
    """The column, of the type that its values have; None if they have none in common."""
    try:
        return pa.array(values)
    except NOT_ARROW:
        return None


def _whole(row: int, value: float | None, use: ColumnUse) -> int | None:
    """An id that came as a float, as 7.0 does for 7. From 2^53 on, floats lie apart by more than
    one: it may have been another id before it became one."""
    if value is None or isinstance(value, int):
        return value
    if abs(value) < EXACT and value == int(value):
        return int(value)
    wanted = convert.expected(use)
    if abs(value) >= EXACT:
        wanted += "; a float of 2^53 or more may be another number than was meant"
    raise refusal(row, use.column, value, wanted)


def _has_type_for(use: ColumnUse, kind: pa.DataType) -> bool:
    if use.reading in TEXTS:
        return bool(pa.types.is_string(kind))
    return not pa.types.is_nested(kind)


def _is_hexadecimal(value: Any) -> bool:
    if not isinstance(value, str):
        return value is None
    return criteo_format.hexadecimal(value.encode(errors="replace")) is not None


def _as_read(value: Any, use: ColumnUse) -> Any:
    if of_list := lists.parse(use.reading):
        return [] if value is None else [_as_read(value, replace(use, reading=of_list.kind))]
    return f"{value:x}" if use.reading == "hex" and value is not None else value
