"""Flags with a value for all categorical columns and others for some: `15,C20=3`, `0,user=3`."""

import re
from collections.abc import Sequence

from trainmark.errors import InputError, unknown


def parse(
    text: str | None, flag: str, num_columns: int, minimum: int = 0, names: Sequence[str] = ()
) -> list[int | None]:
    """The value of every column; None where `text` gives neither its own nor one for all.

    Args:
        text: a number for all columns, and `Ck=number` for column k, counted from 1, or
            `name=number`, in any order; or one number for each column. None: nothing is given.
        flag: the flag's name, for messages.
        num_columns: number of categorical columns.
        minimum: the smallest value allowed.
        names: of the columns, where they have any.

    Example:
        parse("15,C2=3", "--frequency-threshold", 3) == [15, 3, 15]
    """
    if text is None:
        return [None] * num_columns
    text = str(text)  # callers in Python may give a number
    parts = text.split(",")
    if len(parts) == num_columns > 1 and "=" not in text:
        parts = [f"C{column}={part.strip()}" for column, part in enumerate(parts, 1)]
        names = ()
    for_all: int | None = None
    own: dict[int, int] = {}
    for part in parts:
        match = re.fullmatch(r"\s*(?:(.+?)\s*=\s*)?(\d[\d_]*)\s*", part)
        if not match:
            raise InputError(
                f"{flag} is {text!r}; expected a number, with others for some columns after it, "
                "such as 15,C20=3."
            )
        value = int(match.group(2))
        if value < minimum:
            raise InputError(f"{flag} is {text!r}; {value} is less than {minimum}.")
        if match.group(1) is None:
            if for_all is not None:
                raise InputError(
                    f"{flag} is {text!r}; it has two values for all columns. Give one, or one for "
                    f"each of the {num_columns} columns."
                )
            for_all = value
            continue
        column = _number(match.group(1), flag, num_columns, names)
        if column in own:
            raise InputError(f"{flag} is {text!r}; it names {match.group(1)} twice.")
        own[column] = value
    return [own.get(column, for_all) for column in range(1, num_columns + 1)]


def _number(name: str, flag: str, num_columns: int, names: Sequence[str]) -> int:
    """Which column, from 1, a name or Ck is. A column's own name goes before its number."""
    if name in names:
        return names.index(name) + 1
    numbered = re.fullmatch(r"[cC](\d+)", name)
    if not numbered and names:
        raise unknown(f"column of {flag}", name, names)
    if not numbered or not 1 <= int(numbered.group(1)) <= num_columns:
        raise InputError(f"{flag} names {name}; the columns are C1 to C{num_columns}.")
    return int(numbered.group(1))
