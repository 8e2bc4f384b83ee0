"""Phase 1: every input file, once, into the store."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainmark.clicklog.engine import store
from trainmark.clicklog.engine.store import BlockRecord
from trainmark.clicklog.engine.work import Work
from trainmark.clicklog.sources.source import BadRows, Piece, Position, Source
from trainmark.errors import InputError


def finished_blocks(work: Work, bad_rows: BadRows) -> list[BlockRecord]:
    """The blocks of an earlier run, up to the first that is lacking or damaged.

    Another way to treat bad rows matters from the first block on that has any.
    """
    next_index = 0

    def wanted(data: dict) -> bool:
        nonlocal next_index
        good = (
            data["index"] == next_index
            and (not data["bad"] or data["bad_rows"] == bad_rows)
            and store.intact(work.blocks, data)
        )
        next_index = next_index + 1 if good else -1
        return good

    # Blocks may have been finished out of order.
    records = sorted(work.block_log.read(), key=lambda data: data["index"])
    kept = {data["index"] for data in records if wanted(data)}
    records = work.block_log.keep(lambda data: data["index"] in kept)
    records.sort(key=lambda data: data["index"])
    return [BlockRecord.from_json(_without_policy(data)) for data in records]


def _without_policy(data: dict) -> dict:
    return {key: value for key, value in data.items() if key != "bad_rows"}


def bad_rows_path(work: Work, index: int) -> Path:
    """Where a block's bad rows are listed."""
    return work.blocks / f"{index:06d}.bad"


class Parser:
    """Parses what is left of the input, in several threads.

    A thread takes the next piece, parses it, waits until the number of its first row is known,
    which is when all earlier pieces are parsed, and writes the block.

    Args:
        advance: called with the bytes of each finished piece.
    """

    def __init__(
        self,
        source: Source,
        work: Work,
        done: Sequence[BlockRecord],
        *,
        seed: int,
        bits: int,
        bad_rows: BadRows,
        piece_bytes: int,
        advance: Callable[[int], None],
    ) -> None:
        self.source, self.work, self.records = source, work, list(done)
        self._seed, self._bits, self._bad_rows = seed, bits, bad_rows
        self._advance = advance
        start = done[-1].stop if done else Position()
        self._pieces: Iterator[Piece] = source.pieces(start, piece_bytes)
        self._lock = threading.Lock()
        self._taken = len(done)
        self._turn = threading.Condition()
        self._numbered = len(done)
        self._rows = done[-1].first_row + done[-1].rows if done else 0
        self._errors: dict[int, BaseException] = {}

    def run(self, threads: int) -> list[BlockRecord]:
        """All blocks, in order. The error of the earliest piece that has one is raised."""
        with ThreadPoolExecutor(threads) as pool:
            for future in [pool.submit(self._work) for _ in range(threads)]:
                future.result()
        if self._errors:
            raise self._errors[min(self._errors)]
        return sorted(self.records, key=lambda record: record.index)

    def _work(self) -> None:
        while True:
            index = -1
            try:
                with self._lock:
                    if self._errors:
                        return
                    index = self._taken
                    piece = next(self._pieces, None)
                    self._taken += 1
                if piece is None:
                    return
                self._handle(index, piece)
            except BaseException as error:
                with self._turn:
                    self._errors[index] = error
                    self._turn.notify_all()
                return

    def _handle(self, index: int, piece: Piece) -> None:
        block = self.source.parse(piece)
        first_row = self._first_row(index, len(block))
        if first_row is None:
            return
        place = {"index": index, "first_row": first_row, "stop": piece.stop}
        if block.bad:
            lines = "".join(f"{bad}\n" for bad in block.bad)
            bad_rows_path(self.work, index).write_text(lines)
        record = store.write(
            self.work.blocks, block, self.source.schema, self._seed, self._bits, place
        )
        self.work.block_log.append(record.to_json() | {"bad_rows": self._bad_rows})
        self.records.append(record)
        self._advance(piece.num_bytes)

    def _first_row(self, index: int, rows: int) -> int | None:
        """Number of the block's first row; None if an earlier piece failed."""
        with self._turn:
            self._turn.wait_for(lambda: self._numbered == index or self._errors)
            if self._numbered != index:
                return None
            first_row = self._rows
            self._rows += rows
            self._numbered += 1
            self._turn.notify_all()
            return first_row


def rows_per_file(records: Sequence[BlockRecord], num_files: int) -> list[int]:
    """Rows of each input file. A block that ends a file says that the next one follows."""
    rows = [0] * num_files
    number = 0
    for record in records:
        rows[number] += record.rows
        number = record.stop.file
    return rows


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
