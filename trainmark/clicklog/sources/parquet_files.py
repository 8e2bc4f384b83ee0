"""Parquet files of others, which may be damaged: at their end, or in the middle."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from trainmark.clicklog.sources import lists, remote
from trainmark.errors import InputError

BUFFER_BYTES = 1 << 16
"""Of each column, where little of it is read at a time."""


def open_parquet(path: Path, encoded: Sequence[str] = (), little_by_little: bool = False) -> Any:
    """The file, with its columns and sizes.

    Args:
        encoded: columns of strings that are read as codes and a dictionary, as most files have
            them, which takes half as long.
        little_by_little: whether a group of rows is read so, which saves memory.
    """
    opened = path.open("rb") if remote.is_remote(str(path)) else path
    reading = {"pre_buffer": False, "buffer_size": BUFFER_BYTES} if little_by_little else {}
    with readable(path):
        return pa.parquet.ParquetFile(opened, read_dictionary=list(encoded), **reading)


def columns_of(schema: pa.Schema) -> pa.Schema:
    """Its columns; views of texts or bytes, which few operations take, are texts or bytes."""
    return pa.schema([field.with_type(_without_views(field.type)) for field in schema])


def _without_views(kind: pa.DataType) -> pa.DataType:
    plain = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
    if lists.is_list(kind) and kind.value_type in plain:
        return pa.list_(plain[kind.value_type])
    return plain.get(kind, kind)


def batches(file: Any, path: Path, rows: int, **chosen: Any) -> Iterator[Any]:
    """Its rows, so many at a time; `chosen` are arguments of `ParquetFile.iter_batches`."""
    groups = chosen.pop("row_groups", None) or list(range(file.num_row_groups))
    kinds = [field.type for field in file.schema_arrow]
    # Arrow makes no batch of lists whose dictionaries are those of two groups of rows.
    apart = any(lists.is_list(kind) and pa.types.is_dictionary(kind.value_type) for kind in kinds)
    parts = [[group] for group in groups] if apart else [groups]
    found = chain.from_iterable(file.iter_batches(rows, row_groups=p, **chosen) for p in parts)
    while True:
        with readable(path):
            batch = next(found, None)
        if batch is None:
            return
        yield batch.cast(columns_of(batch.schema))


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """What Arrow says of a damaged file is told."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = str(error).rstrip(".")
        raise InputError(f"{path} is not readable as Parquet: {reason}.") from None
