"""Raw files as a dataset for a model: by the vocabularies and all settings of what it learned from.

`evaluate RUN --input FILES` and `predict` encode their files so.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainmark.clicklog import inherit
from trainmark.clicklog.engine import phases as engine
from trainmark.clicklog.engine.job import Job
from trainmark.clicklog.engine.limits import Limits
from trainmark.clicklog.engine.splits import SplitRule
from trainmark.clicklog.inherit import Inherited
from trainmark.clicklog.sources.column_match import AskedColumns, names_column
from trainmark.clicklog.sources.source import BadRows, Patterns, Source, find_days

if TYPE_CHECKING:  # pyarrow, which `--help` need not wait for
    from trainmark.clicklog.sources.csv_source import CsvSource
    from trainmark.clicklog.sources.parquet_source import ParquetSource

PARQUET = (".parquet", ".pq")


def encode(
    files: Patterns,
    dataset: Path,
    output: Path,
    *,
    bad_rows: BadRows = "stop",
    memory: str | None = None,
    labelled: bool = True,
    keep: tuple[str, ...] = (),
) -> Path:
    """Write `output`: all rows of the files, in input order, as the split `test`.

    It is equal to `dataset` for `clickdata.identity`; its split `train` is empty. How many rows
    have the id of rare values is in its prepare.json. It has groups (group.bin) where the dataset
    has them and the files have their column.

    Args:
        files: paths or patterns, of the dataset's own format; Parquet files have any CSV columns.
        dataset: what the model was trained on.
        output: a folder to write; nothing is done where it holds these rows already.
        bad_rows, memory: as in `trainmark prepare`.
        labelled: False: labels are not read, and all are 0; files need not have any.
        keep: columns to carry along into the folder's `kept.parquet`, in the same order.
    """
    old = inherit.open_dataset(dataset)
    paths = find_days(files, bad_rows)
    source, group = _open(old, paths, bad_rows, labelled, keep)
    job = Job(
        source=source,
        output=output,
        rules=old.rules([column.name for column in source.schema.categorical]),
        split=SplitRule(files={"train": 0, "test": len(paths)}, group=group),
        vocabulary=old.vocabularies,
    )
    engine.prepare(job, Limits.of(memory))
    return output


def _open(
    old: Inherited, paths: list[Path], bad_rows: BadRows, labelled: bool, keep: tuple[str, ...]
) -> tuple[Source, str | None]:
    """The rows of the files, read as the dataset's were; and what they are grouped by."""
    if old.is_criteo:
        from trainmark.clicklog.sources.criteo_text import CriteoSource

        return CriteoSource(paths, old.recipe, bad_rows, labelled=labelled, keep=keep), None
    columns = old.columns() if labelled else replace(old.columns(), label=None)
    asked = AskedColumns(old=columns, keep=keep)
    source = _open_columns(old, paths, asked, bad_rows)
    group = old.settings.get("group")
    if not labelled or group is None or not names_column(group, source.names):
        return source, None
    return _open_columns(old, paths, replace(asked, group=group), bad_rows), group


def _open_columns(
    old: Inherited, paths: list[Path], asked: AskedColumns, bad_rows: BadRows
) -> "CsvSource | ParquetSource":
    if all(path.suffix in PARQUET for path in paths):
        from trainmark.clicklog.sources.parquet_source import ParquetSource

        return ParquetSource(paths, asked, bad_rows=bad_rows)
    from trainmark.clicklog.sources.csv_header import delimiter_of
    from trainmark.clicklog.sources.csv_source import CsvSource

    return CsvSource(
        paths,
        asked,
        # Columns are found by their names, so that what divides these is no guess.
        delimiter=delimiter_of(paths, old.delimiter) if old.header else old.delimiter,
        header=old.header,
        missing=old.missing(),
        bad_rows=bad_rows,
    )
