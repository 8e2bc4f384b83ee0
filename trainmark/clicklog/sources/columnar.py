"""Sources of one's own rows, for the engine: CSV and Parquet files with any columns."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from numpy.typing import NDArray

from trainmark.clicklog.sources import columns as description
from trainmark.clicklog.sources import text_files
from trainmark.clicklog.sources.columns import Use
from trainmark.clicklog.sources.convert import Converted, convert, resolve
from trainmark.clicklog.sources.rows import BadRow, Block, Values
from trainmark.clicklog.sources.source import BadRows, Piece, Position
from trainmark.errors import InputError

HEADER_BYTES = text_files.MAX_LINE_BYTES
OPEN_QUOTE = "a quoted field does not end on its line"


class CsvSource:
    """Lines of fields.

    Quoted fields may hold the delimiter, but no line ends: files are read in pieces of whole lines.

    Args:
        files: in the order of their rows.
        columns: what the columns are (description.py).
        delimiter: one character.
        header: whether every file starts with a line of names.
        missing: what stands for a missing value, besides nothing.
        bad_rows: what to do with a line that breaks the rules. `keep` takes what is wrong in it for
            missing; without a label, or with the wrong number of fields, it has to skip the line.
    """

    def __init__(
        self,
        files: Sequence[Path],
        columns: str,
        *,
        delimiter: str = ",",
        header: bool = True,
        missing: Sequence[str] = (),
        bad_rows: BadRows = "stop",
    ) -> None:
        if len(delimiter.encode()) != 1 or delimiter in '"\r\n':
            raise InputError(f"--delimiter is {delimiter!r}; one character is expected.")
        self.files = list(files)
        self.bad_rows = bad_rows
        self._delimiter, self._header, self._missing = delimiter, header, list(missing)
        self._names = self._check_headers()
        uses = description.parse(columns, self._names, str(self.files[0]))
        # Text has no types: what --columns does not say is read in the usual way.
        self.uses = resolve(uses, [pa.string()] * len(uses))
        self.schema = description.schema(self.uses)
        self._columns = columns

    def settings(self) -> Mapping[str, Any]:
        return {
            "input": [[path.name, path.stat().st_size] for path in self.files],
            "columns": self._columns,
            "delimiter": self._delimiter,
            "header": self._header,
            **({"missing": self._missing} if self._missing else {}),
        }

    def inputs(self) -> Mapping[str, Any]:
        return _inputs(self.uses, missing=["", *self._missing])

    def sizes(self) -> list[int]:
        return [path.stat().st_size for path in self.files]

    def bytes_per_row(self) -> float:
        return text_files.bytes_per_line(self.files)

    def _check_headers(self) -> list[str]:
        """The names of the columns, which all files must agree on; numbers without a header."""
        first = self._first_line(self.files[0])
        if not self._header:
            return [str(number) for number in range(1, len(first) + 1)]
        for path in self.files[1:]:
            other = self._first_line(path)
            if other != first:
                raise InputError(f"{path} has the header {other}, but {self.files[0]} has {first}.")
        repeated = sorted({name for name in first if first.count(name) > 1})
        if repeated:
            raise InputError(f"{self.files[0]} has more than one column {', '.join(repeated)}.")
        return first

    def _first_line(self, path: Path) -> list[str]:
        with text_files.TextFile(path) as file:
            start = np.empty(HEADER_BYTES, np.uint8)
            line = start[: file.read_into(start)].tobytes().split(b"\n")[0]
        if not line:
            raise InputError(f"{path}: the first line is empty.")
        if b"\0" in line:
            raise InputError(
                f"{path} is not text. `trainmark prepare parquet` reads Parquet files."
            )
        try:
            table = self._read(line.removesuffix(b"\r") + b"\n", None, [])
        except pa.ArrowInvalid:
            raise InputError(f"{path}:1: {OPEN_QUOTE}.") from None
        return [str(_utf8(column)[0].as_py() or "") for column in table.columns]

    def _rows(self, text: bytes) -> tuple[pa.Table, NDArray[np.int64], dict[int, str]]:
        """Lines as columns of strings, their numbers from 0, and why other lines are no rows."""
        if not text.endswith(b"\n") and text:
            text += b"\n"
        text, numbers = _without_blank_lines(text)
        reasons: dict[int, str] = {}
        table, odd = self._with_empty_line(text)
        if table.num_rows + len(odd) != len(numbers) + 1:
            text, places = self._without_open_quotes(text)
            reasons = {int(numbers[place]): OPEN_QUOTE for place in places}
            numbers = np.delete(numbers, places)
            table, odd = self._with_empty_line(text)
        places = [row.number - 1 for row in odd]
        for place, row in zip(places, odd, strict=True):
            fields = f"{row.actual_columns} fields, expected {len(self._names)}"
            reasons[int(numbers[place])] = fields
        return table.slice(0, table.num_rows - 1), np.delete(numbers, places), reasons

    def _without_open_quotes(self, text: bytes) -> tuple[bytes, list[int]]:
        """The text without the lines that open a quote and leave it open, and their places."""
        kept, left_out = [], []
        for number, line in enumerate(text.split(b"\n")[:-1]):
            if b'"' in line and sum(map(len, self._with_empty_line(line + b"\n"))) != 2:
                left_out.append(number)
            else:
                kept.append(line + b"\n")
        return b"".join(kept), left_out

    def _with_empty_line(self, text: bytes) -> tuple[pa.Table, list[Any]]:
        """Read lines and one more. Arrow reads a quoted field on to the next quote, over the ends
        of lines and of the text: then there are fewer rows than lines."""
        odd: list[Any] = []
        return self._read(text + b"\n", self._names, odd), odd

    def _read(self, text: bytes, names: list[str] | None, odd: list[Any]) -> pa.Table:
        """Lines of fields as columns of strings; those with too many or few go to `odd`."""

        def note(row: Any) -> str:
            odd.append(row)
            return "skip"

        kinds = dict.fromkeys(names or [], pa.string())
        return pa.csv.read_csv(
            pa.BufferReader(text),
            pa.csv.ReadOptions(
                column_names=names,
                autogenerate_column_names=names is None,
                use_threads=False,
                block_size=max(len(text), 1),
                encoding="utf8",
            ),
            pa.csv.ParseOptions(
                delimiter=self._delimiter, ignore_empty_lines=False, invalid_row_handler=note
            ),
            pa.csv.ConvertOptions(
                column_types=kinds,
                null_values=["", *self._missing],
                strings_can_be_null=True,
                check_utf8=False,
            ),
        )

    def pieces(self, start: Position, piece_bytes: int) -> Iterator[Piece]:
        return text_files.pieces(self.files, start, piece_bytes)

    def parse(self, piece: Piece) -> Block:
        text = bytes(piece.raw)
        line = piece.start.line
        if self._header and piece.start.offset == 0:
            text = text[text.find(b"\n") + 1 :] if b"\n" in text else b""
            line += 1
        path = str(self.files[piece.start.file])
        table, numbers, reasons = self._rows(text)
        converted = convert([_utf8(table[use.column]) for use in self.uses], self.uses)
        lines = numbers + line
        bad = [BadRow(path, line + number, reason) for number, reason in reasons.items()]
        if piece.raw.damage:
            reason = f"the compressed data is damaged from here on ({piece.raw.damage})"
            bad.append(BadRow(path, piece.start.line + piece.raw.lines, reason))
        return _block(converted, path, lines, bad, self.bad_rows)


class ParquetSource:
    """Parquet files. A position in a file is a row.

    Args:
        files: in the order of their rows.
        columns: what the columns are (description.py).
        bad_rows: as for `CsvSource`.
    """

    def __init__(self, files: Sequence[Path], columns: str, *, bad_rows: BadRows = "stop") -> None:
        self.files = list(files)
        self.bad_rows = bad_rows
        self._columns = columns
        schemas = [_open_parquet(path).schema_arrow for path in self.files]
        uses = description.parse(columns, schemas[0].names, str(self.files[0]))
        self.uses = resolve(uses, [schemas[0].field(use.column).type for use in uses])
        for path, schema in zip(self.files, schemas, strict=True):
            types = [
                schema.field(u.column).type if u.column in schema.names else None for u in uses
            ]
            if types != [schemas[0].field(use.column).type for use in uses]:
                raise InputError(f"{path} has other columns or types than {self.files[0]}.")
        self.schema = description.schema(self.uses)

    def settings(self) -> Mapping[str, Any]:
        return {
            "input": [[path.name, path.stat().st_size] for path in self.files],
            "columns": self._columns,
        }

    def inputs(self) -> Mapping[str, Any]:
        return _inputs(self.uses, missing=[])

    def sizes(self) -> list[int]:
        return [path.stat().st_size for path in self.files]

    def bytes_per_row(self) -> float:
        rows = sum(_open_parquet(path).metadata.num_rows for path in self.files)
        return sum(self.sizes()) / max(rows, 1)

    def pieces(self, start: Position, piece_bytes: int) -> Iterator[Piece]:
        # In memory a row takes about this much, whatever it takes in the file.
        batch_rows = max(piece_bytes // (16 * max(len(self.uses), 1)), 1)
        for number in range(start.file, len(self.files)):
            first = start.offset if number == start.file else 0
            yield from self._pieces_of(number, first, batch_rows)

    def _pieces_of(self, number: int, first: int, batch_rows: int) -> Iterator[Piece]:
        file = _open_parquet(self.files[number])
        total, size = file.metadata.num_rows, self.files[number].stat().st_size
        row = 0
        groups: list[int] = []
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if row + rows > first or groups:
                groups.append(group)
            else:
                row += rows
        names = [use.column for use in self.uses]
        for batch in file.iter_batches(batch_rows, row_groups=groups, columns=names):
            begin, row = row, row + batch.num_rows
            if row <= first:
                continue
            batch = batch.slice(max(first - begin, 0))
            begin = max(begin, first)
            ended = row == total
            stop = Position(number + 1) if ended else Position(number, row, row + 1)
            num_bytes = size * row // total - size * begin // total
            yield Piece(Position(number, begin, begin + 1), stop, batch, num_bytes)
        if total == 0:
            yield Piece(Position(number), Position(number + 1), None, size)

    def parse(self, piece: Piece) -> Block:
        path = str(self.files[piece.start.file])
        if piece.raw is None:
            bad = [BadRow(path, 1, "the file is empty")]
            types = [_open_parquet(Path(path)).schema_arrow.field(u.column).type for u in self.uses]
            empty = convert([pa.array([], kind) for kind in types], self.uses)
            return _block(empty, path, np.empty(0, np.int64), bad, self.bad_rows)
        converted = convert([piece.raw.column(use.column) for use in self.uses], self.uses)
        lines = np.arange(piece.raw.num_rows) + piece.start.line
        return _block(converted, path, lines, [], self.bad_rows)


def _inputs(uses: Sequence[Use], *, missing: list[str]) -> dict[str, Any]:
    columns = [
        {"column": use.column, "role": use.role, "reading": use.reading}
        for use in uses
        if use.role != "label"
    ]
    return {"missing": missing, "columns": columns}


def _open_parquet(path: Path) -> Any:
    try:
        return pa.parquet.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        reason = str(error).rstrip(".")
        raise InputError(f"{path} is not readable as Parquet: {reason}.") from None


def _without_blank_lines(text: bytes) -> tuple[bytes, NDArray[np.int64]]:
    """The other lines, and their numbers from 0. A blank line has no label, and so is no row, at
    the end of a file, where editors and joined files leave some, or elsewhere."""
    if not text.startswith((b"\n", b"\r\n")) and b"\n\n" not in text and b"\n\r\n" not in text:
        return text, np.arange(text.count(b"\n"))
    lines = text.split(b"\n")
    kept = [number for number, line in enumerate(lines) if line not in (b"", b"\r")]
    return b"".join(lines[number] + b"\n" for number in kept), np.array(kept, np.int64)


def _utf8(column: pa.ChunkedArray) -> pa.Array:
    """Values that are not UTF-8 are taken for Latin-1: different bytes stay different values."""
    array = column.combine_chunks()
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        raw = array.cast(pa.binary()).to_pylist()
        return pa.array([None if text is None else _decoded(text) for text in raw], pa.string())
    return array


def _decoded(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return text.decode("latin-1")


def _block(
    converted: Converted,
    path: str,
    lines: NDArray[np.int64],
    bad: list[BadRow],
    bad_rows: BadRows,
) -> Block:
    """Leave out what cannot be kept, and list what is bad."""
    bad = bad + [
        BadRow(path, int(lines[row]), reason) for row, reason in converted.problems.items()
    ]
    bad.sort(key=lambda row: row.line)
    if bad and bad_rows == "stop":
        raise InputError(
            f"{bad[0]}. With --bad-rows skip such lines are left out and listed, "
            "with --bad-rows keep their bad fields count as missing."
        )
    keep = ~converted.unlabelled
    if bad_rows == "skip":
        keep[list(converted.problems)] = False
    if not keep.all():
        converted = _select(converted, keep)
    return Block(converted.labels, converted.numerical, converted.categorical, tuple(bad))


def _select(converted: Converted, keep: NDArray[np.bool_]) -> Converted:
    def chosen(column: Any) -> Any:
        if isinstance(column, Values):
            missing = None if column.missing is None else column.missing[keep]
            return Values(column.numbers[keep], missing)
        return column.filter(pa.array(keep))

    return dataclasses.replace(
        converted,
        labels=converted.labels[keep],
        numerical=converted.numerical[keep],
        categorical=[chosen(column) for column in converted.categorical],
    )
