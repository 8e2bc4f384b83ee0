"""The flags of `prepare` that say which rows train, test and validate."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from trainmark.clicklog.engine.splits import LAST_DAY, SplitRule
from trainmark.clicklog.sources.source import BadRows, Patterns, find_days
from trainmark.errors import InputError

SplitFiles = Mapping[str, int] | None
"""Number of files of each split; None: their rows are to be divided."""
Files = Annotated[Patterns, tyro.conf.arg(metavar="FILES")]


@dataclass(frozen=True, kw_only=True)
class SplitOptions:
    """Files, and how their rows are divided."""

    input: Files = ()
    """Any number of files and patterns such as 'logs/day_*'; in number order."""
    train: Files = ()
    """Instead of --input: files to train on, with --test and, if wanted, --validation."""
    test: Files = ()
    """Files to test on."""
    validation: Files = ()
    """Files to validate on."""
    holdout: str = LAST_DAY
    """What is not for training: last-day (the last file; the last seventh of a single one), the
    last rows as a fraction of all, such as 0.1, or a fraction at random (by --seed): random:0.1."""
    test_half: Literal["first", "second"] | None = None
    """Which half of that is the test split; the other one validates. Default: the first, or as
    the recipe says."""
    negative_rate: float | None = None
    """Keep this share of the training rows that are no clicks, and all clicks; held-out rows stay
    as they are. Scores of a model are corrected for it. Default: all."""

    @property
    def has_files(self) -> bool:
        return bool(self.input or self.train or self.test or self.validation)


def find_files(options: SplitOptions, bad_rows: BadRows) -> tuple[list[Path], SplitFiles]:
    """The files to read, in order, and how many of them each split has, where flags say so."""
    named = {"train": options.train, "test": options.test, "validation": options.validation}
    if not any(named.values()):
        return find_days(options.input, bad_rows), None
    if options.input or not (options.train and options.test):
        raise InputError(
            "Give --input, whose rows are divided, or --train and --test (and --validation)."
        )
    if options.holdout != LAST_DAY or options.test_half:
        raise InputError("--holdout and --test-half divide --input, not --train and --test.")
    found = {
        name: find_days(patterns, bad_rows, f"--{name}")
        for name, patterns in named.items()
        if patterns
    }
    paths = [path for files in found.values() for path in files]
    twice = [path for path in paths if paths.count(path) > 1]
    if twice:
        raise InputError(f"{twice[0]} is in two of --train, --test and --validation.")
    return paths, {name: len(files) for name, files in found.items()}


def split_rule(
    options: SplitOptions,
    files: SplitFiles,
    *,
    test_half: Literal["first", "second"] = "first",
    rounds_up: bool = False,
    by: str | None = None,
    group: str | None = None,
) -> SplitRule:
    """How the rows of the files are divided.

    Args:
        files: what `find_files` said.
        test_half, rounds_up: unless flags say it otherwise.
        by, group: columns, see `SplitRule`.
    """
    if files and by:
        raise InputError(f"--split-by {by} divides --input, not --train and --test.")
    return SplitRule(
        holdout=options.holdout,
        test_half=options.test_half or test_half,
        rounds_up=rounds_up,
        files=files,
        by=by,
        group=group,
        negative_rate=options.negative_rate,
    )
