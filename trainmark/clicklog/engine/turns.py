"""Items that several processes share, of which something has to be done in order."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from trainmark.clicklog.engine.workers import Call, Workers


class Turns:
    """Hands out items, each to the next process that is free. Whoever works on one waits for its
    turn where it has to know what the items before it came to.

    Args:
        items: they are taken one at a time.
        first: the number of the first one.
    """

    def __init__(self, items: Iterator[Any], first: int = 0) -> None:
        self._items = items
        self._taken = self._next = first
        self._taking, self._changed = threading.Lock(), threading.Condition()
        self._errors: dict[int, BaseException] = {}

    def run(
        self,
        workers: Workers,
        work: Callable[[Call, int, Any], None],
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        """Work on all items; the error of the earliest one that has one is raised.

        Args:
            work: is given a worker, an item's number and the item.
            meanwhile: called once in this thread.
        """
        with workers, ThreadPoolExecutor(len(workers.calls)) as pool:
            try:
                threads = [pool.submit(self._work, call, work) for call in workers.calls]
                meanwhile()
                wait(threads)
            except BaseException as error:  # Ctrl-C: no thread takes another item, or waits for one
                workers.stop()
                self._fail(-1, error)
                raise
        if self._errors:
            raise self._errors[min(self._errors)]

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """Wait until all items before this one have had their turn; one at a time has it."""
        with self._changed:
            self._changed.wait_for(lambda: self._next == number or self._failed_before(number))
            if self._failed_before(number):
                raise _EarlierError
            yield
            self._next += 1
            self._changed.notify_all()

    def _failed_before(self, number: int) -> bool:
        return min(self._errors, default=number) < number

    def _work(self, call: Call, work: Callable[[Call, int, Any], None]) -> None:
        while True:
            number = -1
            try:
                with self._taking:
                    if self._errors:
                        return
                    number = self._taken
                    item = next(self._items, None)
                    self._taken += 1
                if item is None:
                    return
                work(call, number, item)
            except _EarlierError:
                return
            except BaseException as error:
                self._fail(number, error)
                return

    def _fail(self, number: int, error: BaseException) -> None:
        with self._changed:
            self._errors[number] = error
            self._changed.notify_all()


class _EarlierError(Exception):
    """An earlier item failed: the turn will not come."""
