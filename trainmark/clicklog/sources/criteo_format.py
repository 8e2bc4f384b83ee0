"""Criteo's text format: 40 tab-separated fields a line, no header, empty where a value is missing.

Field 0 is the label (0 or 1), 1 to 13 are integers of at most 64 bits, 14 to 39 are up to 8
hexadecimal digits. Lines end with LF or CR LF; the last one need not.

`parse_line` takes one line and says what is wrong with it. The fast parsers (criteo_kernel.py,
criteo_arrow.py) take a whole piece, and leave to it the lines that they do not accept.
"""

import re
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trainmark.clicklog.sources.recipes import Recipe

NUM_NUMERICAL, NUM_CATEGORICAL = 13, 26
NAMES = tuple(f"C{number}" for number in range(1, NUM_CATEGORICAL + 1))
FIELDS = [
    "label",
    *(f"integer {i}" for i in range(1, NUM_NUMERICAL + 1)),
    *(f"categorical {i}" for i in range(1, NUM_CATEGORICAL + 1)),
]


@dataclass
class Line:
    """A line, field by field; wrong fields count as missing."""

    label: int | None = None
    numerical: list[int] = field(default_factory=list)
    """Bits of float16."""
    integers: list[int | None] = field(default_factory=list)
    """The same as they are in the text."""
    categorical: list[int | None] = field(default_factory=list)
    problem: str | None = None
    """The first thing that is wrong."""


def parse_line(line: bytes, recipe: Recipe) -> Line:
    """Check every field of a line; integers are transformed by `recipe`."""
    fields = line.removesuffix(b"\r").split(b"\t")
    row = Line()
    if len(fields) != len(FIELDS):
        row.problem = f"{len(fields)} tab-separated fields, expected {len(FIELDS)}"
        if len(fields) == 1 and (b"," in line or b";" in line):
            row.problem += " (`trainmark prepare csv` reads CSV files)"
    fields = (fields + [b""] * len(FIELDS))[: len(FIELDS)]
    if fields[0] in (b"0", b"1"):
        row.label = int(fields[0])
    else:
        row.problem = row.problem or f"label {_show(fields[0])}, expected 0 or 1"
    for name, text in zip(FIELDS[1:], fields[1:], strict=True):
        if name.startswith("integer"):
            number = integer(text)
            expected = "a whole number of at most 64 bits or nothing"
            row.numerical.append(_bits(number, recipe))
            row.integers.append(number)
        else:
            number = hexadecimal(text)
            expected = "up to 8 hexadecimal digits or nothing"
            row.categorical.append(number)
        if number is None and text:
            row.problem = row.problem or f"{name} is {_show(text)}, expected {expected}"
    return row


def _bits(number: int | None, recipe: Recipe) -> int:
    if number is None:
        return int(missing_bits(recipe))
    return int(transformed_bits(np.array([number]), recipe)[0])


def transformed_bits(numbers: NDArray[np.int64], recipe: Recipe) -> NDArray[np.uint16]:
    """Integers as the recipe transforms them: the bits of float16."""
    return recipe.transform(numbers).astype(np.float16).view(np.uint16)


def missing_bits(recipe: Recipe) -> np.uint16:
    return np.float16(recipe.missing_number).view(np.uint16)


def integer(text: bytes) -> int | None:
    if not re.fullmatch(rb"-?0*[0-9]{1,19}", text) or not -(2**63) <= int(text) < 2**63:
        return None
    return int(text)


def hexadecimal(text: bytes) -> int | None:
    return int(text, 16) if re.fullmatch(rb"[0-9a-fA-F]{1,8}", text) else None


def _show(text: bytes) -> str:
    return repr(text[:40].decode(errors="replace"))
