"""Input that can only be read from its start on: unpacked ahead of those who parse it.

Each of several files, or of the groups of rows that a file has, is unpacked by a thread of its own,
into files of a piece each, which the processes that parse take and remove. The rows of a file have
numbers when those of all files before it have theirs; so the pieces of later files wait on disk,
within a share of what is free there. Beyond that share, the file whose turn it is goes on alone, a
few pieces ahead of those who parse.
"""

import itertools
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from trainmark.clicklog.sources.source import Piece, Position, Room

DISK_SHARE = 4
"""What waits may take one part in so many of what is free."""
PIECES_AHEAD = 2
"""For each thread, of the file whose turn it is, where that part is taken."""


class Unpacker:
    """Unpacks files, several at a time.

    Args:
        places: where to begin, in their order: in each file, or several times in one.
        unpack: the pieces from a place on to the next, or to the end of its file, each in a file of
            its own.
        room: where these are, and how many threads write them.
    """

    def __init__(
        self,
        places: Sequence[Position],
        unpack: Callable[[Position], Iterator[Piece]],
        room: Room,
    ) -> None:
        self._unpack = unpack
        self._next = dict(itertools.pairwise(places))
        self._ready = {place: SimpleQueue[Piece | BaseException]() for place in places}
        self._turn: Position | None = None
        self._changed = threading.Condition()
        self._waiting = self._most = 0
        self._ahead = PIECES_AHEAD * room.threads
        self._stopped = False
        if places:
            shutil.rmtree(room.folder, ignore_errors=True)  # of a run that was killed
            room.folder.mkdir()
            self._most = shutil.disk_usage(room.folder).free // DISK_SHARE
        self._pool = ThreadPoolExecutor(room.threads)
        for place in places:
            self._pool.submit(self._work, place)

    def __enter__(self) -> "Unpacker":
        return self

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._pool.shutdown(cancel_futures=True)

    def pieces(self, place: Position) -> Iterator[Piece]:
        """Those from the place whose turn it is."""
        with self._changed:
            self._turn = place
            self._changed.notify_all()
        ended = False
        while not ended:
            piece = self._ready[place].get()
            if isinstance(piece, BaseException):
                raise piece
            with self._changed:
                self._waiting -= piece.disk_bytes
                self._changed.notify_all()
            yield piece
            ended = piece.stop.file > place.file or piece.stop == self._next.get(place)

    def _work(self, place: Position) -> None:
        try:
            for piece in self._unpack(place):
                with self._changed:
                    self._waiting += piece.disk_bytes
                self._ready[place].put(piece)
                with self._changed:
                    self._changed.wait_for(lambda: self._may_go_on(place))
                if self._stopped:
                    return
        except BaseException as error:
            self._ready[place].put(error)

    def _may_go_on(self, place: Position) -> bool:
        if self._stopped or self._waiting < self._most:
            return True
        return place == self._turn and self._ready[place].qsize() < self._ahead
