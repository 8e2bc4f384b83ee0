"""What a sweep varies: `--over FIELD=V1,V2,...` and, for a search, `--over FIELD=LOW..HIGH`."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from trainmark.errors import InputError, raise_all
from trainmark.report.sweep_page import SweptField

Values = dict[str, str]
"""By field, the text after its flag; several words are several values of one flag."""

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(:log)?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Field(SweptField):
    """A flag without its hyphens, and the values that it may have: some, or a range."""

    low: float = 0.0
    high: float = 0.0
    whole: bool = False
    """Whether all numbers in the range are whole."""

    @property
    def ends(self) -> tuple[str, ...]:
        """The choices, or the first and the last number of the range."""
        return self.choices or (self.text(self.low), self.text(self.high))

    def text(self, value: float) -> str:
        """A number of the range as it is typed, in few digits."""
        if self.whole:
            return str(int(value))
        short = f"{value:.4g}"
        return short if self.low <= float(short) <= self.high else repr(value)


def parse_over(texts: Sequence[str]) -> list[Field]:
    """`FIELD=V1,V2,...` or `FIELD=LOW..HIGH[:log]`, each."""
    if not texts:
        raise _wrong("nothing")
    fields = [_parse(text) for text in texts]
    names = [field.name for field in fields]
    raise_all(
        f"--over names {name} twice; give all of its values at once."
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    )
    return fields


def _parse(text: str) -> Field:
    name, equals, given = text.partition("=")
    name = name.strip().replace("_", "-")
    if not equals or not name:
        raise _wrong(text)
    if match := _RANGE.fullmatch(given.strip()):
        return _range(name, match, text)
    values = [value.strip() for value in given.split(",") if value.strip()]
    if not values:
        raise _wrong(text)
    return Field(name=name, choices=tuple(dict.fromkeys(values)))


def _range(name: str, match: "re.Match[str]", text: str) -> Field:
    low, high, log = float(match[1]), float(match[2]), bool(match[3])
    if not low < high < math.inf or (log and low <= 0):
        raise InputError(
            f"--over {text}: a range goes from a smaller number to a larger one, and with :log "
            "both are above 0."
        )
    whole = all(re.fullmatch(r"[-+]?\d+", end, re.ASCII) for end in match.group(1, 2))
    return Field(name=name, low=low, high=high, log=log, whole=whole)


def _wrong(received: str) -> InputError:
    return InputError(
        "--over must be FIELD=V1,V2,..., such as global_batch=1024,2048, or, for a search "
        f"(--trials), FIELD=LOW..HIGH, such as lr=0.001..1:log. Received: {received or 'nothing'}."
    )


def grid(fields: Sequence[Field]) -> list[Values]:
    """Every combination of the values; the last field changes fastest."""
    raise_all(
        f"--over {field.name}: a range is for a search, --trials N. List the values of a grid."
        for field in fields
        if not field.choices
    )
    names = [field.name for field in fields]
    combinations = itertools.product(*(field.choices for field in fields))
    return [dict(zip(names, values, strict=True)) for values in combinations]


def words(values: Values) -> list[str]:
    """The flags of `train`."""
    return [word for name, value in values.items() for word in (f"--{name}", *value.split())]


def label(values: Values) -> str:
    """What the run is called."""
    return ",".join(f"{name}={value}" for name, value in values.items())
