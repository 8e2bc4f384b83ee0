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

from trainmark.clicklog.sources import column_spec, text_files
from trainmark.clicklog.sources.arrow_columns import decoded, utf8
from trainmark.clicklog.sources.column_match import AskedColumns
from trainmark.clicklog.sources.column_types import resolve
from trainmark.clicklog.sources.convert import convert, parsed_rows
from trainmark.clicklog.sources.csv_header import (
    INNER_RETURN,
    OPEN_QUOTE,
    column_names,
    header_hint,
    is_padded,
    is_utf8,
)
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
        asked: what the columns are.
        delimiter: one character.
        header: whether every file starts with a line of names.
        missing: what stands for a missing value, besides nothing.
        bad_rows: what to do with a line that breaks the rules. `keep` takes what is wrong in it for
            missing; without a label, or with the wrong number of fields, it has to skip the line.
    """

    def __init__(
        self,
        files: Sequence[Path],
        asked: AskedColumns,
        *,
        delimiter: str = ",",
        header: bool = True,
        missing: Sequence[str] = (),
        bad_rows: BadRows = "stop",
    ) -> None:
        if len(delimiter.encode()) != 1 or delimiter in '"\r\n':
            raise InputError(f"--delimiter is {delimiter!r}; one character is expected.")
        self.files = list(files)
        text_files.check_files(self.files, bad_rows)
        self._names_and_sizes = names_and_sizes(self.files)
        self.bad_rows = bad_rows
        self._delimiter, self._header, self._missing = delimiter, header, list(missing)
        self.names = column_names(self.files, delimiter, header)
        self._padded = is_padded(self.files, delimiter)
        try:
            uses = asked.uses(self.names, str(self.files[0]))
        except InputError as error:
            raise InputError(f"{error}{header_hint(self.names) if header else ''}") from None
        # Text has no types: what --columns does not say is read in the usual way.
        self.uses = resolve(uses, [pa.string()] * len(uses), asked.numerical)
        self.schema = column_spec.schema(self.uses)
        self._asked, self._read_names = asked, asked.read(self.uses)

    def settings(self) -> Mapping[str, Any]:
        return {
            "input": self._names_and_sizes,
            **self._asked.settings(self.schema),
            "delimiter": self._delimiter,
            "header": self._header,
            **({"missing": self._missing} if self._missing else {}),
        }

    def inputs(self) -> Mapping[str, Any]:
        return column_spec.inputs(self.uses, missing=["", *self._missing])

    def bytes_per_row(self) -> float:
        return text_files.bytes_per_line(self.files)

    def _rows(self, text: bytes) -> tuple[pa.Table, NDArray[np.int64], dict[int, str]]:
        """Lines as columns of strings, their numbers from 0, and why other lines are no rows.

        Args:
            text: the lines, and an empty one. Arrow reads a quoted field on to the next quote, over
                the ends of lines and of the text: then there are fewer rows than lines.
        """
        text, numbers = _without_blank_lines(text)
        text, places = _without_inner_returns(text)
        reasons = {int(numbers[place]): INNER_RETURN for place in places}
        numbers = np.delete(numbers, places)
        table, odd = self._read(text)
        if table.num_rows + len(odd) != len(numbers) + 1:
            text, places = self._without_open_quotes(text)
            reasons |= {int(numbers[place]): OPEN_QUOTE for place in places}
            numbers = np.delete(numbers, places)
            table, odd = self._read(text)
        places = [row.number - 1 for row in odd]
        for place, row in zip(places, odd, strict=True):
            fields = f"{row.actual_columns} fields, expected {len(self.names)}"
            reasons[int(numbers[place])] = fields
        return table.slice(0, table.num_rows - 1), np.delete(numbers, places), reasons

    def _without_open_quotes(self, text: bytes) -> tuple[bytes, list[int]]:
        """The text without the lines that open a quote and leave it open, and their places."""
        kept, left_out = [], []
        for number, line in enumerate(text.split(b"\n")[:-1]):
            if b'"' in line and sum(map(len, self._read(line + b"\n\n"))) != 2:
                left_out.append(number)
            else:
                kept.append(line + b"\n")
        return b"".join(kept), left_out

    def _with_odd_rows_in_utf8(self, text: bytes) -> bytes:
        """Arrow cannot tell of a row with too many or few fields that is not UTF-8: its fields
        are taken for Latin-1, as `utf8` takes others. Where there are quotes, delimiters do not
        count fields, and an open one takes in the lines behind it: then every line is."""
        if is_utf8(text):
            return text
        delimiter, lines = self._delimiter.encode(), text.split(b"\n")
        quoted = b'"' in text
        for number, line in enumerate(lines):
            may_be_odd = quoted or line.count(delimiter) != len(self.names) - 1
            if may_be_odd and not is_utf8(line):
                fields = line.split(delimiter)
                lines[number] = delimiter.join(decoded(field).encode() for field in fields)
        return b"\n".join(lines)

    def _read(self, text: bytes) -> tuple[pa.Table, list[Any]]:
        """Lines of fields as columns of strings, and those with too many or few fields."""
        text = self._with_odd_rows_in_utf8(text)
        odd: list[Any] = []
        if b'"' not in text:  # a quoted field may reach over the end of a block
            try:
                return self._read_blocks(text, odd, BLOCK_BYTES), odd
            except pa.ArrowInvalid:  # a line that is longer
                odd.clear()
        return self._read_blocks(text, odd, len(text)), odd

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
                include_columns=self._read_names,
                column_types=dict.fromkeys(self._read_names, pa.string()),
                null_values=["", *self._missing],
                strings_can_be_null=True,
                check_utf8=False,
            ),
        )

    def pieces(self, start: Position, piece_bytes: int, room: Room) -> Generator[Piece]:
        sizes = [size for _, size in self._names_and_sizes]
        return text_files.pieces(self.files, sizes, start, piece_bytes, room)

    def parse(self, piece: Piece) -> ParsedRows:
        whole = text_files.read(piece.raw)
        text, line = _with_empty_line(whole), 1
        if self._header and piece.start.offset == 0 and whole.length:
            text, line = text[text.find(b"\n") + 1 :], 2
        path = str(self.files[piece.start.file])
        table, numbers, reasons = self._rows(text)
        if not is_utf8(text):
            columns = [utf8(column.combine_chunks()) for column in table.columns]
            table = pa.table(columns, names=table.column_names)
        columns = [table[use.column] for use in self.uses]
        if self._padded:
            columns = [self._without_blanks(column) for column in columns]
        is_new = self._asked.old is None  # else that has said it
        converted = convert(columns, self.uses, takes_columns=is_new, takes_missing=is_new)
        if names := self._asked.keep:
            converted = replace(converted, kept=table.select(list(names)).combine_chunks())
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


def _with_empty_line(whole: text_files.Text) -> bytes:
    """The lines of a text, the last one ended, and an empty one."""
    text, length = whole.buffer, whole.length
    is_ended = not length or text[length - 1] == text_files.NEWLINE
    text[length : length + 2] = text_files.NEWLINE  # where there is nothing but padding
    lines: bytes = text[: length + 2 - is_ended].tobytes()
    return lines


def _without_blank_lines(text: bytes) -> tuple[bytes, NDArray[np.int64]]:
    """The other lines, and the empty one at the end; and their numbers from 0. A blank line has no
    label, and so is no row, at the end of a file, where editors and joined files leave some, or
    elsewhere."""
    characters = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(characters == text_files.NEWLINE)
    sizes = np.diff(ends, prepend=-1)
    filled = sizes > 1
    if b"\r" in text:
        filled &= (sizes > 2) | (characters[ends - 1] != ord("\r"))
    numbers = np.flatnonzero(filled)
    if len(numbers) < len(ends) - 1:
        lines = text.split(b"\n")
        text = b"".join(lines[number] + b"\n" for number in numbers.tolist()) + b"\n"
    return text, numbers


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
