"""What `prepare csv` and `prepare parquet` share: their options, and the job that they make."""

from collections.abc import Callable, Sequence
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
from trainmark.clicklog.sources.recipes import RECIPES
from trainmark.clicklog.sources.source import BadRows, Patterns, Source, find_days
from trainmark.errors import InputError

# Ids by falling count, 0 for what is rare or missing. Numbers are as --columns says.
RECIPE = RECIPES["nvidia"]


@dataclass(frozen=True, kw_only=True)
class TabularOptions:
    """Options for data of any columns."""

    output: Path
    """Folder to write; it appears when everything is written."""
    spec: Path | None = None
    """A feature_spec.yaml that describes data with ids in splits, to be brought into another form.
    Instead of --input and --columns."""
    input: Annotated[Patterns, tyro.conf.arg(metavar="FILES")] = ()
    """Any number of files and patterns such as 'logs/*.csv'; in number order. With --columns."""
    columns: str | None = None
    """What the columns are: 'label=clicked numerical=age,price:log categorical=user,city
    timestamp=seen_at'. See docs/data.md. Default with --vocabulary: as in that dataset."""
    numerical: str | None = None
    """How to read the numbers of which --columns does not say it: auto (the default: by their
    training rows), plain, log, signed_log, standard, standard_log, quantile, bins, or several,
    such as standard+bins+missing."""
    frequency_threshold: str | None = None
    """Categorical values seen less often share id 0; 0, the default, keeps all. For single columns:
    15,user=3."""
    max_rows: str | None = None
    """Fold ids into this many per column by modulo; for single columns: 100000,user=1000."""
    holdout: str = LAST_DAY
    """What is not for training: last-day (the last file; the last seventh of a single one), or
    the last rows as a fraction of all, such as 0.1."""
    test_half: Literal["first", "second"] = "first"
    """Which half of that is the test split; the other one validates."""
    vocabulary_from: Literal["all", "train"] = "all"
    """Count values in all rows, or in the training rows only."""
    vocabulary: Path | None = None
    """A dataset prepared earlier, whose vocabularies to use instead of counting. Its columns are
    found by name, and read as they were; its thresholds and --max-rows hold."""
    grow: bool = False
    """With --vocabulary: values that it does not know, and that occur often enough, get ids behind
    the old ones, so that a model can learn on from it (train --from)."""
    bad_rows: BadRows = "stop"
    """Rows that break the description: stop at the first, skip them, or keep them with the bad
    fields as missing. Skipped and kept ones are listed in bad_rows.txt."""
    seed: int = 0
    """Seed of the training rows' random order."""
    memory: str | None = None
    """Peak memory, such as 1G; default a quarter of the machine. Does not change the result."""
    to: Literal["split_binary", "npy"] = "split_binary"
    """npy: TorchRec's day_N_{dense,sparse,labels}.npy too, in the folder npy of the output."""


def prepare(
    options: TabularOptions,
    kind: str,
    open_source: Callable[[list[Path], Inherited | None], Source],
    **reading: Any,
) -> None:
    """Write the dataset, unless the folder already holds it.

    Args:
        kind: of the files of --spec; `reading`: how to read them.
        open_source: the rows of files; columns as in an earlier dataset, where one is given.
    """
    if options.spec is not None:
        if options.input or options.columns is not None:
            raise InputError("--spec says where the data are; --input and --columns go without it.")
        if options.to == "npy":
            raise InputError("--to npy needs a validation split, which data of --spec lack.")
        from trainmark.clicklog import transcode  # pyarrow, which `--help` need not wait for

        manifest = transcode.prepare(options.spec, options.output, kind, **reading)
        summary.show_splits(options.output, manifest)
        return
    if not options.input or (options.columns is None and options.vocabulary is None):
        raise InputError("Give --input with --columns, or --spec.")
    old = inherit.open_dataset(options.vocabulary) if options.vocabulary else None
    if old is not None and options.numerical is not None:
        raise InputError(
            f"--numerical is {options.numerical}, but numbers are read as in {old.name}. Leave "
            "the flag out."
        )
    source = open_source(find_days(options.input, options.bad_rows), old)
    engine.prepare(make_job(options, source, old), Limits.of(options.memory))
    summary.show(options.output, files.read_json(options.output / MANIFEST))
    if options.to == "npy":
        to_npy.write(options.output, days=max(len(source.files), 2))


def make_job(options: TabularOptions, source: Source, old: Inherited | None = None) -> Job:
    """What the options ask of the engine."""
    names = [column.name for column in source.schema.categorical]
    flags = (options.frequency_threshold, options.max_rows)
    return Job(
        source=source,
        output=options.output,
        rules=_rules(names, *flags) if old is None else old.rules(names, *flags),
        split=SplitRule(holdout=options.holdout, test_half=options.test_half),
        seed=options.seed,
        bad_rows=options.bad_rows,
        vocabulary_from=options.vocabulary_from,
        vocabulary=old.vocabularies if old else None,
        grow=options.grow,
    )


def _rules(
    names: Sequence[str], frequency_threshold: str | None, max_rows: str | None
) -> list[Rules]:
    thresholds = per_column.parse(
        frequency_threshold, "--frequency-threshold", len(names), 0, names
    )
    caps = per_column.parse(max_rows, "--max-rows", len(names), 1, names)
    return [
        Rules(recipe=RECIPE, threshold=threshold or 0, max_rows=cap)
        for threshold, cap in zip(thresholds, caps, strict=True)
    ]
