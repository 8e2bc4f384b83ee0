"""Phase 1: every input file, once, into the store."""

import importlib
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainmark.clicklog.engine import store
from trainmark.clicklog.engine.store import BlockRecord
from trainmark.clicklog.engine.turns import Turns
from trainmark.clicklog.engine.work import Work
from trainmark.clicklog.engine.workers import Call, Workers
from trainmark.clicklog.sources.rows import BadRow
from trainmark.clicklog.sources.source import BadRows, Piece, Position, Room, Source, stop_at
from trainmark.errors import InputError


def finished_blocks(work: Work, bad_rows: BadRows) -> list[BlockRecord]:
    """The blocks of an earlier run, up to the first that is lacking or damaged.

    Another way to treat bad rows matters from the first block on that has any.
    """
    good: list[dict[str, Any]] = []
    # Blocks may have been finished out of order.
    for data in sorted(work.block_log.read(), key=lambda data: data["index"]):
        is_alike = not data["bad"] or data["bad_rows"] == bad_rows
        if data["index"] != len(good) or not is_alike or not store.intact(work.blocks, data):
            break
        good.append(data)
    work.block_log.keep(lambda data: data["index"] < len(good))
    for data in good:
        del data["bad_rows"]
    return list(map(BlockRecord.from_json, good))


def bad_rows_path(work: Work, index: int) -> Path:
    """Where a block's bad rows are listed."""
    return work.blocks / f"{index:06d}.bad"


@dataclass(frozen=True)
class _Parsed:
    """What is to be known of a piece before it can be written."""

    rows: int
    lines: int
    bad: BadRow | None
    """The first one, its line counted within the piece."""


class _Blocks:
    """Makes blocks of pieces, one after the other, in a process of its own."""

    def __init__(self, source: Source, work: Work, seed: int, bits: int) -> None:
        self._source, self._work, self._seed, self._bits = source, work, seed, bits

    def parse(self, piece: Piece) -> _Parsed:
        self._rows = block = self._source.parse(piece)
        return _Parsed(len(block), block.lines, next(iter(block.bad), None))

    def write(self, place: dict[str, Any], first_line: int) -> BlockRecord:
        """Write what was parsed last.

        Args:
            place: index, first_row and stop of the block's record.
        """
        block = self._rows
        if block.bad:
            lines = "".join(f"{_in_file(bad, first_line)}\n" for bad in block.bad)
            bad_rows_path(self._work, place["index"]).write_text(lines)
        return store.write(
            self._work.blocks, block, self._source.schema, self._seed, self._bits, place
        )


def _in_file(bad: BadRow, first_line: int) -> BadRow:
    return replace(bad, line=first_line - 1 + bad.line)


class Parser:
    """Parses what is left of the input, in several processes.

    Each parses the next piece, waits until the number of its first row is known, which is when all
    earlier pieces are parsed, and writes the block.

    Args:
        done: blocks of an earlier run.
        workers: how many processes.
        memory: bytes that those may take who unpack pieces for them.
    """

    def __init__(
        self,
        source: Source,
        work: Work,
        done: Sequence[BlockRecord],
        *,
        seed: int,
        bits: int,
        piece_bytes: int,
        workers: int,
        memory: int,
    ) -> None:
        self.work, self.records = work, list(done)
        self._bad_rows = source.bad_rows
        self._workers = Workers(_Blocks(source, work, seed, bits), workers)
        start = done[-1].stop if done else Position()
        room = Room(work.folder / "unpacked", workers, memory)
        self._pieces = source.pieces(start, piece_bytes, room)
        self._turns = Turns(self._pieces, first=len(done))
        self._rows = done[-1].first_row + done[-1].rows if done else 0
        self._line = start.line

    def run(self, advance: Callable[[int], None]) -> list[BlockRecord]:
        """All blocks, in order. The error of the earliest piece that has one is raised.

        Args:
            advance: called with the bytes of each finished piece.
        """

        def parse(worker: Call, index: int, piece: Piece) -> None:
            self._parse(worker, index, piece)
            advance(piece.num_bytes)

        def load() -> None:  # what is needed soon: it takes a quarter of a second
            importlib.import_module("pyarrow.parquet")

        with closing(self._pieces):
            self._turns.run(self._workers, parse, meanwhile=load)
        return sorted(self.records, key=lambda record: record.index)

    def _parse(self, worker: Call, index: int, piece: Piece) -> None:
        parsed: _Parsed = worker("parse", piece)
        with self._turns.turn(index):
            first_row, first_line = self._rows, self._line if piece.start.offset else 1
            if parsed.bad and self._bad_rows == "stop":
                stop_at(_in_file(parsed.bad, first_line))
            self._rows += parsed.rows
            self._line = first_line + parsed.lines
        stop = piece.stop
        if stop.offset:
            stop = replace(stop, line=first_line + parsed.lines)
        place = {"index": index, "first_row": first_row, "stop": stop}
        record: BlockRecord = worker("write", place, first_line)
        self.work.block_log.append(record.to_json() | {"bad_rows": self._bad_rows})
        self.records.append(record)


def rows_per_file(records: Sequence[BlockRecord], num_files: int) -> list[int]:
    """Rows of each input file. A block that ends a file says that the next one follows."""
    rows = [0] * num_files
    number = 0
    for record in records:
        rows[number] += record.rows
        number = record.stop.file
    return rows


def check_rows(work: Work, records: Sequence[BlockRecord]) -> None:
    """Refuse a log of bad lines alone."""
    bad = [record for record in records if record.bad]
    if bad and not any(record.rows for record in records):
        first = bad_rows_path(work, bad[0].index).read_text().partition("\n")[0]
        count = sum(record.bad for record in bad)
        raise InputError(f"All {count:,} lines of the input are bad; the first is {first}.")


def check_labels(records: Sequence[BlockRecord]) -> None:
    """Refuse a label that has more than two values, where --positive names one of them."""
    others = sorted({value for record in records for value in record.other_labels})
    if len(others) > 1:
        named = ", ".join(map(repr, others[:5])) + (", ..." if len(others) > 5 else "")
        raise InputError(
            f"Besides that of --positive, the label should have one value; it has {named}. Is "
            "--positive spelled as in the data? If all others are no clicks, say "
            "label=COLUMN=VALUE in --columns instead."
        )
