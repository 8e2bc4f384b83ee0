"""Which rows train, which test, which validate: ranges of row numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

from trainmark.errors import InputError

DAYS_IN_SINGLE_FILE = 7
LAST_DAY = "last-day"


@dataclass(frozen=True)
class Split:
    """Consecutive rows in input order."""

    name: str
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class SplitRule:
    """How rows are divided. Training rows come first; the others are halved."""

    holdout: str = LAST_DAY
    """`last-day` (the last file; the last seventh of a single one), or a fraction of all rows."""
    test_half: Literal["first", "second"] = "first"
    rounds_up: bool = False
    """Whether the first half of an odd number is the larger one."""
    files: Mapping[str, int] | None = None
    """Instead of a holdout: how many files each split has, in the order of the input."""

    def __post_init__(self) -> None:
        self._fraction()  # which checks it

    def _fraction(self) -> float | None:
        if self.holdout == LAST_DAY:
            return None
        try:
            fraction = float(self.holdout)
        except ValueError:
            fraction = -1.0
        if not 0 < fraction < 1:
            raise InputError(
                f"--holdout is {self.holdout!r}; {LAST_DAY!r} or a fraction of the rows between "
                "0 and 1, such as 0.1, is expected."
            )
        return fraction

    def apply(self, rows_per_file: Sequence[int]) -> list[Split]:
        """Train, test and validation."""
        if self.files is not None:
            return self._of_files(self.files, rows_per_file)
        rows = sum(rows_per_file)
        fraction = self._fraction()
        if fraction is not None:
            held_out = int(rows * fraction)
        elif len(rows_per_file) == 1:
            held_out = rows // DAYS_IN_SINGLE_FILE
        else:
            held_out = rows_per_file[-1]
        train = rows - held_out
        if not train or held_out < 2:
            raise InputError(
                f"The input has {train} rows to train on and {held_out} in its last day; "
                "at least 1 and 2 are needed."
            )
        middle = train + (held_out + self.rounds_up) // 2
        halves = [(train, middle), (middle, rows)]
        if self.test_half == "second":
            halves.reverse()
        test, validation = halves
        return [Split("train", 0, train), Split("test", *test), Split("validation", *validation)]

    @staticmethod
    def _of_files(files: Mapping[str, int], rows_per_file: Sequence[int]) -> list[Split]:
        ends = list(accumulate(rows_per_file, initial=0))
        bounds = [ends[number] for number in accumulate(files.values(), initial=0)]
        splits = [Split(name, *span) for name, span in zip(files, pairwise(bounds), strict=True)]
        for split in splits:
            if files[split.name] and not split.rows:
                raise InputError(f"The files of --{split.name} have no rows.")
        return splits

    def settings(self) -> dict[str, Any]:
        """For prepare.json."""
        if self.files is not None:
            return {"files": dict(self.files)}
        return {"holdout": self.holdout, "test_half": self.test_half}
