"""Columns of lists: several values in a row, each of which gets an id of the same vocabulary.

How one is read is written KIND[MOST] or, where a list is a text, KIND[MOST SEPARATOR]: the kind of
its values, how many a row may have, and what is between them, such as string[20|]. `list` alone
leaves kind and separator to the file's type and to the defaults below, and the number to the
longest list that there is. Missing values, and empty texts, are no values: a list may be empty. Nor
are blanks around the values of a text.
"""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainmark.clicklog.sources.rows import Values
from trainmark.errors import InputError

WORD = "list"
SEPARATOR, MOST = "|", 100
"""Where a list is a text, by default."""
LIMIT = 10_000
"""Values of a row: each of them is a column of the store."""
USUAL = 20
"""Values of a row that are worth no warning."""
FAR = 4
"""Times as long as nearly all lists: worth a warning."""
_READING = re.compile(r"(string|int64|uint64|float64|hex)\[(\d+)([^\w:\]]?)\]")


@dataclass(frozen=True)
class ListReading:
    """How a column of lists is read."""

    kind: str
    """Of a value, as a categorical column's."""
    most: int
    """Values that a row may have."""
    separator: str = SEPARATOR
    """Between the values, where a list is a text."""
    is_found: bool = False
    """Whether rows have as many places as the longest list needs, and `most` is but the limit."""

    def __str__(self) -> str:
        separator = "" if self.separator == SEPARATOR else self.separator
        return f"{self.kind}[{self.most}{separator}]"


def parse(reading: str | None) -> ListReading | None:
    """What a reading says; None if it is of single values."""
    if reading == WORD:
        return ListReading("string", MOST, is_found=True)
    match = _READING.fullmatch(reading or "")
    if not match or not int(match[2]):
        return None
    if len(match[2]) > len(str(LIMIT)) or int(match[2]) > LIMIT:
        raise InputError(
            f"{reading} in --columns: a list may have at most {LIMIT:,} values, because every row "
            f"is stored with room for so many. {match[1]}[{LIMIT}{match[3]}] with --bad-rows keep "
            "takes the first ones of longer lists."
        )
    return ListReading(match[1], int(match[2]), match[3] or SEPARATOR)


def is_reading(text: str) -> bool:
    return parse(text) is not None


def is_list(kind: Any) -> bool:
    """Whether an Arrow type is one."""
    import pyarrow as pa

    tests = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(test(kind) for test in tests)


def split(text: str, separator: str) -> list[str]:
    """The values of a list that is a text; some may be empty."""
    return [value.strip() for value in text.split(separator)]


def lengths(column: Any) -> NDArray[np.int64]:
    """How many rows of a column of lists have no value, one, two, ..."""
    _, row = _values_there(column)
    return np.bincount(np.bincount(row, minlength=len(column)))


def outlier(column: str, reading: ListReading, rows_of_length: NDArray[np.int64]) -> str | None:
    """A sentence on a longest list for whose sake all rows are stored at many times their size."""
    ends = np.searchsorted(np.cumsum(rows_of_length), 0.999 * rows_of_length.sum())
    usual, most = max(int(ends), 1), len(rows_of_length) - 1
    if most <= max(FAR * usual, USUAL):
        return None
    shorter = dataclasses.replace(reading, most=usual)
    return (
        f"The longest list of {column} has {most:,} values, and so many are stored of every row, "
        f"though 99.9% of the rows have at most {usual:,}. {column}:{shorter} with --bad-rows keep "
        "takes the first ones of longer lists."
    )


def slots(
    column: Any,
    reading: ListReading,
    convert_values: Callable[[Any], tuple[Any, NDArray[np.bool_]]],
) -> tuple[list[Any], NDArray[np.bool_]]:
    """For each place in a list, a column of the values there; and which rows are bad.

    Args:
        column: of lists, or of texts.
        convert_values: from a column of values to what is stored of it, and which are bad.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if not is_list(column.type):
        column = pc.split_pattern(column.cast(pa.string()), reading.separator)
        trimmed = pc.utf8_trim_whitespace(column.values)
        column = pa.ListArray.from_arrays(column.offsets, trimmed, mask=column.is_null())
    rows = len(column)
    values, row = _values_there(column)
    converted, bad_values = convert_values(values)
    place = np.arange(len(row)) - np.searchsorted(row, row)
    lengths = np.bincount(row, minlength=rows)
    bad = lengths > reading.most
    bad[row[bad_values]] = True
    found, longest = [], int(lengths.max(initial=0))
    for slot in range(min(longest, reading.most)):
        chosen = np.flatnonzero((place == slot) & ~bad_values)
        found.append(_spread(converted, chosen, row[chosen], rows))
    nothing = np.empty(0, np.int64)
    empty = _spread(converted, nothing, nothing, rows)
    return found + [empty] * (reading.most - len(found)), bad


def _values_there(column: Any) -> tuple[Any, NDArray[np.int64]]:
    """The values of all lists, but missing ones and empty texts; and of each its row."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_null(column.type):  # of a file in which no row has a list
        column = column.cast(pa.list_(pa.null()))
    values, row = pc.list_flatten(column), pc.list_parent_indices(column).to_numpy()
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    there = pc.is_valid(values)
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        there = pc.and_(there, pc.fill_null(pc.not_equal(values, ""), False))
    kept = there.to_numpy(zero_copy_only=False)
    return values.filter(there), row[kept].astype(np.int64)


def _spread(values: Any, chosen: NDArray[np.int64], of_rows: NDArray[np.int64], rows: int) -> Any:
    """A column of `rows`, in which some have a value."""
    import pyarrow as pa

    if isinstance(values, Values):
        missing = np.ones(rows, np.bool_)
        missing[of_rows] = False
        if values.missing is not None:
            missing[of_rows] = values.missing[chosen]
        numbers = np.zeros(rows, values.numbers.dtype)
        numbers[of_rows] = values.numbers[chosen]
        return Values(numbers, missing)
    places = np.zeros(rows, np.int64)
    places[of_rows] = chosen
    lacking = np.ones(rows, np.bool_)
    lacking[of_rows] = False
    return values.take(pa.array(places, mask=lacking))
