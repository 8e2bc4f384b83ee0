"""Rows between a source and the store: what a log's columns are, and a block of their values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["uint32", "uint64", "int64", "float64", "string"]
"""What a categorical column's values are; all become unsigned numbers of the same order."""
LIKELY = 20
"""Values of the longest list of a column of which nobody said it."""


@dataclass(frozen=True)
class Column:
    """A categorical column."""

    name: str
    """For people and for per-column settings, such as C20."""
    kind: Kind = "uint32"
    most: int | None = None
    """Of a column of lists: the values that a row may have. The store has a column for each."""
    is_found: bool = False
    """Of a column of lists: whether the dataset has room for its longest one, not for `most`."""

    @property
    def likely_places(self) -> int:
        """Values of a row, or how many there may be, as far as is known before rows are read."""
        return min(self.most or 1, LIKELY) if self.is_found else self.most or 1


@dataclass(frozen=True)
class Number:
    """A numerical column that is stored as it was read, and transformed when it is written."""

    name: str
    reading: str
    """As number_readings.py has it."""
    parameters: Mapping[str, Any] | None = None
    """Of its transform, where an earlier dataset has fitted them; None: training rows will."""


@dataclass(frozen=True)
class Schema:
    """The columns of a log besides its label."""

    num_numerical: int
    categorical: tuple[Column, ...]
    numbers: tuple[Number, ...] = ()
    """The numerical columns; none where the source transforms them itself."""
    helpers: tuple[Column, ...] = ()
    """Columns by which rows are divided, named `order` and `group`: no features, but stored behind
    the categorical columns and as they are."""
    transformed: tuple[Number, ...] = ()
    """The numerical columns that the source transforms itself."""

    @cached_property
    def stored(self) -> tuple[Column, ...]:
        """The categorical columns of the store."""
        features = [column for column in self.categorical for _ in range(column.most or 1)]
        return (*features, *self.helpers)

    def places(self, feature: int) -> range:
        """Of a categorical feature: its columns among the stored ones."""
        first = sum(column.most or 1 for column in self.categorical[:feature])
        return range(first, first + (self.categorical[feature].most or 1))

    def vocabularies(self) -> list[Sequence[int]]:
        """The stored columns whose values are numbered together."""
        features = [self.places(feature) for feature in range(len(self.categorical))]
        before = len(self.stored) - len(self.helpers)
        return [*features, *([place] for place in range(before, len(self.stored)))]

    def helper(self, name: str) -> int | None:
        """The number of a helper among the stored columns; None if there is no such."""
        names = [column.name for column in self.helpers]
        before = len(self.stored) - len(self.helpers)
        return before + names.index(name) if name in names else None


@dataclass(frozen=True)
class BadRow:
    """A row that breaks the rules of its format."""

    file: str
    line: int
    """From 1: in the piece that it was parsed with, or in its file."""
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


@dataclass(frozen=True)
class Values:
    """A categorical column of numbers."""

    numbers: NDArray[Any]
    """[rows] of the column's kind. What stands in missing rows does not matter."""
    missing: NDArray[np.bool_] | None = None
    """[rows], or None where no row is missing."""
    zeros: NDArray[Any] | None = None
    """Where known: the rows that hold the number 0, rising; missing rows then hold 0 as well."""


@dataclass(frozen=True)
class NumberFacts:
    """What is known of a block's part of a numerical column."""

    missing: int
    minimum: float | None
    """None: all are missing."""
    maximum: float | None
    became_zero: int = 0
    """Numbers too small for the transform, where the source transforms them itself."""

    def __add__(self, other: "NumberFacts") -> "NumberFacts":
        ends = ([self.minimum, other.minimum], [self.maximum, other.maximum])
        lows, highs = ([end for end in of if end is not None] for of in ends)
        return NumberFacts(
            missing=self.missing + other.missing,
            minimum=min(lows, default=None),
            maximum=max(highs, default=None),
            became_zero=self.became_zero + other.became_zero,
        )


@dataclass(frozen=True)
class ParsedRows:
    """Consecutive rows, parsed."""

    labels: NDArray[np.bool_]
    """[rows]"""
    numerical: NDArray[np.floating]
    """[rows, num_numerical]: float64 as read, NaN where missing; of a source that transforms its
    numbers itself, float16 as training wants them."""
    categorical: Sequence[Any]
    """Per column `Values`, or for kind "string" an Arrow array of strings with nulls."""
    bad: Sequence[BadRow] = field(default=())
    """Rows of this block that broke the rules, whether skipped or kept."""
    other_labels: tuple[str, ...] = ()
    """Of a label that has to have two values: those that are no clicks."""
    numbers: Sequence[NumberFacts] = ()
    """Of each column of `Schema.transformed`."""
    lines: int = 0
    """Of the input, that these rows are from: blank and bad ones included."""
    kept: Any = None
    """An Arrow table of columns to carry along as they are; None where none were asked for."""

    def __len__(self) -> int:
        return len(self.labels)
