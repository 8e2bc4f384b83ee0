"""Flags with a value for all categorical columns and others for some: `15,C20=3`."""

import re

from trainmark.errors import InputError


def parse(text: str, flag: str, num_columns: int, minimum: int = 0) -> list[int | None]:
    """The value of every column; None where `text` gives neither its own nor one for all.

    Args:
        text: a number for all columns, and `Ck=number` for column k, counted from 1, in any order.
        flag: the flag's name, for messages.
        num_columns: number of categorical columns.
        minimum: the least value allowed.

    Example:
        parse("15,C2=3", "--frequency-threshold", 3) == [15, 3, 15]
    """
    for_all: int | None = None
    own: dict[int, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:[cC](\d+)=)?(\d[\d_]*)\s*", part)
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
                raise InputError(f"{flag} is {text!r}; it has two values for all columns.")
            for_all = value
            continue
        column = int(match.group(1))
        if not 1 <= column <= num_columns:
            raise InputError(f"{flag} names C{column}; the columns are C1 to C{num_columns}.")
        if column in own:
            raise InputError(f"{flag} is {text!r}; it names C{column} twice.")
        own[column] = value
    return [own.get(column, for_all) for column in range(1, num_columns + 1)]
