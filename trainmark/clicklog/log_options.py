"""What `prepare criteo`, `csv` and `parquet` share: their flags, and the job that these ask for."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from trainmark import files
from trainmark.clicklog import inherit, per_column, to_npy
from trainmark.clicklog.engine import phases as engine
from trainmark.clicklog.engine import summary
from trainmark.clicklog.engine.job import Job
from trainmark.clicklog.engine.limits import Limits
from trainmark.clicklog.engine.splits import LAST_DAY, SplitRule
from trainmark.clicklog.engine.summary import MANIFEST
from trainmark.clicklog.engine.vocabulary import Rules
from trainmark.clicklog.inherit import Inherited
from trainmark.clicklog.sources.recipes import Recipe
from trainmark.clicklog.sources.source import BadRows, Patterns, Source, find_days
from trainmark.errors import InputError

SplitFiles = Mapping[str, int] | None
"""Number of files of each split; None: their rows are to be divided."""
Files = Annotated[Patterns, tyro.conf.arg(metavar="FILES")]


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """Options for raw logs."""

    output: str | Path
    """Folder to write; it appears when everything is written."""

    input: Files = ()
    """Any number of files and patterns such as 'logs/day_*'; in number order."""
    train: Files = ()
    """Instead of --input: files to train on, with --test and, if wanted, --validation."""
    test: Files = ()
    """Files to test on."""
    validation: Files = ()
    """Files to validate on."""
    holdout: str = LAST_DAY
    """Rows to hold out: last-day (the last file; the last seventh of a single one), the last
    rows as a fraction of all, such as 0.1, or a random fraction (by --seed): random:0.1."""
    test_half: Literal["first", "second"] | None = None
    """Which half of the held-out rows is the test split; the other validates. Default: the
    first, or as the recipe says."""
    negative_rate: float | None = None
    """Keep this share of the training rows without a click, and all clicks; held-out rows stay
    complete. Scores of a model are corrected for it. Default: all."""

    frequency_threshold: str | None = None
    """Categorical values seen less often are rare and share an id; 0 keeps all. For single columns:
    15,C20=3. Default: 2; of Criteo's format, as the recipe says: 15 for nvidia (published: 15, 3
    and 0), else 0."""
    max_rows: str | None = None
    """Fold ids into this many per column by modulo; for single columns: 40000000,C20=1000."""
    vocabulary_from: Literal["all", "train"] | None = None
    """Count values in all rows, or in the training rows only. Default: train; of Criteo's format
    all, as published."""
    vocabulary: Path | None = None
    """A dataset prepared earlier, whose vocabularies to use instead of counting. Columns are read
    as they were there; its recipe, thresholds and --max-rows hold."""
    grow: bool = False
    """With --vocabulary: new values that occur often enough get ids behind the old ones, so that
    a model of that dataset can continue (train --from)."""
    bad_rows: BadRows = "stop"
    """Rows that break the format: stop at the first, skip them, or keep them with the bad fields
    as missing. Skipped and kept ones are listed in bad_rows.txt."""
    seed: int = 0
    """Seed of the training rows' random order, and of what else is drawn at random."""
    memory: str | None = None
    """Peak memory, such as 1G; default a quarter of the machine. Does not change the result."""
    to: Literal["split_binary", "npy"] = "split_binary"
    """npy: TorchRec's day_N_{dense,sparse,labels}.npy too, in the folder npy of the output."""

    @property
    def has_files(self) -> bool:
        return bool(self.input or self.train or self.test or self.validation)

    def old(self) -> Inherited | None:
        """The dataset of --vocabulary."""
        return inherit.open_dataset(self.vocabulary) if self.vocabulary else None


def find_files(options: LogOptions) -> tuple[list[Path], SplitFiles]:
    """The files to read, in order, and how many of them each split has, where flags say so."""
    named = {"train": options.train, "test": options.test, "validation": options.validation}
    if not any(named.values()):
        paths = find_days(options.input, options.bad_rows)
        _refuse_links(paths)
        return paths, None
    if options.input or not (options.train and options.test):
        raise InputError(
            "Give --input, whose rows are divided, or --train and --test (and --validation)."
        )
    if options.holdout != LAST_DAY or options.test_half:
        raise InputError("--holdout and --test-half divide --input, not --train and --test.")
    found = {
        name: find_days(patterns, options.bad_rows, f"--{name}")
        for name, patterns in named.items()
        if patterns
    }
    paths = [path for files in found.values() for path in files]
    twice = [path for path in paths if paths.count(path) > 1]
    if twice:
        raise InputError(f"{twice[0]} is in two of --train, --test and --validation.")
    _refuse_links(paths)
    if options.to == "npy" and "validation" not in found:
        raise InputError("--to npy needs a validation split: give --validation.")
    return paths, {name: len(files) for name, files in found.items()}


def _refuse_links(paths: Sequence[Path]) -> None:
    """Rows that were read twice would be trained on and held out."""
    first: dict[str, Path] = {}
    for path in paths:
        other = first.setdefault(os.path.realpath(str(path)), path)
        if other != path:
            raise InputError(f"{path} is the same file as {other}: give one of them.")


def make_job(
    options: LogOptions,
    source: Source,
    recipe: Recipe,
    old: Inherited | None,
    of_splits: SplitFiles,
    by: str | None = None,
    group: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Job:
    """What the options ask of an engine.

    Args:
        recipe: unless an earlier dataset, `old`, has one.
        of_splits: what `find_files` said.
        by, group: columns, see `SplitRule`.
    """
    if of_splits and by:
        raise InputError(f"--split-by {by} divides --input, not --train and --test.")
    names = [column.name for column in source.schema.categorical]
    flags = (options.frequency_threshold, options.max_rows)
    return Job(
        source=source,
        output=Path(options.output),
        rules=old.rules(names, *flags) if old else _rules(recipe, names, *flags),
        split=SplitRule(
            holdout=options.holdout,
            test_half=options.test_half or recipe.test_half,
            rounds_up=recipe.rounds_up,
            files=of_splits,
            by=by,
            group=group,
            negative_rate=options.negative_rate,
        ),
        seed=options.seed,
        vocabulary_from=options.vocabulary_from or recipe.vocabulary_from,
        vocabulary=old.vocabularies if old else None,
        grow=options.grow,
        metadata=metadata or {},
    )


def _rules(
    recipe: Recipe, names: list[str], frequency_threshold: str | None, max_rows: str | None
) -> list[Rules]:
    flag = "--frequency-threshold"
    thresholds = per_column.parse(frequency_threshold, flag, len(names), 0, names)
    caps = per_column.parse(max_rows, "--max-rows", len(names), 1, names)
    return [
        Rules(
            recipe=recipe,
            threshold=recipe.threshold if threshold is None else threshold,
            max_rows=cap,
        )
        for threshold, cap in zip(thresholds, caps, strict=True)
    ]


def prepare(options: LogOptions, job: Job) -> dict[str, float]:
    """Write the dataset, unless the folder already holds it; seconds of each phase."""
    check = to_npy.check_halves if options.to == "npy" else None
    seconds = engine.prepare(job, Limits.of(options.memory), check)
    summary.show(job.output, files.read_json(job.output / MANIFEST))
    if options.to == "npy":
        to_npy.write(job.output, days=max(len(job.source.files), 2))
    return seconds
