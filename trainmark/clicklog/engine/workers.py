"""Processes that share the work of a phase.

They are forked: each has a copy of all that this process knew, so nothing but the names of methods,
small arguments and small results goes between them; rows go through files. Threads would share one
interpreter's lock, and one list of memory pages, which 16 of them spend most of their time on.
"""

import gc
import itertools
import os
import resource
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from queue import PriorityQueue
from typing import Any

from trainmark.clicklog.sources import apart
from trainmark.errors import InputError

Call = Callable[..., Any]
"""Runs a method, given by its name, with arguments."""

STOPPED = "The work was stopped."


class Workers:
    """Processes that run methods of an object, each of a copy of its own. A single worker is no
    process: its methods run in a thread of this one.

    Args:
        served: the object.
        count: how many.
    """

    def __init__(self, served: Any, count: int) -> None:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a column's files in every block
        self._processes: list[Any] = []
        self.calls: list[Call] = [lambda method, *given: getattr(served, method)(*given)]
        """One for each worker, for those who need the same one again; one at a time."""
        if count > 1:
            self.calls = [self._forked(served) for _ in range(count)]
        self._waiting: PriorityQueue[_Task] = PriorityQueue()
        self._numbers = itertools.count()
        self._threads: list[threading.Thread] = []
        self._lock, self._stopped = threading.Lock(), False

    def _forked(self, served: Any) -> Call:
        ours, theirs = get_context("fork").Pipe()
        process = apart.start(_serve, served, theirs)
        theirs.close()
        self._processes.append(process)

        def call(method: str, *given: Any) -> Any:
            try:
                ours.send((method, given))
                done, result = ours.recv()
            except (EOFError, OSError):
                raise RuntimeError(
                    "A process that shared the work has ended: was it killed, for its memory?"
                ) from None
            if not done:
                raise result
            return result

        return call

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        for thread in self._threads:
            thread.join()
        for process in self._processes:
            process.join()

    def stop(self) -> None:
        """End the processes: all that was asked of them is done, or nobody wants it any longer."""
        with self._lock:
            if not self._stopped:
                for _ in self._threads:  # behind what waits, which fails by then
                    self._waiting.put(_Task(sys.maxsize, next(self._numbers), None))
            self._stopped = True
        for process in self._processes:
            process.kill()

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Stop after an error, so that others who wait for results get one, too."""
        try:
            yield
        except BaseException:
            self.stop()
            raise

    def each(self, turn: int, method: str, arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
        """The results of one call for each tuple of arguments, in their order.

        Args:
            turn: calls of a smaller one go before others that wait.
        """
        tasks = [_Task(turn, next(self._numbers), (method, given)) for given in arguments]
        with self._lock:
            if self._stopped:
                raise RuntimeError(STOPPED)
            if not self._threads:
                self._threads = [threading.Thread(target=self._run, args=[c]) for c in self.calls]
                for thread in self._threads:
                    thread.start()
            for task in tasks:
                self._waiting.put(task)
        return [task.result.result() for task in tasks]

    def _run(self, worker: Call) -> None:
        while (task := self._waiting.get()).call is not None:
            try:
                if self._stopped:
                    raise RuntimeError(STOPPED)
                task.result.set_result(worker(task.call[0], *task.call[1]))
            except BaseException as error:
                task.result.set_exception(error)


@dataclass(order=True)
class _Task:
    turn: int
    number: int
    call: tuple[str, tuple[Any, ...]] | None = field(compare=False)
    """Method and arguments; None: there is nothing left to do."""
    result: "Future[Any]" = field(compare=False, default_factory=Future)


def _serve(served: Any, calls: Connection) -> None:
    """What a process does until it is killed, or its parent has ended."""
    gc.freeze()  # to look for garbage in what the parent knew would copy all of it
    parent = os.getppid()
    while os.getppid() == parent:
        try:
            method, arguments = calls.recv()
        except EOFError:
            return
        try:
            reply = (True, getattr(served, method)(*arguments))
        except BaseException as error:
            if not isinstance(error, InputError):  # a sentence for people
                error.add_note("".join(traceback.format_tb(error.__traceback__)))
            reply = (False, error)
        try:
            calls.send(reply)
        except Exception as error:  # an error that cannot be sent
            calls.send((False, RuntimeError(f"{reply[1]!r} ({error})")))
