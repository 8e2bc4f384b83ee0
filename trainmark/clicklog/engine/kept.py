"""Columns that are carried along as they are: `--keep`. They are no part of what a model reads."""

import itertools
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


def rows(path: Path, start: int, stop: int) -> Any:
    """Consecutive rows of a joined file, as a table: only the blocks are read that hold them."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        ends = list(itertools.accumulate(sizes, initial=0))
        held = [i for i in range(len(sizes)) if ends[i] < stop and ends[i + 1] > start]
        return file.read_row_groups(held).slice(start - ends[held[0]], stop - start)
