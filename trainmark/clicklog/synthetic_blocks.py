"""A synthetic log, written block by block: each of several processes makes rows, and puts them into
the files that all of them share."""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from trainmark.clickdata.planted import BLOCK_ROWS
from trainmark.clicklog.engine.splits import Split
from trainmark.clicklog.synthetic_files import Encode, Format
from trainmark.clicklog.synthetic_logs import Counts, Log


@dataclass(frozen=True)
class Block:
    """Some rows of a piece, which is a day or a split."""

    number: int
    """Of the block, in the log."""
    piece: Split
    start: int
    stop: int


Made = tuple[Block, Counts]
"""A block that is written, and how many of its rows have which probability."""


def written(
    make_log: Callable[[], Log], form: Format, pieces: Sequence[Split], folder: Path, workers: int
) -> Generator[Made]:
    """Write all rows of the pieces, in processes where there is enough to make; to be closed.

    Args:
        make_log: called in each process.
    """
    for piece in pieces:
        form.create(folder, piece)
    given = (make_log, form, folder, _Places())
    if workers == 1 or sum(p.stop - p.start for p in pieces) < 4 * workers * BLOCK_ROWS:
        maker = _Maker(*given)
        yield from map(maker.make, _blocks(pieces))
    else:
        yield from _in_processes(given, _blocks(pieces), workers)


def _blocks(pieces: Sequence[Split]) -> Iterator[Block]:
    """Of the rows that share a random stream, those that lie in one piece."""
    numbers = count()
    for piece in pieces:
        start = piece.start
        while start < piece.stop:
            end = min(piece.stop, (start // BLOCK_ROWS + 1) * BLOCK_ROWS)
            yield Block(next(numbers), piece, start, end)
            start = end


# --- in one process


class _Places:
    """Where blocks begin in their piece, told from process to process: a text's length is known
    when it is made."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self._changed, self._stopped = context.Condition(), context.Event()
        self._next, self._end = (context.Value("q", 0, lock=False) for _ in range(2))

    def take(self, block: Block, extent: int) -> int:
        """The place of a block, when those before it have theirs."""
        with self._changed:
            while not self._changed.wait_for(lambda: self._next.value == block.number, timeout=1):
                if self._stopped.is_set():
                    raise RuntimeError("A block before this one was not made.")
            place: int = 0 if block.start == block.piece.start else self._end.value
            self._end.value = place + extent
            self._next.value += 1
            self._changed.notify_all()
        return place

    def stop(self) -> None:
        """Let nobody wait any longer."""
        self._stopped.set()


class _Maker:
    """Makes blocks and writes them."""

    def __init__(
        self, make_log: Callable[[], Log], form: Format, folder: Path, places: _Places
    ) -> None:
        self._log, self._form, self._folder, self._places = make_log(), form, folder, places
        self._encode: Encode = form.encoder(self._log)

    def make(self, block: Block) -> Made:
        rows, counts = self._log.rows(block.start, block.stop)
        encoded = self._encode(rows)
        place = self._places.take(block, self._form.extent(encoded))
        self._form.write(self._folder, block.piece, place, encoded)
        return block, counts


# --- in several

Given = tuple[Callable[[], Log], Format, Path, _Places]
"""What a maker is made of."""

_maker: _Maker | None = None
"""Of a process that makes rows."""


def _in_processes(given: Given, blocks: Iterator[Block], workers: int) -> Generator[Made]:
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _begin, given)
    ahead: deque[Future[Made]] = deque()
    try:
        for block in blocks:
            ahead.append(pool.submit(_make, block))
            if len(ahead) >= 4 * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        given[-1].stop()
        pool.shutdown(cancel_futures=True)


def _begin(*given: Any) -> None:
    global _maker
    _maker = _Maker(*given)


def _make(block: Block) -> Made:
    if _maker is None:
        raise RuntimeError("This process was not told what to make.")
    return _maker.make(block)
