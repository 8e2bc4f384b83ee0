"""Logs of one's own, prepared in one call."""

from pathlib import Path
from typing import Any

from trainmark.clicklog import csv_data, parquet_data


def prepare_log(log: Path, output: Path, **options: Any) -> Path:
    """As `prepare csv` or `prepare parquet` does it, by the name of the log; gives `output`."""
    module: Any = parquet_data if log.suffix == ".parquet" else csv_data
    module.prepare(module.Options(input=str(log), output=output, **options))
    return output
