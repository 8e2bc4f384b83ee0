"""`trainmark prepare parquet`: Parquet files of any columns -> a dataset for `trainmark train`.

As `prepare csv`, but the types of the columns come from the files.
"""

from dataclasses import dataclass
from pathlib import Path

from trainmark.clicklog import tabular
from trainmark.clicklog.engine.summary import warn
from trainmark.clicklog.inherit import Inherited
from trainmark.clicklog.sources.column_match import AskedColumns
from trainmark.clicklog.sources.source import Source
from trainmark.clicklog.tabular import TabularOptions


@dataclass(frozen=True, kw_only=True)
class Options(TabularOptions):
    """Turn Parquet files of any columns into a dataset for training."""


def prepare(options: Options) -> None:
    """Write the dataset, unless the folder already holds it."""

    def open_source(_: Inherited | None, files: list[Path], asked: AskedColumns) -> Source:
        # pyarrow, which `--help` need not wait for
        from trainmark.clicklog.sources.parquet_source import ParquetSource

        source = ParquetSource(files, asked, bad_rows=options.bad_rows)
        for sentence in source.warnings:
            warn(sentence)
        return source

    tabular.prepare(options, "parquet", open_source)
