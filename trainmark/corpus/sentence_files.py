"""Sentences of files, a part at a time: tables with a column of them, or plain text, a line each.

The parts are the same each time that the files are read.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
        names = columns(path)
        _check(path, names, column or COLUMN, keep)
        for table in _tables(path, [column or COLUMN, *keep], is_single=len(names) < 2):
            done += table.nbytes  # which is about as many as in the file
            share = (before + min(done, size)) / whole
            texts = pc.cast(table[column or COLUMN], pa.string()).to_pylist()
            yield Part(path, line, texts, table.select(list(keep)), share)
            line += table.num_rows
        before += size


def columns(path: Path) -> list[str]:
    """The names of a table's columns; none of plain text."""
    with _readable(path):
        if path.suffix in PARQUET:
            with open_parquet(path) as file:
                return list(file.schema_arrow.names)
        if path.suffix not in TABLES:
            return []
        with _opened_text(path, [], is_single=False) as reader:
            return list(reader.schema.names)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path} cannot be read: {str(error).rstrip('.')}.") from None


def _tables(path: Path, wanted: list[str], is_single: bool) -> Iterator[pa.Table]:
    with _readable(path):
        if path.suffix in PARQUET:
            with open_parquet(path) as file:
                for batch in batches(file, path, PART_ROWS, columns=wanted):
                    yield pa.Table.from_batches([batch])
        else:
            with _opened_text(path, wanted, is_single) as reader:
                for batch in reader:
                    yield pa.Table.from_batches([batch])


def _opened_text(path: Path, wanted: list[str], is_single: bool) -> Any:
    """Columns of a text as strings; none: all, as Arrow takes them. Where there is a single one, a
    blank line is an empty sentence."""
    is_table = path.suffix in TABLES
    quote: Any = '"' if path.suffix == ".csv" else False
    delimiter = {".csv": ",", ".tsv": "\t"}.get(path.suffix, "\x1f")  # no character of a text
    return pa.csv.open_csv(
        path,
        pa.csv.ReadOptions(
            block_size=PART_BYTES, use_threads=False, column_names=None if is_table else wanted
        ),
        pa.csv.ParseOptions(
            delimiter=delimiter, quote_char=quote, newlines_in_values=bool(quote),
            ignore_empty_lines=not is_single,
        ),
        pa.csv.ConvertOptions(
            include_columns=wanted, column_types=dict.fromkeys(wanted, pa.string()),
            strings_can_be_null=True, null_values=[""],
        ),
    )  # fmt: skip


def _check(path: Path, names: list[str], column: str, keep: Sequence[str]) -> None:
    if not names:
        if keep:
            raise InputError(f"--keep {keep[0]}: {path} has sentences alone, one on each line.")
        return
    if column not in names:
        raise InputError(
            f"{path} has no column {column!r}; it has {', '.join(names)}. Give --column, which "
            "names the one with the sentences."
        )
    for name in keep:
        if name not in names:
            raise unknown(f"column of {path} for --keep", name, names)
