"""Which rows train, which test, which validate.

Rows have an order: that of the input, or by a column, or at random (division.py). A split is a
range of places in it: training rows first, then those held out, which are halved.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from trainmark.clicklog.engine.store import BlockRecord
from trainmark.errors import InputError

DAYS_IN_SINGLE_FILE = 7
LAST_DAY = "last-day"
RANDOM = "random"


class RowSet(Protocol):
    """Some of the rows of a store: those of a split, or of all."""

    @property
    def name(self) -> str: ...

    @property
    def rows(self) -> int:
        """How many."""

    def has_all(self, block: BlockRecord) -> bool: ...

    def has_none(self, block: BlockRecord) -> bool: ...

    def mask(self, block: BlockRecord) -> NDArray[np.bool_]:
        """Which of a block's rows, in input order."""


@dataclass(frozen=True)
class Split:
    """Consecutive rows in input order."""

    name: str
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start

    def has_all(self, block: BlockRecord) -> bool:
        return self.start <= block.first_row and block.first_row + block.rows <= self.stop

    def has_none(self, block: BlockRecord) -> bool:
        return self.stop <= block.first_row or block.first_row + block.rows <= self.start

    def mask(self, block: BlockRecord) -> NDArray[np.bool_]:
        rows = np.arange(block.first_row, block.first_row + block.rows)
        return (self.start <= rows) & (rows < self.stop)


@dataclass(frozen=True, kw_only=True)
class SplitRule:
    """How rows are divided. Training rows come first; the others are halved."""

    holdout: str = LAST_DAY
    """`last-day` (the last file; the last seventh of a single one), a fraction of all rows (the
    last ones), or `random:` and a fraction; `random` alone: a seventh."""
    test_half: Literal["first", "second"] = "first"
    rounds_up: bool = False
    """Whether the first half of an odd number is the larger one."""
    files: Mapping[str, int] | None = None
    """Instead of a holdout: how many files each split has, in the order of the input."""
    by: str | None = None
    """The column that the rows are ordered by; None: as in the input."""
    group: str | None = None
    """The column whose groups are written, and stay together where rows are drawn at random."""
    negative_rate: float | None = None
    """The share of the training rows without a click that are kept; None: all."""

    def __post_init__(self) -> None:
        self._fraction()  # which checks it
        if self.by and self.is_random:
            raise InputError(
                f"--split-by {self.by} orders the rows, and --holdout {self.holdout} draws them at "
                "random. Give one of the two."
            )
        if self.negative_rate is not None and not 0 < self.negative_rate <= 1:
            raise InputError(
                f"--negative-rate is {self.negative_rate:g}; a share above 0 and up to 1 is "
                "expected."
            )

    @property
    def is_random(self) -> bool:
        return self.files is None and self.holdout.partition(":")[0] == RANDOM

    @property
    def in_ranges(self) -> bool:
        """Whether splits are ranges of the input's rows."""
        return not self.by and not self.is_random and self.negative_rate is None

    def _fraction(self) -> float | None:
        text = self.holdout
        if self.is_random:
            text = text.removeprefix(RANDOM).removeprefix(":")
        if text in (LAST_DAY, ""):
            return None
        try:
            fraction = float(text)
        except ValueError:
            fraction = -1.0
        if not 0 < fraction < 1:
            raise InputError(
                f"--holdout is {self.holdout!r}; {LAST_DAY!r} or a fraction of the rows between "
                "0 and 1, such as 0.1, is expected; random:0.1 takes them at random."
            )
        return fraction

    def train_rows(self, rows_per_file: Sequence[int]) -> int:
        """How many rows train."""
        rows = sum(rows_per_file)
        fraction, hint = self._fraction(), ""
        if fraction is not None:
            held_out = int(rows * fraction)
        elif len(rows_per_file) == 1 or self.by or self.is_random:
            held_out = rows // DAYS_IN_SINGLE_FILE
        else:
            held_out = rows_per_file[-1]
            hint = " Those of the last file are held out; --holdout 0.1 takes a tenth of all."
        train = rows - held_out
        if not train or held_out < 2:
            raise InputError(
                f"The input has {train} rows to train on and {held_out} held out; "
                f"at least 1 and 2 are needed.{hint}"
            )
        return train

    def middle(self, train: int, rows: int) -> int:
        """Where the first half of the rows that are held out ends."""
        return train + (rows - train + self.rounds_up) // 2

    def names(self) -> list[str]:
        """Of the splits, in the order of their rows."""
        if self.files is not None:
            return list(self.files)
        halves = ["test", "validation"]
        return ["train", *(halves if self.test_half == "first" else reversed(halves))]

    def apply(self, rows_per_file: Sequence[int]) -> list[Split]:
        """Train, test and validation, as ranges of places in the rows' order."""
        rows = sum(rows_per_file)
        if self.files is not None:
            ends = list(accumulate(rows_per_file, initial=0))
            bounds = [ends[number] for number in accumulate(self.files.values(), initial=0)]
        else:
            train = self.train_rows(rows_per_file)
            bounds = [0, train, self.middle(train, rows), rows]
        spans = zip(self.names(), pairwise(bounds), strict=True)
        splits = [Split(name, *span) for name, span in spans]
        for split in splits:
            if self.files and self.files[split.name] and not split.rows:
                flag = f"--{split.name}" if self.files["train"] else "--input"  # of `encode`
                raise InputError(f"The files of {flag} have no rows.")
        return sorted(splits, key=lambda split: ("train", "test", "validation").index(split.name))

    def settings(self) -> dict[str, Any]:
        """For prepare.json."""
        if self.files is not None:
            parts: dict[str, Any] = {"files": dict(self.files)}
        else:
            parts = {"holdout": self.holdout, "test_half": self.test_half}
        extras = {"split_by": self.by, "group": self.group, "negative_rate": self.negative_rate}
        return parts | {key: value for key, value in extras.items() if value is not None}
