"""Criteo's text as a source, by a compiled parser or by Arrow's CSV reader.

Both take a piece at a time. `criteo_format.parse_line` decides on lines that they do not accept.
"""

import dataclasses
import io
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainmark.clicklog.arrays import primitives
from trainmark.clicklog.arrays.primitives import Array, Scratch
from trainmark.clicklog.sources import text_files
from trainmark.clicklog.sources.criteo_columns import CriteoColumns, OddLine, Taken, no_rows
from trainmark.clicklog.sources.criteo_format import (
    NAMES,
    NUM_CATEGORICAL,
    NUM_NUMERICAL,
    Line,
    missing_bits,
    parse_line,
    transformed_bits,
)
from trainmark.clicklog.sources.recipes import Recipe
from trainmark.clicklog.sources.rows import (
    BadRow,
    Column,
    Number,
    NumberFacts,
    ParsedRows,
    Schema,
    Values,
)
from trainmark.clicklog.sources.source import (
    BadRows,
    Piece,
    Position,
    Room,
    names_and_sizes,
)
from trainmark.errors import raise_all

TABLE_START, TABLE_STOP = -16, 1 << 17
"""Integers whose transformed value is looked up; others are computed."""

CHUNK_BYTES = 1 << 20
"""What is read at a time: the processor's cache holds it until it is parsed."""
MIN_LINE_BYTES = NUM_NUMERICAL + NUM_CATEGORICAL
"""Of a line whose fields are all empty, and which may have no label."""

LABEL, LABEL_OF_NONE = "label", b"0\t"

NOTHING_COUNTED = (0, (1 << 63) - 1, -(1 << 63), 0)
"""Of a column, as the kernel counts."""

_scratch = Scratch()


class CriteoSource:
    """Days of Criteo's log.

    Args:
        files: in the order of their days.
        recipe: how integers are transformed.
        bad_rows: what to do with a line that breaks the rules. `keep` takes what is wrong or
            lacking for missing and ignores surplus fields; a line without a label it skips.
        labelled: False: files whose first line is one field short have no labels; 0 stands there.
        keep: columns to carry along: the label, or none.
    """

    def __init__(
        self,
        files: Sequence[Path],
        recipe: Recipe,
        bad_rows: BadRows = "stop",
        *,
        labelled: bool = True,
        keep: Sequence[str] = (),
    ) -> None:
        numbers = (Number(f"I{i}", recipe.reading) for i in range(1, NUM_NUMERICAL + 1))
        self.schema = Schema(
            NUM_NUMERICAL, tuple(Column(name) for name in NAMES), transformed=tuple(numbers)
        )
        self.files = list(files)
        text_files.check_files(self.files, bad_rows)
        self._names_and_sizes = names_and_sizes(self.files)
        self.recipe = recipe
        self.bad_rows = bad_rows
        self._without_label = [not labelled and _lacks_label(path) for path in self.files]
        self._keep = list(keep)
        raise_all(self._not_to_keep())
        self._missing = missing_bits(recipe)
        bits = transformed_bits(np.arange(TABLE_START, TABLE_STOP), recipe)
        self._table = np.append(bits, bits.dtype.type(self._missing))

    def settings(self) -> dict[str, Any]:
        return {
            "input": self._names_and_sizes,
            "recipe": self.recipe.name,
            **({"without_label": self._without_label} if any(self._without_label) else {}),
            **({"keep": self._keep} if self._keep else {}),
        }

    def _not_to_keep(self) -> Iterator[str]:
        for name in self._keep:
            if name != LABEL:
                yield (
                    f"--keep {name}: lines of Criteo's format have a label alone to carry along "
                    f"(--keep {LABEL})."
                )
        if LABEL in self._keep and any(self._without_label):
            bare = self.files[self._without_label.index(True)]
            yield f"--keep {LABEL}: the lines of {bare} have no label."

    def inputs(self) -> dict[str, Any] | None:
        return None

    def bytes_per_row(self) -> float:
        return text_files.bytes_per_line(self.files)

    def pieces(self, start: Position, piece_bytes: int, room: Room) -> Generator[Piece]:
        sizes = [size for _, size in self._names_and_sizes]
        return text_files.pieces(self.files, sizes, start, piece_bytes, room)

    def parse(self, piece: Piece) -> ParsedRows:
        whole: int = piece.raw.end - piece.raw.begin
        if not primitives.FAST:
            return self._parsed(piece.start, [text_files.read(piece.raw)], whole)
        return self._parsed(piece.start, text_files.chunks(piece.raw, CHUNK_BYTES), whole)

    def parse_text(self, start: Position, text: text_files.Text) -> ParsedRows:
        """Parse lines that were read from `start` on."""
        return self._parsed(start, [text], text.length)

    def _parsed(
        self, start: Position, texts: Iterable[text_files.Text], num_bytes: int
    ) -> ParsedRows:
        parser = self._parse_compiled if primitives.FAST else self._parse_with_arrow
        if self._without_label[start.file]:
            texts = map(_with_labels, texts)
        taken = parser(texts, num_bytes)
        bad, kept = self._judge(start, taken)
        parsed = self._with_lines(taken.columns, kept) if kept else taken.columns
        categorical = [
            Values(numbers, zeros=zeros)
            for numbers, zeros in zip(parsed.categorical, parsed.zeros, strict=True)
        ]
        return ParsedRows(
            parsed.labels.view(np.bool_),
            parsed.numerical.view(np.float16),
            categorical,
            bad,
            numbers=parsed.facts,
            lines=taken.lines,
            kept=_label_table(parsed.labels) if self._keep else None,
        )

    # --- a piece at a time

    def _parse_compiled(self, texts: Iterable[text_files.Text], num_bytes: int) -> Taken:
        most = num_bytes // MIN_LINE_BYTES + 1
        out = (
            _scratch.array("labels", most, np.uint8),
            _scratch.array("numerical", (most, NUM_NUMERICAL), np.uint16),
            _scratch.array("categorical", (NUM_CATEGORICAL, most), np.uint32),
        )
        counted = np.tile(np.array(NOTHING_COUNTED)[:, None], NUM_NUMERICAL)
        rows = lines = 0
        zeros = [np.empty((0, 2), np.int64)]
        odd_lines: list[OddLine] = []
        damage = None
        for text in texts:
            rows, count, odd = self._parse_text(text, (*out, counted), rows)
            bad, large, zero = odd
            if len(large):
                out[1][large[:, 0], large[:, 1]] = transformed_bits(large[:, 2], self.recipe)
            if len(zero):
                zeros.append(zero.copy())
            odd_lines += [
                OddLine(bytes(text.buffer[start:end]), lines + line, row)
                for start, end, line, row in bad.tolist()
            ]
            lines += count
            damage = text.damage
        column, row = np.concatenate(zeros).T
        parsed = CriteoColumns(
            out[0][:rows],
            out[1][:rows],
            out[2][:, :rows],
            [row[column == number] for number in range(NUM_CATEGORICAL)],
            [_facts(rows, *of_column) for of_column in counted.T.tolist()],
        )
        return Taken(parsed, lines, odd_lines, damage)

    def _parse_text(
        self, text: text_files.Text, out: tuple[Array, ...], row: int
    ) -> tuple[int, int, list[Array]]:
        """Parse lines into rows from `row` on: the row behind them, how many lines there were, and
        what was odd, which is good until the next call."""
        from trainmark.clicklog.sources import criteo_kernel

        table = (self._table, TABLE_START, self.recipe.smallest)
        before = out[-1].copy()
        room = (64, 4096, 4096)
        while True:
            odd = tuple(
                _scratch.array(f"odd {width}", (size, width), np.int64)
                for size, width in zip(room, (4, 3, 2), strict=True)
            )
            rows, lines, *needed = criteo_kernel.parse(
                text.buffer, text.length, table, out, odd, row
            )
            if all(map(int.__le__, needed, room)):
                found = [entries[:size] for entries, size in zip(odd, needed, strict=True)]
                return rows, lines, found
            # Many odd lines: once more, with enough room to list them.
            room = tuple(map(max, needed, room))
            out[-1][...] = before

    def _parse_with_arrow(self, texts: Iterable[text_files.Text], num_bytes: int) -> Taken:
        from trainmark.clicklog.sources import criteo_arrow

        [text] = texts
        raw = bytes(text).replace(b"\r\n", b"\n")
        columns = criteo_arrow.read(raw)
        if columns is not None:
            labels, numbers, missing, categorical, zeros = columns
            bits = np.where(missing, self._missing, transformed_bits(numbers, self.recipe))
            pairs = zip(numbers.T, missing.T, strict=True)
            facts = [self._count(column[~absent], int(absent.sum())) for column, absent in pairs]
            parsed = CriteoColumns(labels, bits, categorical, zeros, facts)
            return Taken(parsed, text.lines, [], text.damage)
        # Something is odd: sort it out line by line.
        good: list[Line] = []
        odd: list[OddLine] = []
        for number, line in enumerate(_split_lines(bytes(text))):
            row = parse_line(line, self.recipe)
            if row.problem:
                odd.append(OddLine(line, number, len(good)))
            else:
                good.append(row)
        parsed = self._with_lines(no_rows(), [(0, row) for row in good])
        return Taken(parsed, text.lines, odd, text.damage)

    # --- what is worth knowing of integers

    def _with_lines(self, parsed: CriteoColumns, rows: Sequence[tuple[int, Line]]) -> CriteoColumns:
        """Put rows in before those with the given numbers, and count theirs."""
        facts = []
        for column, before in enumerate(parsed.facts):
            present = [row.integers[column] for _, row in rows]
            known = np.array([number for number in present if number is not None], np.int64)
            facts.append(before + self._count(known, len(present) - len(known)))
        return dataclasses.replace(parsed.with_lines(rows), facts=facts)

    def _count(self, present: Array, missing: int) -> NumberFacts:
        if not len(present):
            return NumberFacts(missing, None, None)
        too_small = np.count_nonzero(present < self.recipe.smallest)
        ends = (int(present.min()), int(present.max()))
        return NumberFacts(missing, *ends, became_zero=int(too_small))

    # --- odd lines

    def _judge(self, start: Position, taken: Taken) -> tuple[list[BadRow], list[tuple[int, Line]]]:
        """What is really bad about lines that a fast parser did not take, and what to keep."""
        path = str(self.files[start.file])
        bad: list[BadRow] = []
        kept: list[tuple[int, Line]] = []
        for odd in taken.odd_lines:
            row = parse_line(odd.text, self.recipe)
            if row.problem:
                bad.append(BadRow(path, 1 + odd.line, row.problem))
            if not row.problem or (self.bad_rows == "keep" and row.label is not None):
                kept.append((odd.before, row))
        if taken.damage:
            bad.append(BadRow(path, 1 + taken.lines, taken.damage))
        elif not start.offset and not taken.lines:
            bad.append(BadRow(path, 1, "the file is empty"))
        return bad, kept


def _lacks_label(path: Path) -> bool:
    with text_files.TextFile(path) as file:
        start = np.zeros(text_files.MAX_LINE_BYTES, np.uint8)
        line = bytes(start[: file.read_into(start)]).partition(b"\n")[0]
    return line.count(b"\t") == NUM_NUMERICAL + NUM_CATEGORICAL - 1


def _with_labels(text: text_files.Text) -> text_files.Text:
    """Lines with a label of 0 before their 39 fields."""
    raw = bytes(text)
    if not raw:  # behind the last line
        return text
    labelled = LABEL_OF_NONE + raw.replace(b"\n", b"\n" + LABEL_OF_NONE)
    if raw.endswith(b"\n"):
        labelled = labelled[: -len(LABEL_OF_NONE)]
    buffer = np.frombuffer(labelled + bytes(text_files.PADDING), np.uint8)
    return dataclasses.replace(text, buffer=buffer, length=len(labelled))


def _label_table(labels: NDArray[np.uint8]) -> Any:
    import pyarrow as pa

    return pa.table({LABEL: labels.copy()})  # which are the next block's, too


def _split_lines(text: bytes) -> Iterator[bytes]:
    for line in io.BytesIO(text):
        yield line.removesuffix(b"\n")


def _facts(rows: int, missing: int, low: int, high: int, small: int) -> NumberFacts:
    """What the kernel counted of a column of so many rows."""
    if missing == rows:
        return NumberFacts(missing, None, None)
    return NumberFacts(missing, low, high, became_zero=small - missing)
