"""Requests that wait for a model, which works in a thread of its own.

Requests that arrive while the model is busy are scored together as soon as it is free: a lone
client waits for nobody, and many clients share the cost of a pass through the model. It is the
same queue for all protocols.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainmark.contract import Scorer
from trainmark.errors import InputError
from trainmark.inference.server.limits import (
    Limits,
    TooLargeError,
    TooLateError,
    TooManyError,
)

TOGETHER_BYTES = 1 << 20
"""Requests are scored together up to this size."""
GONE = "The client has left."


@dataclass(frozen=True)
class Loaded:
    """A model in memory."""

    scorer: Scorer
    version: str = "1"


def _stays() -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Question:
    """A request, whatever protocol it came by. Both functions are called in the model's thread."""

    size: int
    """Of its body, in bytes."""
    read: Callable[[Loaded], Sized]
    """Its rows."""
    write: Callable[[Loaded, NDArray[Any]], Any]
    """The answer, given the scores of its rows."""
    has_left: Callable[[], bool] = _stays
    """Whether nobody waits for the answer any longer."""


class Queue:
    """Requests for one model.

    Its thread goes on from pass to pass as long as requests wait, without a word to the event loop
    between them but the answers.

    Args:
        loaded: what scores, asked before each pass: one pass is never by two versions.
        limits: how many may wait, for how long.
        scored: told the rows of each pass.
    """

    def __init__(
        self,
        loaded: Callable[[], Loaded],
        limits: Limits,
        scored: Callable[[int], None] = lambda rows: None,
    ) -> None:
        self._loaded, self._limits, self._scored = loaded, limits, scored
        self._waiting: deque[_Waiting] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._works, self._lock = False, Lock()

    def __len__(self) -> int:
        return len(self._waiting)

    async def answer(self, question: Question) -> Any:
        """The answer to a request; raises what is wrong with it."""
        if len(self._waiting) >= self._limits.waiting:
            raise TooManyError("Too many requests are waiting. Send this one again in a moment.")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting.append(_Waiting(question, future))
        self._wake()
        limit = loop.call_later(self._limits.seconds, self._give_up, future)
        try:
            return await future
        finally:
            limit.cancel()

    def _give_up(self, future: "asyncio.Future[Any]") -> None:
        error = TooLateError(f"The answer took longer than {self._limits.seconds:g} s.")
        _settle(future, error)

    def _wake(self) -> None:
        with self._lock:
            if not self._works:
                self._works = True
                self._thread.submit(self._work)

    def _work(self) -> None:
        """In the model's thread, until nothing waits."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._works = False
                    return
            taken = [one for one in self._take() if not one.future.done()]
            left = [one for one in taken if one.question.has_left()]
            taken = [one for one in taken if one not in left]
            found = self._answers([one.question for one in taken]) if taken else []
            _tell(taken + left, found + [InputError(GONE)] * len(left))

    def _answers(self, questions: list[Question]) -> list[Any]:
        try:
            found, rows = answers(self._loaded(), questions, self._limits.rows)
            self._scored(rows)
            return found
        except Exception as error:  # the thread must go on, and nobody may wait for ever
            return [error] * len(questions)

    def _take(self) -> list["_Waiting"]:
        taken = [self._waiting.popleft()]
        size = taken[0].question.size
        while self._waiting and size + self._waiting[0].question.size <= TOGETHER_BYTES:
            taken.append(self._waiting.popleft())
            size += taken[-1].question.size
        return taken


@dataclass(frozen=True, eq=False)
class _Waiting:
    question: Question
    future: "asyncio.Future[Any]"


def _tell(asked: list[_Waiting], found: list[Any]) -> None:
    """In the event loop, which alone may touch futures."""
    with suppress(RuntimeError):  # a loop that has ended
        if asked:
            asked[0].future.get_loop().call_soon_threadsafe(_deliver, asked, found)


def _deliver(asked: list[_Waiting], found: list[Any]) -> None:
    for one, answer in zip(asked, found, strict=True):
        _settle(one.future, answer)


def _settle(future: "asyncio.Future[Any]", answer: Any) -> None:
    if future.done():  # the client has gone, or its time is over
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def answers(loaded: Loaded, questions: Sequence[Question], most_rows: int) -> tuple[list[Any], int]:
    """To each request its answer or what went wrong; and the rows that were scored.

    All rows go through the model together.
    """
    requests = [_attempt(_read, loaded, question, most_rows) for question in questions]
    good = [request for request in requests if not isinstance(request, Exception)]
    try:
        scores = loaded.scorer.score(good) if good else np.empty(0)
    except Exception as error:  # whoever's fault it is
        if len(questions) == 1:
            return [error], 0
        alone = [answers(loaded, [question], most_rows) for question in questions]
        return [found for (found,), _ in alone], sum(rows for _, rows in alone)
    found, begin = [], 0
    for question, request in zip(questions, requests, strict=True):
        if isinstance(request, Exception):
            found.append(request)
            continue
        end = begin + len(request)
        found.append(_attempt(_write, loaded, question, scores[begin:end]))
        begin = end
    return found, begin


def _attempt(function: Any, *arguments: Any) -> Any:
    """What a function returns or raises: an error of one request is no other's."""
    try:
        return function(*arguments)
    except Exception as error:
        return error


def _read(loaded: Loaded, question: Question, most_rows: int) -> Sized:
    rows = question.read(loaded)
    if not len(rows):
        raise InputError("The request has no rows, expected at least one.")
    if len(rows) > most_rows:
        raise TooLargeError(
            f"The request has {len(rows):,} rows, expected at most {most_rows:,}. Send fewer at a "
            "time, or score a file with trainmark predict."
        )
    return rows


def _write(loaded: Loaded, question: Question, scores: NDArray[Any]) -> Any:
    if not np.isfinite(scores).all():
        raise ArithmeticError("the model gave a score that is not finite")
    return question.write(loaded, scores)
