"""A synthetic log, written block by block: each of several processes makes rows, and puts them into
the files that all of them share."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmark.clickdata.best_auc import BinCounts
from trainmark.clickdata.planted import BLOCK_ROWS
from trainmark.clicklog.engine.splits import Split
from trainmark.clicklog.engine.turns import Turns
from trainmark.clicklog.engine.workers import Call, Workers
from trainmark.clicklog.synthetic_files import Format
from trainmark.clicklog.synthetic_logs import Log


@dataclass(frozen=True)
class Block:
    """Some rows of a piece, which is a day or a split."""

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
    processes = Workers(_Maker(log, form, folder), workers if is_much else 1)
    turns, end = Turns(_blocks(pieces)), 0

    def make(worker: Call, number: int, block: Block) -> None:
        nonlocal end
        extent, counts = worker("make", block)
        with turns.turn(number):  # a text's length is known when it is made
            place = 0 if block.start == block.piece.start else end
            end = place + extent
            done(block, counts)
        worker("write", place)

    turns.run(processes, make)


def _blocks(pieces: Iterable[Split]) -> Iterator[Block]:
    """Of the rows that share a random stream, those that lie in one piece."""
    for piece in pieces:
        start = piece.start
        while start < piece.stop:
            end = min(piece.stop, (start // BLOCK_ROWS + 1) * BLOCK_ROWS)
            yield Block(piece, start, end)
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
