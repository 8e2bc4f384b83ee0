"""Columns that are carried along as they are: `--keep`. They are no part of what a model reads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainmark import checksums

FILE = "kept.parquet"
"""In a dataset's folder: the rows of all its splits, in input order."""


def path_of(folder: Path, index: int) -> Path:
    """Where those of a block lie."""
    return folder / f"{index:06d}.kept.parquet"


def write(path: Path, table: Any) -> list[Any]:
    """Write a block's columns; returns the file's checksum."""
    import pyarrow.parquet as pq

    pq.write_table(table, path)
    return checksums.of_file(path)


def join(blocks: Sequence[Path], to: Path) -> None:
    """The columns of several blocks as one file, a block at a time."""
    import pyarrow.parquet as pq

    with pq.ParquetWriter(to, pq.read_schema(blocks[0])) as writer:
        for path in blocks:
            writer.write_table(pq.read_table(path))
