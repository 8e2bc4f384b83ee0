"""Processes that share the work of a phase.

They are forked: each has a copy of all that this process knew, so nothing but the names of methods,
small arguments and small results goes between them; rows go through files. Threads would share one
interpreter's lock, and one list of memory pages, which 16 of them spend most of their time on.
"""

import ctypes
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import TracebackType
from typing import Any

Call = Callable[..., Any]
"""Runs a method, given by its name, with arguments."""

_PR_SET_PDEATHSIG = 1


class Workers:
    """Processes that run methods of an object, each of a copy of its own. A single worker is no
    process: its methods run in a thread of this one.

    Args:
        served: the object.
        count: how many.
    """

    def __init__(self, served: Any, count: int) -> None:
        self._processes: list[Any] = []
        self._idle: SimpleQueue[Call] = SimpleQueue()
        if count == 1:
            self._idle.put(lambda method, *arguments: getattr(served, method)(*arguments))
        else:
            for _ in range(count):
                self._idle.put(self._forked(served))
        self._threads = ThreadPoolExecutor(count)

    def _forked(self, served: Any) -> Call:
        context = get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(served, theirs, os.getpid()), daemon=True)
        with warnings.catch_warnings():
            # Of threads that a fork does not copy: nothing that they do is needed there.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        self._processes.append(process)

        def call(method: str, *arguments: Any) -> Any:
            try:
                ours.send((method, arguments))
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()  # all that was asked for is done, or nobody wants it any longer
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.join()

    @contextmanager
    def one(self) -> Iterator[Call]:
        """A worker for several calls in turn."""
        worker = self._idle.get()
        try:
            yield worker
        finally:
            self._idle.put(worker)

    def submit(self, method: str, *arguments: Any) -> "Future[Any]":
        """Run a method in the next worker that is free."""

        def run() -> Any:
            with self.one() as worker:
                return worker(method, *arguments)

        return self._threads.submit(run)

    def each(self, method: str, arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
        """The results of one call for each tuple of arguments, in their order."""
        return [future.result() for future in [self.submit(method, *each) for each in arguments]]


def _serve(served: Any, calls: Connection, parent: int) -> None:
    """What a process does until it is killed, or its parent has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent will end it
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    while os.getppid() == parent:
        try:
            method, arguments = calls.recv()
        except EOFError:
            return
        try:
            reply = (True, getattr(served, method)(*arguments))
        except BaseException as error:
            error.add_note("".join(traceback.format_tb(error.__traceback__)))
            reply = (False, error)
        try:
            calls.send(reply)
        except Exception as error:  # an error that cannot be sent
            calls.send((False, RuntimeError(f"{reply[1]!r} ({error})")))
