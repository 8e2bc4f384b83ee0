"""Sentences of files, a part at a time: tables with a column of them, or plain text, a line each.

The parts are the same each time that the files are read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from trainmark.clicklog.sources.parquet_files import batches, open_parquet
from trainmark.errors import InputError, unknown

COLUMN = "sentence"
PART_ROWS = 8192
PART_BYTES = 1 << 20
PARQUET = (".parquet", ".pq")
TABLES = (".csv", ".tsv")


@dataclass(frozen=True)
class Part:
    """Consecutive rows of a file."""

    path: Path
    line: int
    """Line of the first row, from 1 as editors count; in Parquet, the row."""
    sentences: list[str | None]
    kept: pa.Table
    share: float
    """About how much of all files is done after this part, from 0 to 1."""


def parts(paths: Sequence[Path], column: str | None, keep: Sequence[str]) -> Iterator[Part]:
    """The rows of the files, in order.

    Args:
        paths: .parquet, .csv, .tsv (as GLUE has them, without quotes); others are plain text.
        column: the one that has the sentences; None: `sentence`.
        keep: others to carry along.
    """
    sizes = [path.stat().st_size for path in paths]
    before, whole = 0, max(sum(sizes), 1)
    for path, size in zip(paths, sizes, strict=True):
        line = 1 if path.suffix not in TABLES else 2  # after the header
        done = 0
        for table in _tables(path, column or COLUMN, keep):
            done += table.nbytes  # which is about as many as in the file
            share = (before + min(done, size)) / whole
            texts = pc.cast(table[column or COLUMN], pa.string()).to_pylist()
            yield Part(path, line, texts, table.select(list(keep)), share)
            line += table.num_rows
        before += size


def _tables(path: Path, column: str, keep: Sequence[str]) -> Iterator[pa.Table]:
    try:
        if path.suffix in PARQUET:
            yield from _of_parquet(path, column, keep)
        else:
            yield from _of_text(path, column, keep)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path} cannot be read: {str(error).rstrip('.')}.") from None


def _of_parquet(path: Path, column: str, keep: Sequence[str]) -> Iterator[pa.Table]:
    with open_parquet(path) as file:
        _check(path, file.schema_arrow.names, column, keep)
        for batch in batches(file, path, PART_ROWS, columns=[column, *keep]):
            yield pa.Table.from_batches([batch])


def _of_text(path: Path, column: str, keep: Sequence[str]) -> Iterator[pa.Table]:
    is_table = path.suffix in TABLES
    if not is_table and keep:
        raise InputError(f"--keep {keep[0]}: {path} has sentences alone, one on each line.")
    quote: Any = '"' if path.suffix == ".csv" else False
    delimiter = {".csv": ",", ".tsv": "\t"}.get(path.suffix, "\x1f")  # no character of a text
    reader = pa.csv.open_csv(
        path,
        pa.csv.ReadOptions(
            block_size=PART_BYTES, use_threads=False, column_names=None if is_table else [column]
        ),
        pa.csv.ParseOptions(
            delimiter=delimiter, quote_char=quote, newlines_in_values=bool(quote),
            ignore_empty_lines=False,
        ),
        pa.csv.ConvertOptions(
            column_types=dict.fromkeys([column, *keep], pa.string()), strings_can_be_null=True,
            null_values=[""],
        ),
    )  # fmt: skip
    with reader:
        _check(path, reader.schema.names, column, keep)
        for batch in reader:
            yield pa.Table.from_batches([batch])


def _check(path: Path, names: list[str], column: str, keep: Sequence[str]) -> None:
    if column not in names:
        raise InputError(
            f"{path} has no column {column!r}; it has {', '.join(names)}. Give --column, which "
            "names the one with the sentences."
        )
    for name in keep:
        if name not in names:
            raise unknown(f"column of {path} for --keep", name, names)
