"""Runs an iterator in a process of its own."""

import ctypes
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1


def start(work: Callable[..., None], *given: Any) -> Any:
    """A forked process that is at work, and knows all that this one does. It ends with it."""
    process = get_context("fork").Process(
        target=_ending_with, args=(os.getpid(), work, *given), daemon=True
    )
    with warnings.catch_warnings():
        # Of threads that a fork does not copy: nothing that they do is needed there.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    return process


def _ending_with(parent: int, work: Callable[..., None], *given: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent will end it
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:
        work(*given)


def iterate(made: Callable[[], Iterator[T]]) -> Iterator[T]:
    """What an iterator gives: the next is made while this one is looked at, no more."""
    ours, theirs = get_context("fork").Pipe()
    process = start(_send, made, theirs)
    theirs.close()
    try:
        while True:
            error, item = _answer(ours)
            if error is not None:
                raise error
            if item is None:
                return
            yield item
    finally:
        process.kill()
        process.join()
        ours.close()


def _answer(to: Connection) -> Any:
    try:
        to.send(None)
        return to.recv()
    except (EOFError, OSError):  # the second, if what was sent is still unread
        raise RuntimeError(
            "A process that read has ended: was it killed, for its memory?"
        ) from None


def _send(made: Callable[[], Iterator[Any]], to: Connection) -> None:
    try:
        for item in made():
            to.recv()
            to.send((None, item))
        to.recv()
        to.send((None, None))
    except Exception as error:
        to.recv()
        to.send((error, None))
