"""The names of a CSV file's columns, and hints where a file is not what it was said to be."""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv

from trainmark.clicklog.sources import text_files
from trainmark.clicklog.sources.arrow_columns import decoded
from trainmark.clicklog.sources.column_spec import NUMBER
from trainmark.errors import InputError

HEADER_BYTES = text_files.MAX_LINE_BYTES
OPEN_QUOTE = "a quoted field does not end on its line"
INNER_RETURN = "a carriage return (CR) is not at the end of the line"
OTHER_DELIMITERS = {";": "';'", "\t": "tab", "|": "'|'", ",": "','"}
"""And how they are given on a command line."""


def is_padded(files: Sequence[Path], delimiter: str) -> bool:
    """Whether fields of the first line have blanks around them, as in `age, city`: then those of
    all lines are taken without. Files whose first line has none keep every blank."""
    first = next((path for path in files if not text_files.is_empty(path)), files[0])
    return any(field != field.strip(" ") for field in _first_line(first, delimiter))


def delimiter_of(files: Sequence[Path], expected: str) -> str:
    """What divides the first file's header: another one where the expected does not."""
    first = next((path for path in files if not text_files.is_empty(path)), files[0])
    fields = _first_line(first, expected)
    return (_other_delimiter(expected, fields[0]) if len(fields) == 1 else None) or expected


def column_names(files: Sequence[Path], delimiter: str, header: bool) -> list[str]:
    """The names of the columns, which all files must agree on; numbers without a header.

    Empty files, which may be among those whose bad rows are skipped, have no say.
    """
    files = [path for path in files if not text_files.is_empty(path)] or files
    first = [field.strip(" ") for field in _first_line(files[0], delimiter)]
    if len(first) == 1:
        _refuse_delimiter(files[0], delimiter, first[0])
    if not header:
        return [str(number) for number in range(1, len(first) + 1)]
    for path in files[1:]:
        other = [field.strip(" ") for field in _first_line(path, delimiter)]
        if other != first:
            raise InputError(
                f"{path} has another header than {files[0]}: {_first_difference(other, first)}. "
                "All files need the same columns in the same order."
            )
    repeated = sorted({name for name in first if first.count(name) > 1})
    if repeated:
        raise InputError(
            f"{files[0]} has more than one column {', '.join(repeated)}. Rename all but one."
        )
    return first


def _first_difference(names: Sequence[str], expected: Sequence[str]) -> str:
    pairs = zip_longest(names, expected)
    place, (name, other) = next((n, pair) for n, pair in enumerate(pairs, 1) if len(set(pair)) > 1)
    return f"its column {place} is {_quoted(name)}, there {_quoted(other)}"


def _quoted(name: str | None) -> str:
    return "none" if name is None else f"{name!r:.80}"


def _first_line(path: Path, delimiter: str) -> list[str]:
    """Its fields, each as it is written, be it a number."""
    with text_files.TextFile(path) as file:
        start = np.empty(HEADER_BYTES, np.uint8)
        line = start[: file.read_into(start)].tobytes().split(b"\n")[0]
    if not line:
        what = "it" if text_files.is_empty(path) else "the first line"
        raise InputError(f"{path}: {what} is empty.")
    if b"\0" in line:
        raise InputError(f"{path} is {_binary(line)}.")
    line = line.removesuffix(b"\r")
    if b"\r" in line:
        raise InputError(
            f"{path}:1: {INNER_RETURN}, which is LF or CRLF. If all lines of the file end in CR "
            r"alone, convert it, as by tr '\r' '\n'."
        )
    most = line.count(delimiter.encode()) + 1
    try:
        table = pa.csv.read_csv(
            pa.BufferReader(line + b"\n"),
            pa.csv.ReadOptions(autogenerate_column_names=True, block_size=len(line) + 1),
            pa.csv.ParseOptions(delimiter=delimiter, ignore_empty_lines=False),
            pa.csv.ConvertOptions(
                # The names that Arrow makes up.
                column_types={f"f{number}": pa.binary() for number in range(most)},
                null_values=[],
            ),
        )
    except pa.ArrowInvalid:
        raise InputError(f"{path}:1: {OPEN_QUOTE}.") from None
    return [decoded(column[0].as_py()) for column in table.columns]


def _binary(line: bytes) -> str:
    """What a line with zeros in it is of. Latin letters in UTF-16 have one in every other byte; a
    mark before them, which most files have, would have said so."""
    for order, half in (("LE", line[1::2]), ("BE", line[::2])):
        if not any(half):
            return f"text in UTF-16: convert it, as by iconv -f UTF-16{order} -t UTF-8"
    return "not text. `trainmark prepare parquet` reads Parquet files"


def header_hint(names: Sequence[str]) -> str:
    """What to add where --columns does not fit a first line that may be data."""
    if not any(NUMBER.fullmatch(name) for name in names):
        return ""
    return (
        " If the first line is no header, give --no-header, and the numbers of the columns, from 1."
    )


def _refuse_delimiter(path: Path, delimiter: str, line: str) -> None:
    """A label and a feature are two columns: a single one is a line that was not divided."""
    if other := _other_delimiter(delimiter, line):
        name = {"\t": "tabs"}.get(other, f"{other!r}")
        raise InputError(
            f"{path} has a single column, {line!r:.80}. Its fields seem to be separated by {name}: "
            f"give --delimiter {OTHER_DELIMITERS[other]}."
        )


def _other_delimiter(delimiter: str, line: str) -> str | None:
    """What seems to divide a line that the delimiter does not."""
    likely = [other for other in OTHER_DELIMITERS if other != delimiter and other in line]
    return max(likely, key=line.count) if likely else None


def is_utf8(text: bytes) -> bool:
    if text.isascii():
        return True
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
