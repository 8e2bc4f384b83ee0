"""Converts Arrow columns to what the engine stores, as --columns says."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trainmark.clicklog.sources import column_values, labels, lists
from trainmark.clicklog.sources.arrow_columns import Mask
from trainmark.clicklog.sources.column_spec import ColumnUse
from trainmark.clicklog.sources.labels import Labels
from trainmark.clicklog.sources.rows import BadRow, ParsedRows, Values
from trainmark.clicklog.sources.source import BadRows

WORDS_FOR_NOTHING = ("na", "n/a", "#n/a", "null", "none", "nil", "\\n", "?", "-", ".")
"""What other programs write where a value is missing, in lower case."""


@dataclass(frozen=True)
class Converted:
    """A batch of rows. Fields that break the rules are listed, and missing or 0 in the columns."""

    labels: NDArray[np.bool_]
    numerical: NDArray[np.float64]
    """[rows, columns], NaN where missing."""
    categorical: list[Any]
    problems: dict[int, str]
    """Row -> what is wrong with it, the first thing if there are several."""
    unlabelled: Mask
    """Rows whose label is missing or wrong: these cannot be kept."""
    other_labels: tuple[str, ...] = ()
    """As `ParsedRows` has them."""
    kept: Any = None
    """Likewise."""


def convert(
    columns: Sequence[pa.Array],
    uses: Sequence[ColumnUse],
    *,
    takes_columns: bool = False,
    takes_missing: bool = False,
) -> Converted:
    """Convert one batch; `columns` and `uses` correspond.

    Args:
        takes_columns, takes_missing: whether --columns, and --missing, can say otherwise of these
            rows: then messages tell of it.
    """
    columns = [_plain(column, use) for column, use in zip(columns, uses, strict=True)]
    problems: dict[int, str] = {}
    rows = len(columns[0])
    label = Labels(np.zeros(rows, np.bool_), np.zeros(rows, np.bool_))  # where none is read
    numerical: list[NDArray[np.float64]] = []
    categorical: list[Any] = []
    for column, use in zip(columns, uses, strict=True):
        if use.role == "label":
            label = labels.read(column, use)
            bad = label.bad
        elif use.role == "numerical":
            numbers, bad = column_values.number(column)
            numerical.append(numbers)
        elif use.role == "timestamp":
            features, bad = column_values.time(column, use)
            categorical += features
        elif use.role == "order":
            values, bad = column_values.order(column, use)
            categorical.append(values)
        elif of_list := lists.parse(use.reading):
            places, bad = lists.slots(
                column, of_list, partial(column_values.category, reading=of_list.kind)
            )
            categorical += places
        else:
            values, bad = column_values.category(column, str(use.reading))
            categorical.append(values)
        for row in np.flatnonzero(bad).tolist():
            found = column[row].as_py()
            received = "missing" if found is None else f"{found!r:.60}"
            wanted = expected(use) + _hint(use, found, takes_columns, takes_missing)
            problems.setdefault(row, f"{use.column} is {received}, expected {wanted}")
    matrix = np.stack(numerical).T if numerical else np.empty((rows, 0))
    return Converted(label.clicks, matrix, categorical, problems, label.bad, label.others)


def expected(use: ColumnUse) -> str:
    """What may stand in a column, in words, and how to have something else read."""
    if use.role == "label":
        return labels.expected(use)
    if use.role == "numerical":
        return "a finite number"
    if use.role == "timestamp":
        if use.reading in ("unix", "unix_ms"):
            return "seconds since 1970" if use.reading == "unix" else "milliseconds since 1970"
        return f"a time such as 2024-05-01 13:30:00 (numbers: {use.column}:unix or :unix_ms)"
    if use.role == "order":
        if use.reading == "number":
            return "a number to order rows by"
        return f"a time such as 2024-05-01 13:30:00 (--split-by {use.column}:number reads numbers)"
    if of_list := lists.parse(use.reading):
        return f"a list of at most {of_list.most} values, each {of_list.kind} or nothing"
    return f"{use.reading} or nothing"


def _hint(use: ColumnUse, found: Any, takes_columns: bool, takes_missing: bool) -> str:
    """How to have read what was found: longer lists, numbers with commas, words for nothing."""
    if of_list := lists.parse(use.reading):
        values = lists.split(found, of_list.separator) if isinstance(found, str) else found
        values = [value for value in values if value not in ("", None)]
        if not takes_columns or not of_list.most < len(values) <= lists.LIMIT:
            return ""
        return f" ({use.column}:{replace(of_list, most=len(values))} takes this one)"
    if not isinstance(found, str):
        return ""
    if takes_missing and use.role != "label" and found.lower() in WORDS_FOR_NOTHING:
        return f" (with `prepare csv --missing '{found}'` it is a missing value)"
    digits = found.replace(",", "").replace(".", "").replace(" ", "")
    if use.role == "numerical" and "," in found and digits.lstrip("+-").isdigit():
        return " with a decimal point and no comma"
    return ""


def is_text(use: ColumnUse) -> bool:
    """Whether a column holds a string in each row: these may also come with a dictionary."""
    return use.role in ("categorical", "group") and use.reading == "string"


def _plain(column: pa.Array, use: ColumnUse) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        if is_text(use) and column.type == pa.string():
            column = column.dictionary_encode()  # codes are joined faster than strings
        column = column.combine_chunks()
    if not pa.types.is_dictionary(column.type):
        return column
    texts = (pa.string(), pa.large_string())
    is_wanted = is_text(use) and column.type.value_type in texts
    return column if is_wanted else column.dictionary_decode()


def parsed_rows(
    converted: Converted,
    path: str,
    lines: NDArray[np.int64],
    bad: list[BadRow],
    bad_rows: BadRows,
    all_lines: int,
) -> ParsedRows:
    """Leave out what cannot be kept, and list what is bad.

    Args:
        lines: of each row, in the piece; `all_lines`: how many the piece has.
    """
    bad = bad + [
        BadRow(path, int(lines[row]), reason) for row, reason in converted.problems.items()
    ]
    bad.sort(key=lambda row: row.line)
    keep = ~converted.unlabelled
    if bad_rows == "skip":
        keep[list(converted.problems)] = False
    if not keep.all():
        converted = _select(converted, keep)
    return ParsedRows(
        converted.labels,
        converted.numerical,
        converted.categorical,
        tuple(bad),
        converted.other_labels,
        lines=all_lines,
        kept=converted.kept,
    )


def _select(converted: Converted, keep: NDArray[np.bool_]) -> Converted:
    def chosen(column: Any) -> Any:
        if isinstance(column, Values):
            missing = None if column.missing is None else column.missing[keep]
            return Values(column.numbers[keep], missing)
        return column.filter(pa.array(keep))

    return replace(
        converted,
        labels=converted.labels[keep],
        numerical=converted.numerical[keep],
        categorical=[chosen(column) for column in converted.categorical],
        kept=None if converted.kept is None else converted.kept.filter(pa.array(keep)),
    )
