"""`trainmark prepare parquet`: Parquet files of any columns -> a dataset for `trainmark train`.

As `prepare csv`, but the types of the columns come from the files.
"""

from dataclasses import dataclass
from pathlib import Path

from trainmark.clicklog import tabular
from trainmark.clicklog.inherit import Inherited
from trainmark.clicklog.sources.number_readings import AUTO
from trainmark.clicklog.sources.source import Source
from trainmark.clicklog.tabular import TabularOptions


@dataclass(frozen=True, kw_only=True)
class Options(TabularOptions):
    """Turn Parquet files of any columns into a dataset for training."""


def prepare(options: Options) -> None:
    """Write the dataset, unless the folder already holds it."""

    def source(files: list[Path], old: Inherited | None) -> Source:
        from trainmark.clicklog.sources.parquet_source import ParquetSource

        return ParquetSource(
            files,
            options.columns,
            numerical=options.numerical or AUTO,
            bad_rows=options.bad_rows,
            old=old.columns() if old else None,
            row_columns=tabular.row_columns(options),
        )

    tabular.prepare(options, "parquet", source)
