"""The language of --columns: what the columns of a file are.

    label=clicked numerical=age,price:log categorical=user:int64,city timestamp=seen_at

Roles are separated by spaces, columns by commas. A column is named as in the header, where `*` and
`?` stand for any characters (`categorical=C*`); without a header it is a number from 1, or a range
(`numerical=2-14`). Of several columns that a pattern or a range stands for, those are left out that
are named by themselves: `label=clicked numerical=*`. Columns that are not mentioned are not read.
What follows a column's last colon says how to read it:

    label        0 or 1 (also true, false); or compared: label=rating>=4, label=answer=yes
    numerical    auto (the default), plain, log, signed_log, standard, standard_log, quantile, bins,
                 or several with a plus between them (number_readings.py)
    categorical  string (the default for text), int64, uint64, float64, or hex for numbers of up to
                 8 hexadecimal digits; of lists, `list`, or such as int64[20|] (lists.py)
    timestamp    iso (the default for text: 2024-05-01 13:30:00), unix (seconds), unix_ms

A timestamp becomes two categorical features, the hour (UTC) and the day of the week.
A missing number is 0.0; a missing categorical value is a value like others, in lists none.
"""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from trainmark.clicklog.sources import lists, number_readings
from trainmark.clicklog.sources.rows import Column, Kind, Number, Schema
from trainmark.errors import InputError, raise_all, unknown

Role = Literal["label", "numerical", "categorical", "timestamp"]
RowRole = Literal["order", "group"]
"""Of columns that are no features: rows are ordered or grouped by them."""
IS = "is"
"""The comparison of a label that has two values."""
READINGS: dict[Role, tuple[str, ...]] = {
    "label": ("string",),
    "numerical": number_readings.WORDS,
    "categorical": ("string", "int64", "uint64", "float64", "hex"),
    "timestamp": ("iso", "unix", "unix_ms"),
}
COMPARISON = re.compile(r"(.+?)\s*(>=|<=|==|>|<|=)\s*(.+)")
NUMBER = re.compile(r"-?(\d+\.?\d*|\.\d+)")


@dataclass(frozen=True)
class ColumnUse:
    """What becomes of one column of the input."""

    column: str
    role: Role | RowRole
    reading: str | None = None
    """How to read it; None: as its type in the file says, or as the default for text."""
    comparison: tuple[str, float | str] | None = None
    """Of a label: it is 1 where the column compares so; with a text by `=` or `IS` alone."""
    parameters: Mapping[str, Any] | None = None
    """Of a number: what an earlier dataset has fitted."""


def parse(text: str, columns: Sequence[str], source: str) -> list[ColumnUse]:
    """The uses that `text` describes, in the order in which it names them.

    Args:
        text: as in this module's docstring.
        columns: the columns that there are; "1", "2", ... where there is no header.
        source: where they were found, for messages.
    """
    parts = _roles(text)
    if parts[0] or len(parts) < 3:
        raise InputError(
            f"--columns is {text!r}; expected roles with their columns, such as "
            "'label=clicked numerical=age,price categorical=user,city'."
        )
    described: list[ColumnUse] = []
    for role, names in zip(parts[1::2], parts[2::2], strict=True):
        _refuse_other_roles(role, names, columns)
        for name in _names(names, columns):
            described.append(_use(role, name, columns))  # type: ignore[arg-type]
    named = {use.column for use in described} & set(columns)
    uses = [
        replace(use, column=column)
        for use in described
        for column in _find(use.column, columns, source)
        if column == use.column or column not in named
    ]
    raise_all(_problems(uses))
    return uses


def _names(text: str, columns: Sequence[str]) -> list[str]:
    """What stands between commas, but for those that a column has in its own name, and for one
    that is between the values of its lists: `tags:string[5,]`."""
    for column in columns:
        if "," in column:
            text = text.replace(column, column.replace(",", "\0"))
    return [name.replace("\0", ",").strip() for name in re.split(r",(?!\])", text)]


def _refuse_other_roles(role: str, names: str, columns: Sequence[str]) -> None:
    """`numeric=age` would be taken for a label that is compared, or for part of a name. In the
    value that a label is compared with, only what has columns behind it is meant for a role."""
    compared = COMPARISON.fullmatch(names) if role == "label" else None
    value_start = compared.start(3) if compared else len(names)
    for found in re.finditer(r"\s(\w+)=(?=([^,:]*))", names):
        word, behind = found.groups()
        if found.start() < value_start:
            is_role = not any(column.endswith(word) for column in columns)
        else:
            is_role = any(behind.startswith(c) or fnmatch.fnmatchcase(c, behind) for c in columns)
        if is_role:
            raise unknown("role in --columns", word, get_args(Role))


def _roles(text: str) -> list[str]:
    """What precedes the first role, then roles and their columns in turn."""
    return re.split(rf"(?:^|\s+)({'|'.join(get_args(Role))})=", text.strip())


def _use(role: Role, name: str, columns: Sequence[str]) -> ColumnUse:
    """What a name says; its column may be a pattern or a range."""
    if role == "label" and name not in columns and (match := COMPARISON.fullmatch(name)):
        column, operator, value = match.groups()
        return ColumnUse(column, role, comparison=(operator, _compared_with(operator, value, name)))
    head, _, reading = name.rpartition(":")
    if name not in columns and head and _is_reading(role, reading):
        if role == "numerical":
            reading = number_readings.in_order(reading)
        return ColumnUse(head, role, reading)
    if name not in columns and head and head in columns:
        of_lists = (lists.WORD, f"string[{lists.USUAL}]") if role == "categorical" else ()
        known = (*READINGS[role], *of_lists)
        raise unknown(f"way to read the {role} column {head}", reading, known)
    return ColumnUse(name, role)


def _is_reading(role: Role, text: str) -> bool:
    if role == "numerical":
        return number_readings.is_reading(text)
    return text in READINGS[role] or (role == "categorical" and lists.is_reading(text))


def _compared_with(operator: str, value: str, name: str) -> float | str:
    if NUMBER.fullmatch(value):
        return float(value)
    if operator in ("=", "=="):
        return value
    raise InputError(f"--columns: label={name} compares with {value!r}; a number is expected.")


def _find(name: str, columns: Sequence[str], source: str) -> list[str]:
    """The columns that a name, a pattern or a range of numbers stands for."""
    if name in columns:
        return [name]
    span = re.fullmatch(r"(\d+)-(\d+)", name)
    numbered = [str(i) for i in range(1, len(columns) + 1)] == list(columns)
    if span and numbered:
        found = [str(i) for i in range(int(span.group(1)), int(span.group(2)) + 1)]
        if found and set(found) <= set(columns):
            return found
        raise InputError(f"--columns names {name}; {source} has columns 1 to {len(columns)}.")
    matching = [column for column in columns if fnmatch.fnmatchcase(column, name)]
    if not matching:
        raise unknown(f"column of {source}", name, columns)
    return matching


def _problems(uses: Sequence[ColumnUse]) -> list[str]:
    problems = []
    labels = [use.column for use in uses if use.role == "label"]
    if len(labels) != 1:
        problems.append(f"--columns names {len(labels)} labels; exactly one is needed.")
    named: set[str] = set()
    for use in uses:
        if use.column in named:
            problems.append(f"--columns names {use.column!r} twice.")
        named.add(use.column)
    if not any(use.role in ("numerical", "categorical", "timestamp") for use in uses):
        problems.append("--columns names no numerical or categorical column; one is needed.")
    return problems


def schema(uses: Sequence[ColumnUse]) -> Schema:
    """The columns that the uses give. Every reading must be known."""
    kinds: dict[str, Kind] = {
        "string": "string",
        "int64": "int64",
        "uint64": "uint64",
        "float64": "float64",
        "hex": "uint32",
    }
    categorical: list[Column] = []
    for use in uses:
        if use.role == "categorical":
            of_list = lists.parse(use.reading)
            kind = kinds[of_list.kind if of_list else use.reading or "string"]
            most, is_found = (of_list.most, of_list.is_found) if of_list else (None, False)
            categorical.append(Column(use.column, kind, most, is_found))
        elif use.role == "timestamp":
            categorical += [Column(f"{use.column}.hour"), Column(f"{use.column}.weekday")]
    numbers = tuple(
        Number(use.column, use.reading or number_readings.AUTO, use.parameters)
        for use in uses
        if use.role == "numerical"
    )
    helpers = tuple(
        Column(use.role, ("int64" if use.reading == "iso" else "float64"))
        if use.role == "order"
        else Column(use.role, kinds[use.reading or "string"])
        for use in uses
        if use.role in get_args(RowRole)
    )
    return Schema(len(numbers), tuple(categorical), numbers, helpers)


def inputs(uses: Sequence[ColumnUse], *, missing: list[str]) -> dict[str, Any]:
    """How the columns are read, for vocabulary.json."""
    columns = [
        {"column": use.column, "role": use.role, "reading": use.reading}
        for use in uses
        if use.role in get_args(Role) and use.role != "label"
    ]
    labels = [
        {"column": use.column, "role": "label", "comparison": use.comparison}
        for use in uses
        if use.role == "label"
    ]
    told = {"label": labels[0]} if labels else {}  # rows that are only scored need none
    return {"missing": missing, **told, "columns": columns}


def from_inputs(columns: Sequence[Mapping[str, Any]]) -> list[ColumnUse]:
    """The uses that `inputs` wrote."""
    uses = [ColumnUse(**use) for use in columns]
    for use in uses:
        if use.reading is not None and not _is_reading(use.role, use.reading):  # type: ignore[arg-type]
            known = READINGS[use.role]  # type: ignore[index]
            raise unknown(f"way to read the {use.role} column {use.column}", use.reading, known)
    return [
        replace(use, comparison=(use.comparison[0], use.comparison[1])) if use.comparison else use
        for use in uses
    ]
