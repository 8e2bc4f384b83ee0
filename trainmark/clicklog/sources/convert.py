"""Converts Arrow columns to what the engine stores, as --columns says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trainmark.clicklog.sources import labels, lists
from trainmark.clicklog.sources.arrow_columns import Mask, cast, floats, nulls
from trainmark.clicklog.sources.column_spec import ColumnUse
from trainmark.clicklog.sources.labels import Labels
from trainmark.clicklog.sources.rows import BadRow, ParsedRows, Values
from trainmark.clicklog.sources.source import BadRows
from trainmark.errors import InputError

HOUR_S, DAY_S = 3600, 86_400
THURSDAY = 3
"""Day of the week of 1 January 1970, Monday being 0."""
WORDS_FOR_NOTHING = ("na", "n/a", "#n/a", "null", "none", "nil", "\\n", "?", "-", ".")
"""What other programs write where a value is missing, in lower case."""


SLASHED = r"^(\d{4})/(\d\d)/(\d\d)"
"""Dates that are written with slashes, the year first: no other order starts so."""
ZONE = r"[T ]\d\d.*(Z|[+-]\d\d(:?\d\d)?)$"
"""Times that end with their zone."""


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
    columns: Sequence[pa.Array], uses: Sequence[ColumnUse], *, takes_missing: bool = False
) -> Converted:
    """Convert one batch; `columns` and `uses` correspond.

    Args:
        takes_missing: whether --missing can be given for these rows: then messages tell of it.
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
            numbers, bad = _number(column)
            numerical.append(numbers)
        elif use.role == "timestamp":
            features, bad = _time(column, use)
            categorical += features
        elif use.role == "order":
            values, bad = _order(column, use)
            categorical.append(values)
        elif of_list := lists.parse(use.reading):
            places, bad = lists.slots(column, of_list, partial(_category, reading=of_list.kind))
            categorical += places
        else:
            values, bad = _category(column, str(use.reading))
            categorical.append(values)
        for row in np.flatnonzero(bad).tolist():
            found = column[row].as_py()
            received = "missing" if found is None else f"{found!r:.60}"
            wanted = expected(use) + _hint(use, found, takes_missing)
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


def _hint(use: ColumnUse, found: Any, takes_missing: bool) -> str:
    """How to have read what was found: longer lists, numbers with commas, words for nothing."""
    if of_list := lists.parse(use.reading):
        values = lists.split(found, of_list.separator) if isinstance(found, str) else found
        values = [value for value in values if value not in ("", None)]
        if len(values) <= of_list.most:
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


def resolve(
    uses: Sequence[ColumnUse], types: Sequence[pa.DataType], numerical: str
) -> list[ColumnUse]:
    """Fill in how to read each column, by its type in the file; refuse what cannot be read.

    Args:
        numerical: the reading of numbers that have none.
    """
    resolved = [
        use
        if use.reading and use.reading != lists.WORD
        else replace(use, reading=_reading(use, _value_type(kind), numerical))
        for use, kind in zip(uses, types, strict=True)
    ]
    for use, kind in zip(resolved, types, strict=True):
        try:
            convert([pa.nulls(0, kind)], [use])
        except pa.ArrowNotImplementedError:
            reading = "" if use.role == "label" else f" ({use.reading})"
            raise InputError(
                f"--columns: {use.column} is a column of {kind}, "
                f"which cannot be read as {use.role}{reading}."
            ) from None
    return resolved


def _reading(use: ColumnUse, kind: pa.DataType, numerical: str) -> str | None:
    if use.role == "timestamp":
        if pa.types.is_integer(kind) or pa.types.is_floating(kind):
            raise InputError(
                f"--columns: {use.column} holds numbers; say {use.column}:unix (seconds) or "
                f"{use.column}:unix_ms."
            )
        return "iso"
    if use.role == "order":
        return "number" if pa.types.is_integer(kind) or pa.types.is_floating(kind) else "iso"
    if use.role not in ("categorical", "group"):
        return numerical if use.role == "numerical" else "string"
    if use.role == "categorical" and lists.is_list(kind):
        values = _value_type(kind.value_type)
        if not pa.types.is_nested(values):
            of_values = _reading(replace(use, reading=None), values, numerical)
            return str(lists.ListReading(str(of_values), lists.MOST))
    if use.reading == lists.WORD:
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise InputError(
                f"--columns: {use.column} is a column of {kind}; lists, or texts, can be read as "
                "a list."
            )
        return lists.WORD
    if pa.types.is_nested(kind):
        raise InputError(
            f"--columns: {use.column} is a column of {kind}; single values, or lists of them, are "
            "read."
        )
    return _category_reading(kind)


def _category_reading(kind: pa.DataType) -> str:
    if pa.types.is_unsigned_integer(kind):
        return "uint64"
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return "int64"
    return "float64" if pa.types.is_floating(kind) else "string"


def has_text(kind: pa.DataType) -> bool:
    """Whether a value of this type has one text: of a float or a boolean, others write another."""
    kind = _value_type(kind)
    return pa.types.is_integer(kind) or _category_reading(kind) == "string"


def _value_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def common_type(
    kind: pa.DataType, other: pa.DataType, uses: Sequence[ColumnUse]
) -> pa.DataType | None:
    """The type of a column that two files have in different types, as different versions of a
    program write them; None, where a value would not be read the same from both.

    Args:
        uses: what becomes of the column; none: it is carried along as it is.
    """
    if kind == other or not uses:
        return kind if kind == other else None
    if pa.types.is_null(kind) or pa.types.is_null(other):  # every row of one of them has none
        return other if pa.types.is_null(kind) else kind
    if lists.is_list(kind) and lists.is_list(other):
        values = common_type(kind.value_type, other.value_type, uses)
        return None if values is None else pa.list_(values)
    pair = (_value_type(kind), _value_type(other))

    def both(*checks: Callable[[pa.DataType], bool]) -> bool:
        return all(any(check(one) for check in checks) for one in pair)

    if both(pa.types.is_integer):
        return _common_integer(*pair, uses)
    roles = {use.role for use in uses}
    if roles <= {"numerical", "order"} and both(pa.types.is_integer, pa.types.is_floating):
        return pa.float64()
    if roles <= {"timestamp", "order"} and both(pa.types.is_timestamp):
        return pair[0]  # times are instants: without a zone, in UTC
    return pair[0] if both(pa.types.is_string, pa.types.is_large_string) else None


def _common_integer(
    kind: pa.DataType, other: pa.DataType, uses: Sequence[ColumnUse]
) -> pa.DataType | None:
    if all(map(pa.types.is_unsigned_integer, (kind, other))):
        return max(kind, other, key=lambda one: one.bit_width)
    ids = [use for use in uses if use.role in ("categorical", "group")]
    is_said = all(use.reading not in (None, lists.WORD) for use in ids)
    # No integers hold both the largest of uint64 and negative ones.
    return pa.int64() if is_said or pa.uint64() not in (kind, other) else None


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


# --- one column


def _number(column: pa.Array) -> tuple[NDArray[np.float64], Mask]:
    """As they are; what is bad counts as missing."""
    if pa.types.is_integer(column.type):
        column = column.cast(pa.float64(), safe=False)  # also those that float64 rounds
    numbers, bad = cast(column, pa.float64())
    values = pc.fill_null(numbers, float("nan")).to_numpy(zero_copy_only=False)
    bad |= np.isinf(values)
    return np.where(bad, np.nan, values) if bad.any() else values, bad


def _category(column: pa.Array, reading: str) -> tuple[Any, Mask]:
    if pa.types.is_dictionary(column.type):
        return column, np.zeros(len(column), np.bool_)
    if reading == "string":
        return cast(column, pa.string())
    if reading == "hex":
        return hexadecimal(column)
    kinds = {"int64": pa.int64(), "uint64": pa.uint64(), "float64": pa.float64()}
    numbers, bad = cast(column, kinds[reading])
    missing = nulls(numbers)
    array = pc.fill_null(numbers, 0).to_numpy(zero_copy_only=False)
    if reading == "float64":
        missing = missing | np.isnan(array)
        array = np.where(missing, 0.0, array) + 0.0  # one zero, not a negative one too
    return Values(array, missing if missing.any() else None), bad


def hexadecimal(column: pa.Array) -> tuple[Values, Mask]:
    """Numbers of up to 8 digits, in either case."""
    missing = nulls(column)
    good = pc.fill_null(pc.match_substring_regex(column, "^[0-9a-fA-F]{1,8}$"), False)
    bad = ~good.to_numpy(zero_copy_only=False) & ~missing
    padded = pc.ascii_lpad(pc.if_else(good, column, "0"), width=8, padding="0")
    texts = np.frombuffer(padded.buffers()[-1] or b"", np.uint8)
    characters = texts[: 8 * len(padded)].reshape(-1, 8)
    digits = (characters & 15) + 9 * (characters >> 6)  # the bit of 64 marks letters
    pairs = (digits[:, ::2] << 4) | digits[:, 1::2]
    numbers = np.ascontiguousarray(pairs).view(">u4").ravel().astype(np.uint32)
    absent = missing | bad
    return Values(numbers, absent if absent.any() else None), bad


def _time(column: pa.Array, use: ColumnUse) -> tuple[list[Values], Mask]:
    """Hour and day of the week, in UTC."""
    if use.reading in ("unix", "unix_ms"):
        values, missing, bad = floats(column)
        bad |= ~(np.abs(values) < 2**53)
        values = np.where(bad, 0.0, values)
        seconds = np.floor(values / (1000 if use.reading == "unix_ms" else 1)).astype(np.int64)
    else:
        times, bad = _iso(column)
        missing = nulls(times) & ~bad
        milliseconds = pc.fill_null(times.cast(pa.timestamp("ms"), safe=False).cast(pa.int64()), 0)
        seconds = milliseconds.to_numpy(zero_copy_only=False) // 1000
    absent = missing | bad
    hidden = absent if absent.any() else None
    hours = (seconds // HOUR_S % 24).astype(np.uint32)
    weekdays = ((seconds // DAY_S + THURSDAY) % 7).astype(np.uint32)
    return [Values(hours, hidden), Values(weekdays, hidden)], bad


def _order(column: pa.Array, use: ColumnUse) -> tuple[Values, Mask]:
    """What rows are ordered by: a number, or a time in microseconds."""
    if use.reading == "number":
        values, missing, bad = floats(column)
        return Values(values + 0.0, missing | bad), bad
    times, bad = _iso(column)
    moments = pc.fill_null(times.cast(pa.timestamp("us"), safe=False).cast(pa.int64()), 0)
    return Values(moments.to_numpy(zero_copy_only=False), nulls(times)), bad


def _iso(column: pa.Array) -> tuple[pa.Array, Mask]:
    if pa.types.is_temporal(column.type):
        if pa.types.is_timestamp(column.type) and column.type.tz:
            column = column.cast(pa.timestamp(column.type.unit))  # the same instant, in UTC
        return cast(column, pa.timestamp("ms") if pa.types.is_date(column.type) else column.type)
    plain, utc = pa.timestamp("us"), pa.timestamp("us", tz="UTC")
    for kind in (utc, plain):  # as nearly all columns are: every time with a zone, or none
        try:
            return column.cast(kind).cast(plain), np.zeros(len(column), np.bool_)
        except pa.ArrowInvalid:
            continue
    column = pc.replace_substring_regex(column, SLASHED, r"\1-\2-\3")
    has_zone, none = pc.match_substring_regex(column, ZONE), pa.scalar(None, column.type)
    here, bad = cast(pc.if_else(has_zone, none, column), plain)
    elsewhere, also_bad = cast(pc.if_else(has_zone, column, none), utc)
    return pc.coalesce(here, elsewhere.cast(plain)), bad | also_bad
