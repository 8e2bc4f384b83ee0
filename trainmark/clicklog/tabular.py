"""What `prepare csv` and `prepare parquet` share: their options, and the job that they make."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from trainmark import files
from trainmark.clicklog import inherit, per_column, split_options, to_npy
from trainmark.clicklog.engine import phases as engine
from trainmark.clicklog.engine import summary
from trainmark.clicklog.engine.job import Job
from trainmark.clicklog.engine.limits import Limits
from trainmark.clicklog.engine.summary import MANIFEST
from trainmark.clicklog.engine.vocabulary import Rules
from trainmark.clicklog.inherit import Inherited
from trainmark.clicklog.sources.recipes import RECIPES
from trainmark.clicklog.sources.row_columns import RowColumns
from trainmark.clicklog.sources.source import BadRows, Source
from trainmark.clicklog.split_options import SplitFiles, SplitOptions
from trainmark.errors import InputError, raise_all

# Ids by falling count, 0 for what is rare. Numbers are as --columns says.
RECIPE = RECIPES["tabular"]
WITH_SPEC = ("output", "spec", "to", "memory", "seed", "delimiter", "header")
"""Options that data of --spec may have."""
FREQUENCY_THRESHOLD = 2
"""By default. A value of one row teaches nothing that another could use; what such values teach
together is given to later ones that nobody has seen yet. Values of a few rows must stay: a user's
few clicks say much."""


@dataclass(frozen=True, kw_only=True)
class TabularOptions(SplitOptions):
    """Options for data of any columns."""

    output: Path
    """Folder to write; it appears when everything is written."""
    spec: Path | None = None
    """A feature_spec.yaml that describes data with ids in splits, to be brought into another form.
    Instead of --input and --columns."""
    columns: str | None = None
    """What the columns are: 'label=clicked numerical=age,price:log categorical=user,city
    timestamp=seen_at'. See docs/data.md. Default with --vocabulary: as in that dataset."""
    numerical: str | None = None
    """How to read the numbers of which --columns does not say it: auto (the default: by their
    training rows), plain, log, signed_log, standard, standard_log, quantile, bins, or several,
    such as standard+bins+missing."""
    frequency_threshold: str | None = None
    """Categorical values seen less often share id 0 (default 2); 0 keeps all. For single columns:
    15,user=3."""
    max_rows: str | None = None
    """Fold ids into this many per column by modulo; for single columns: 100000,user=1000."""
    split_by: str | None = None
    """The column that rows are ordered by, such as a time, before the last ones are held out: by
    --holdout, or a seventh. It need not be in --columns. day:number reads numbers that are text."""
    group: str | None = None
    """A column, such as a user, whose rows belong together: --holdout random keeps them so, and
    evaluations can tell them apart (group.bin). It need not be in --columns."""
    positive: str | None = None
    """The value of the label that is a click, where it has two others than 0 and 1: '>50K'."""
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
    """Seed of the training rows' random order, and of what else is drawn at random."""
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
        if options.to == "npy":
            raise InputError("--to npy needs a validation split, which data of --spec lack.")
        raise_all(_not_with_spec(options))
        from trainmark.clicklog import transcode  # pyarrow, which `--help` need not wait for

        manifest = transcode.prepare(options.spec, options.output, kind, **reading)
        summary.show_splits(options.output, manifest)
        return
    if not options.has_files:
        raise InputError("Give --input with --columns, or --spec.")
    old = inherit.open_dataset(options.vocabulary) if options.vocabulary else None
    if old is not None and options.numerical is not None:
        raise InputError(
            f"--numerical is {options.numerical}, but numbers are read as in {old.name}. Leave "
            "the flag out."
        )
    paths, of_splits = split_options.find_files(options, options.bad_rows)
    if options.to == "npy" and of_splits and "validation" not in of_splits:
        raise InputError("--to npy needs a validation split: give --validation.")
    source = open_source(paths, old)
    if options.to == "npy" and (of_lists := [c.name for c in source.schema.categorical if c.most]):
        raise InputError(
            "--to npy: TorchRec's files have equally many ids of a feature in every row, and none "
            f"that stands for no id; lists may differ. Received a column of lists: {of_lists[0]}. "
            "Leave --to npy out, or the column."
        )
    check = to_npy.check_halves if options.to == "npy" else None
    engine.prepare(make_job(options, source, old, of_splits), Limits.of(options.memory), check)
    summary.show(options.output, files.read_json(options.output / MANIFEST))
    if options.to == "npy":
        to_npy.write(options.output, days=max(len(source.files), 2))


def _not_with_spec(options: TabularOptions) -> Iterator[str]:
    """Flags that say something of the data that --spec says already."""
    for field in fields(options):
        if field.name in WITH_SPEC or field.default is MISSING:
            continue
        if getattr(options, field.name) != field.default:
            flag = field.name.replace("_", "-")
            yield f"--spec says what the data are and where; --{flag} goes without it."


def row_columns(options: TabularOptions) -> RowColumns:
    """What the options ask of the columns besides features."""
    return RowColumns(options.positive, options.split_by, options.group)


def make_job(
    options: TabularOptions,
    source: Source,
    old: Inherited | None = None,
    of_splits: SplitFiles = None,
) -> Job:
    """What the options ask of the engine."""
    names = [column.name for column in source.schema.categorical]
    flags = (options.frequency_threshold, options.max_rows)
    return Job(
        source=source,
        output=options.output,
        rules=_rules(names, *flags) if old is None else old.rules(names, *flags),
        split=split_options.split_rule(
            options, of_splits, by=options.split_by, group=options.group
        ),
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
        Rules(
            recipe=RECIPE,
            threshold=FREQUENCY_THRESHOLD if threshold is None else threshold,
            max_rows=cap,
        )
        for threshold, cap in zip(thresholds, caps, strict=True)
    ]
