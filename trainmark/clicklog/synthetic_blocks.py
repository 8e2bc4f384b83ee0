"""A synthetic log, written block by block: each of several processes makes rows, and puts them into
the files that all of them share."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import Condition
from typing import Any

from trainmark.clickdata.best_auc import BinCounts
from trainmark.clickdata.planted import BLOCK_ROWS
from trainmark.clicklog.engine.splits import Split
from trainmark.clicklog.engine.workers import Call, Workers
from trainmark.clicklog.synthetic_files import Format
from trainmark.clicklog.synthetic_logs import Log


@dataclass(frozen=True)
class Block:
    """Some rows of a piece, which is a day or a split."""

    number: int
    """Of the block, in the log."""
    piece: Split
    start: int
    stop: int


def write(
    log: Log,
    form: Format,
    pieces: Sequence[Split],
    folder: Path,
    workers: int,
    done: Callable[[Block, BinCounts], None],
) -> None:
    """Write all rows of the pieces, in processes where there is enough to make.

    Args:
        done: is told each block, and how many of its rows have which probability.
    """
    for piece in pieces:
        form.create(folder, piece)
    is_much = sum(p.stop - p.start for p in pieces) >= 4 * workers * BLOCK_ROWS
    processes, turns = Workers(_Maker(log, form, folder), workers if is_much else 1), Turns(pieces)

    def make_blocks(call: Call) -> None:
        try:
            while (block := turns.next_block()) is not None:
                extent, counts = call("make", block)
                call("write", turns.place_of(block, extent))
                with turns.changed:
                    done(block, counts)
        except BaseException as error:
            turns.stop(error)
            raise

    with processes, ThreadPoolExecutor(len(processes.calls)) as pool, processes.stopping():
        list(pool.map(make_blocks, processes.calls))


class Turns:
    """Hands the blocks of a log out, and says where in its piece each begins: a text's length is
    known when it is made."""

    def __init__(self, pieces: Iterable[Split]) -> None:
        self.changed = Condition()
        self._blocks = _blocks(pieces)
        self._placed = self._end = 0
        self._error: BaseException | None = None

    def next_block(self) -> Block | None:
        with self.changed:
            return next(self._blocks, None)

    def place_of(self, block: Block, extent: int) -> int:
        """The place of a block, when those before it have theirs."""
        with self.changed:
            self.changed.wait_for(lambda: self._error or self._placed == block.number)
            if self._error:
                raise self._error
            place = 0 if block.start == block.piece.start else self._end
            self._end = place + extent
            self._placed += 1
            self.changed.notify_all()
        return place

    def stop(self, error: BaseException) -> None:
        """Let nobody wait for a block that will not be made."""
        with self.changed:
            self._error = self._error or error
            self.changed.notify_all()


def _blocks(pieces: Iterable[Split]) -> Iterator[Block]:
    """Of the rows that share a random stream, those that lie in one piece."""
    numbers = count()
    for piece in pieces:
        start = piece.start
        while start < piece.stop:
            end = min(piece.stop, (start // BLOCK_ROWS + 1) * BLOCK_ROWS)
            yield Block(next(numbers), piece, start, end)
            start = end


class _Maker:
    """Makes blocks in a process, and writes each when its place is known."""

    def __init__(self, log: Log, form: Format, folder: Path) -> None:
        self._log, self._form, self._folder = log, form, folder
        self._made: tuple[Block, Any]

    def make(self, block: Block) -> tuple[int, BinCounts]:
        rows = self._log.rows(block.start, block.stop)
        encoded = self._form.encode(rows)
        self._made = block, encoded
        return self._form.extent(encoded), rows.counts

    def write(self, place: int) -> None:
        block, encoded = self._made
        self._form.write(self._folder, block.piece, place, encoded)
