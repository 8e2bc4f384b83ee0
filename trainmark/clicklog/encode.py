"""Raw files as a dataset for a model: by the vocabularies and all settings of what it learned from.

`evaluate RUN --input FILES` encodes its files so; whatever else scores raw files does, too.
"""

from pathlib import Path

from trainmark.clicklog import inherit
from trainmark.clicklog.engine import phases as engine
from trainmark.clicklog.engine.job import Job
from trainmark.clicklog.engine.limits import Limits
from trainmark.clicklog.engine.splits import SplitRule
from trainmark.clicklog.inherit import Inherited
from trainmark.clicklog.sources.source import BadRows, Patterns, Source, find_days

PARQUET = (".parquet", ".pq")


def encode(
    files: Patterns,
    dataset: Path,
    output: Path,
    *,
    bad_rows: BadRows = "stop",
    memory: str | None = None,
) -> Path:
    """Write `output`: all rows of the files, in input order, as the split `test`.

    It is equal to `dataset` for `clickdata.identity`; its split `train` is empty. How many rows
    have the id of rare values is in its prepare.json.

    Args:
        files: paths or patterns, of the dataset's own format; Parquet files have any CSV columns.
        dataset: what the model was trained on.
        output: a folder to write; nothing is done where it holds these rows already.
        bad_rows, memory: as in `trainmark prepare`.
    """
    old = inherit.open_dataset(dataset)
    paths = find_days(files, bad_rows)
    source = _open(old, paths, bad_rows)
    names = [column.name for column in source.schema.categorical]
    job = Job(
        source=source,
        output=output,
        rules=old.rules(names),
        split=SplitRule(files={"train": 0, "test": len(paths)}),
        bad_rows=bad_rows,
        vocabulary=old.vocabularies,
    )
    engine.prepare(job, Limits.of(memory))
    return output


def _open(old: Inherited, paths: list[Path], bad_rows: BadRows) -> Source:
    """The rows of the files, read as the dataset's were."""
    if old.is_criteo:
        from trainmark.clicklog.sources.criteo_text import CriteoSource

        return CriteoSource(paths, old.recipe, bad_rows)
    if all(path.suffix in PARQUET for path in paths):
        from trainmark.clicklog.sources.parquet_source import ParquetSource

        return ParquetSource(paths, None, bad_rows=bad_rows, old=old.columns())
    from trainmark.clicklog.sources.csv_source import CsvSource

    return CsvSource(
        paths,
        None,
        delimiter=old.delimiter,
        header=old.header,
        missing=old.missing(),
        bad_rows=bad_rows,
        old=old.columns(),
    )
