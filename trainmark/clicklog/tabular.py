"""What `prepare csv` and `prepare parquet` share: their options, and the job that they make."""

from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from trainmark.clicklog import log_options
from trainmark.clicklog.engine import summary
from trainmark.clicklog.inherit import Inherited
from trainmark.clicklog.log_options import LogOptions
from trainmark.clicklog.sources import number_readings
from trainmark.clicklog.sources.column_match import AskedColumns
from trainmark.clicklog.sources.recipes import RECIPES
from trainmark.clicklog.sources.source import Source
from trainmark.errors import InputError, raise_all

WITH_SPEC = ("output", "spec", "to", "memory", "seed", "delimiter", "header")
"""Options that data of --spec may have."""
RECIPE = RECIPES["tabular"]


@dataclass(frozen=True, kw_only=True)
class TabularOptions(LogOptions):
    """Options for data of any columns."""

    spec: Path | None = None
    """A feature_spec.yaml that describes data that have ids and splits already. Instead of
    --input and --columns."""
    columns: str | None = None
    """What the columns are: 'label=clicked numerical=age,price:log categorical=user,city
    timestamp=seen_at'. See docs/data.md. Default with --vocabulary: as in that dataset."""
    numerical: str | None = None
    """How to read numerical columns for which --columns does not say: auto (the default, by
    their training rows), plain, log, signed_log, standard, standard_log, quantile, bins, or
    several, such as standard+bins+missing."""
    split_by: str | None = None
    """The column that rows are ordered by, such as a time, before the last ones are held out: by
    --holdout, or a seventh. It need not be in --columns. day:number reads numbers that are text."""
    group: str | None = None
    """A column, such as a user, whose rows belong together: --holdout random keeps them so, and
    evaluations can tell them apart (group.bin). It need not be in --columns."""
    positive: str | None = None
    """The value of the label that is a click, if its values are not 0 and 1: '>50K'."""


def prepare(
    options: TabularOptions,
    kind: str,
    open_source: Callable[[Inherited | None, list[Path], AskedColumns], Source],
    **reading: Any,
) -> None:
    """Write the dataset, unless the folder already holds it.

    Args:
        kind: of the files of --spec; `reading`: how to read them.
        open_source: the rows of files, which may be read as those of an earlier dataset.
    """
    if options.spec is not None:
        if options.to == "npy":
            raise InputError("--to npy needs a validation split, which data of --spec lack.")
        raise_all(_not_with_spec(options))
        from trainmark.clicklog import transcode  # pyarrow, which `--help` need not wait for

        output = Path(options.output)
        manifest = transcode.prepare(options.spec, output, kind, **reading)
        summary.show_splits(output, manifest)
        return
    if not options.has_files:
        raise InputError("Give --input with --columns, or --spec.")
    old = options.old()
    if old is not None and options.numerical is not None:
        raise InputError(
            f"--numerical is {options.numerical}, but numbers are read as in {old.name}. Leave "
            "the flag out."
        )
    paths, of_splits = log_options.find_files(options)
    asked = AskedColumns(
        text=options.columns,
        numerical=number_readings.check_default(options.numerical or number_readings.AUTO),
        old=old.columns() if old else None,
        positive=options.positive,
        split_by=options.split_by,
        group=options.group,
    )
    source = open_source(old, paths, asked)
    if options.to == "npy" and (of_lists := [c.name for c in source.schema.categorical if c.most]):
        raise InputError(
            "--to npy: TorchRec's files have equally many ids of a feature in every row, and none "
            f"that stands for no id; lists may differ. Received a column of lists: {of_lists[0]}. "
            "Leave --to npy out, or the column."
        )
    rows_by = (options.split_by, options.group)
    job = log_options.make_job(options, source, RECIPE, old, of_splits, *rows_by)
    log_options.prepare(options, job)


def _not_with_spec(options: TabularOptions) -> Iterator[str]:
    """Flags that say something of the data that --spec says already."""
    for field in fields(options):
        if field.name in WITH_SPEC or field.default is MISSING:
            continue
        if getattr(options, field.name) != field.default:
            flag = field.name.replace("_", "-")
            yield f"--spec says what the data are and where; --{flag} goes without it."
