"""`trainmark prepare csv`: CSV files of any columns -> the dataset that `trainmark train` reads.

Either `--columns` says what the columns of `--input` are (column_spec.py), and the engine gives ids
to their values; or `--spec` names a feature specification of data that have ids (transcode.py).
"""

from dataclasses import dataclass
from pathlib import Path

from trainmark.clicklog import tabular
from trainmark.clicklog.inherit import Inherited
from trainmark.clicklog.sources.column_match import AskedColumns
from trainmark.clicklog.sources.source import Source
from trainmark.clicklog.tabular import TabularOptions


@dataclass(frozen=True, kw_only=True)
class Options(TabularOptions):
    """Turn CSV files of any columns into a dataset for training."""

    delimiter: str | None = None
    """What separates fields; \\t or tab for a tab. Default a comma; with --vocabulary, as there."""
    header: bool = True
    """Whether files start with the names of the columns. Files of --spec never do."""
    missing: tuple[str, ...] = ()
    """What stands for a missing value, besides an empty field, such as NA \\\\N null. Default with
    --vocabulary: as in that dataset."""


def prepare(options: Options) -> None:
    """Write the dataset, unless the folder already holds it."""
    delimiter = {"\\t": "\t", "tab": "\t"}.get(options.delimiter or "", options.delimiter)

    def open_source(earlier: Inherited | None, files: list[Path], asked: AskedColumns) -> Source:
        from trainmark.clicklog.sources.csv_source import (
            CsvSource,
        )  # pyarrow, as in parquet_data.py

        return CsvSource(
            files,
            asked,
            delimiter=delimiter or (earlier.delimiter if earlier else ","),
            header=options.header,
            missing=earlier.missing(options.missing) if earlier else options.missing,
            bad_rows=options.bad_rows,
        )

    tabular.prepare(options, "csv", open_source, delimiter=delimiter or ",")
