"""CSV files with any columns, as a source."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from numpy.typing import NDArray

from trainmark.clicklog.sources import column_match, column_spec, number_readings, text_files
from trainmark.clicklog.sources.column_match import OldColumns
from trainmark.clicklog.sources.convert import convert, parsed_rows, resolve
from trainmark.clicklog.sources.csv_header import (
    INNER_RETURN,
    OPEN_QUOTE,
    column_names,
    decoded,
    header_hint,
    is_padded,
    is_utf8,
)
from trainmark.clicklog.sources.row_columns import NOTHING, RowColumns
from trainmark.clicklog.sources.rows import BadRow, ParsedRows
from trainmark.clicklog.sources.source import BadRows, Piece, Position, Room, names_and_sizes
from trainmark.errors import InputError

BLOCK_BYTES = 1 << 20
"""Text that Arrow reads at a time: what the processor's cache holds is read three times as fast."""


class CsvSource:
    """Lines of fields.

    Quoted fields may hold the delimiter, but no line ends: files are read in pieces of whole lines.

    Args:
        files: in the order of their rows.
        columns: what the columns are (column_spec.py); None: as in `old`.
        delimiter: one character.
        header: whether every file starts with a line of names.
        missing: what stands for a missing value, besides nothing.
        numerical: how to read the numbers of which `columns` does not say it.
        bad_rows: what to do with a line that breaks the rules. `keep` takes what is wrong in it for
            missing; without a label, or with the wrong number of fields, it has to skip the line.
        old: the columns of an earlier dataset, to be read as they were (column_match.py).
        row_columns: what else the columns say of rows (row_columns.py).
    """

    def __init__(
        self,
        files: Sequence[Path],
        columns: str | None,
        *,
        delimiter: str = ",",
        header: bool = True,
        missing: Sequence[str] = (),
        numerical: str = number_readings.AUTO,
        bad_rows: BadRows = "stop",
        old: OldColumns | None = None,
        row_columns: RowColumns = NOTHING,
    ) -> None:
        if len(delimiter.encode()) != 1 or delimiter in '"\r\n':
            raise InputError(f"--delimiter is {delimiter!r}; one character is expected.")
        self.files = list(files)
        text_files.refuse_formats(self.files)
        self.bad_rows = bad_rows
        self._numerical = number_readings.check_default(numerical)
        self._delimiter, self._header, self._missing = delimiter, header, list(missing)
        self.names = column_names(self.files, delimiter, header)
        self._padded = is_padded(self.files, delimiter)
        try:
            uses = column_match.uses(columns, self.names, str(self.files[0]), old)
        except InputError as error:
            raise InputError(f"{error}{header_hint(self.names) if header else ''}") from None
        uses = row_columns.add_to(uses, self.names, str(self.files[0]))
        # Text has no types: what --columns does not say is read in the usual way.
        self.uses = resolve(uses, [pa.string()] * len(uses), self._numerical)
        self.schema = column_spec.schema(self.uses)
        self._columns, self._row_columns = columns, row_columns

    def settings(self) -> Mapping[str, Any]:
        return {
            "input": names_and_sizes(self.files),
            "columns": self._columns,
            **({"numerical": self._numerical} if self.schema.numbers else {}),
            "delimiter": self._delimiter,
            "header": self._header,
            **({"missing": self._missing} if self._missing else {}),
            **self._row_columns.settings(),
        }

    def inputs(self) -> Mapping[str, Any]:
        return column_spec.inputs(self.uses, missing=["", *self._missing])

    def sizes(self) -> list[int]:
        return [path.stat().st_size for path in self.files]

    def bytes_per_row(self) -> float:
        return text_files.bytes_per_line(self.files)

    def _rows(self, text: bytes) -> tuple[pa.Table, NDArray[np.int64], dict[int, str]]:
        """Lines as columns of strings, their numbers from 0, and why other lines are no rows."""
        if not text.endswith(b"\n") and text:
            text += b"\n"
        text, numbers = _without_blank_lines(text)
        text, places = _without_inner_returns(text)
        reasons = {int(numbers[place]): INNER_RETURN for place in places}
        numbers = np.delete(numbers, places)
        table, odd = self._with_empty_line(text)
        if table.num_rows + len(odd) != len(numbers) + 1:
            text, places = self._without_open_quotes(text)
            reasons |= {int(numbers[place]): OPEN_QUOTE for place in places}
            numbers = np.delete(numbers, places)
            table, odd = self._with_empty_line(text)
        places = [row.number - 1 for row in odd]
        for place, row in zip(places, odd, strict=True):
            fields = f"{row.actual_columns} fields, expected {len(self.names)}"
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
        return self._read(self._with_odd_rows_in_utf8(text) + b"\n", odd), odd

    def _with_odd_rows_in_utf8(self, text: bytes) -> bytes:
        """Arrow cannot tell of a row with too many or few fields that is not UTF-8: its fields
        are taken for Latin-1, as `_utf8` takes others."""
        if text.isascii() or is_utf8(text):
            return text
        delimiter, lines = self._delimiter.encode(), text.split(b"\n")
        for number, line in enumerate(lines):
            if line.count(delimiter) != len(self.names) - 1 and not is_utf8(line):
                fields = line.split(delimiter)
                lines[number] = delimiter.join(decoded(field).encode() for field in fields)
        return b"\n".join(lines)

    def _read(self, text: bytes, odd: list[Any]) -> pa.Table:
        """Lines of fields as columns of strings; those with too many or few go to `odd`."""
        if b'"' not in text:  # a quoted field may reach over the end of a block
            try:
                return self._read_blocks(text, odd, BLOCK_BYTES)
            except pa.ArrowInvalid:  # a line that is longer
                odd.clear()
        return self._read_blocks(text, odd, max(len(text), 1))

    def _read_blocks(self, text: bytes, odd: list[Any], block_bytes: int) -> pa.Table:
        def note(row: Any) -> str:
            odd.append(row)
            return "skip"

        return pa.csv.read_csv(
            pa.BufferReader(text),
            pa.csv.ReadOptions(
                column_names=self.names,
                use_threads=False,
                block_size=block_bytes,
                encoding="utf8",
            ),
            pa.csv.ParseOptions(
                delimiter=self._delimiter, ignore_empty_lines=False, invalid_row_handler=note
            ),
            pa.csv.ConvertOptions(
                column_types=dict.fromkeys(self.names, pa.string()),
                null_values=["", *self._missing],
                strings_can_be_null=True,
                check_utf8=False,
            ),
        )

    def pieces(self, start: Position, piece_bytes: int, room: Room) -> Generator[Piece]:
        return text_files.pieces(self.files, start, piece_bytes, room)

    def parse(self, piece: Piece) -> ParsedRows:
        whole = text_files.read(piece.raw)
        text, line = bytes(whole), 1
        if self._header and piece.start.offset == 0:
            text = text[text.find(b"\n") + 1 :] if b"\n" in text else b""
            line += 1
        path = str(self.files[piece.start.file])
        table, numbers, reasons = self._rows(text)
        columns = [_utf8(table[use.column]) for use in self.uses]
        if self._padded:
            columns = [self._without_blanks(column) for column in columns]
        converted = convert(columns, self.uses)
        if names := self._row_columns.keep:
            kept = pa.table([_utf8(table[name]) for name in names], names=list(names))
            converted = replace(converted, kept=kept)
        lines = numbers + line
        bad = [BadRow(path, line + number, reason) for number, reason in reasons.items()]
        if whole.damage:
            bad.append(BadRow(path, 1 + whole.lines, whole.damage))
        return parsed_rows(converted, path, lines, bad, self.bad_rows, whole.lines)

    def _without_blanks(self, column: pa.Array) -> pa.Array:
        """Values without the blanks around them; some then stand for a missing one."""
        trimmed = pc.utf8_trim(column, characters=" ")
        missing = pc.is_in(trimmed, value_set=pa.array(["", *self._missing]))
        return pc.if_else(missing, pa.scalar(None, pa.string()), trimmed)


def _without_blank_lines(text: bytes) -> tuple[bytes, NDArray[np.int64]]:
    """The other lines, and their numbers from 0. A blank line has no label, and so is no row, at
    the end of a file, where editors and joined files leave some, or elsewhere."""
    pairs = [b"\n\n", b"\n\r\n"] if b"\r" in text else [b"\n\n"]
    if not text.startswith((b"\n", b"\r\n")) and not any(pair in text for pair in pairs):
        return text, np.arange(text.count(b"\n"))
    lines = text.split(b"\n")
    kept = [number for number, line in enumerate(lines) if line not in (b"", b"\r")]
    return b"".join(lines[number] + b"\n" for number in kept), np.array(kept, np.int64)


def _without_inner_returns(text: bytes) -> tuple[bytes, list[int]]:
    """The text without the lines that Arrow would divide, by a carriage return (CR) that is not at
    their end, and their places."""
    if b"\r" not in text or text.count(b"\r") == text.count(b"\r\n"):
        return text, []
    lines = text.split(b"\n")[:-1]
    places = [place for place, line in enumerate(lines) if b"\r" in line[:-1]]
    left_out = set(places)
    kept = (line + b"\n" for place, line in enumerate(lines) if place not in left_out)
    return b"".join(kept), places


def _utf8(column: pa.ChunkedArray) -> pa.Array:
    """Values that are not UTF-8 are taken for Latin-1: different bytes stay different values."""
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        raw = array.cast(pa.binary()).to_pylist()
        return pa.array([None if text is None else decoded(text) for text in raw], pa.string())
    return array
