"""Types of columns in files: how a column of a type is read, and what type two files agree on."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pyarrow as pa

from trainmark.clicklog.sources import lists
from trainmark.clicklog.sources.column_spec import ColumnUse
from trainmark.clicklog.sources.convert import convert
from trainmark.errors import InputError


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
