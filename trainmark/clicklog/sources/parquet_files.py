"""Parquet files of others, which may be damaged: at their end, or in the middle."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from trainmark.clicklog.sources import remote
from trainmark.errors import InputError


def open_parquet(path: Path) -> Any:
    """The file, with its columns and sizes."""
    with _readable(path):
        return pa.parquet.ParquetFile(path.open("rb") if remote.is_remote(str(path)) else path)


def batches(file: Any, path: Path, rows: int, **chosen: Any) -> Iterator[Any]:
    """Its rows, so many at a time; `chosen` are arguments of `ParquetFile.iter_batches`."""
    found = file.iter_batches(rows, **chosen)
    while True:
        with _readable(path):
            batch = next(found, None)
        if batch is None:
            return
        yield batch


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = str(error).rstrip(".")
        raise InputError(f"{path} is not readable as Parquet: {reason}.") from None
