"""Requests that wait for a model.

Requests that arrive together, or while the model is busy, are scored together: a lone client waits
for nobody, and many clients share the cost of a pass through the model. It is the same queue for
all protocols.

A pass that takes hardly longer than it takes to wake a thread up is made in the event loop. Others
have a thread of the model's own, so that the server goes on answering meanwhile.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainmark.errors import InputError
from trainmark.inference.server.limits import (
    LeftError,
    Limits,
    RefusalError,
)
from trainmark.scoring import Scorer

TOGETHER_BYTES = 1 << 20
"""Requests are scored together up to this size."""
QUICK_S = 0.005
"""As long as a pass in the event loop may take: two threads that wait for Python's lock cost each
other more."""


@dataclass(frozen=True)
class Loaded:
    """A model in memory."""

    scorer: Scorer
    version: str = "1"


@dataclass(frozen=True, kw_only=True)
class Question:
    """A request, whatever protocol it came by. Its functions may be called in any thread."""

    size: int
    """Bytes of its body."""
    read: Callable[[Loaded], Sized]
    """Reads its rows."""
    write: Callable[[Loaded, NDArray[Any]], Any]
    """Makes the answer from the scores of its rows."""
    has_left: Callable[[], bool] = lambda: False
    """Whether nobody waits for the answer any longer."""


class Queue:
    """Requests for one model.

    The thread goes on from pass to pass as long as requests wait, without a word to the event loop
    between them but the answers. No two passes are made at a time.

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
        self._is_woken = False
        self._quick_bytes = 0
        """Requests of up to so many bytes are quick, to judge by those before."""

    def __len__(self) -> int:
        return len(self._waiting)

    async def answer(self, question: Question) -> Any:
        """The answer to a request; raises what is wrong with it."""
        if len(self._waiting) >= self._limits.waiting:
            raise RefusalError(
                HTTPStatus.TOO_MANY_REQUESTS,
                "Too many requests are waiting. Send this one again in a moment.",
            )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting.append(_Waiting(question, future))
        self._call_soon(loop)
        limit = loop.call_later(self._limits.seconds, self._give_up, future)
        try:
            return await future
        finally:
            limit.cancel()

    def _give_up(self, future: "asyncio.Future[Any]") -> None:
        sentence = f"The answer took longer than {self._limits.seconds:g} s."
        _settle(future, RefusalError(HTTPStatus.GATEWAY_TIMEOUT, sentence))

    def _call_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_woken:
            self._is_woken = True
            loop.call_soon(self._wake, loop)  # when the others that came with it wait, too

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_woken = False
        with self._lock:
            if self._works or not self._waiting:
                return
            self._works = True
        if self._waiting[0].question.size > self._quick_bytes:
            self._thread.submit(self._work)
            return
        _deliver(*self._pass(self._quick_bytes))
        self._works = False
        self._call_soon(loop)

    def _work(self) -> None:
        """In the model's thread, until nothing waits."""
        while True:
            answered = self._pass(TOGETHER_BYTES)
            with self._lock:
                self._works = goes_on = bool(self._waiting)
            _deliver_soon(*answered)  # who asks again at once finds this thread at work, or done
            if not goes_on:
                return

    def _pass(self, most_bytes: int) -> "tuple[list[_Waiting], list[Any]]":
        """The next requests, and their answers."""
        taken = [one for one in self._take(most_bytes) if not one.future.done()]
        left = [one for one in taken if one.question.has_left()]
        taken = [one for one in taken if one not in left]
        questions = [one.question for one in taken]
        began = time.perf_counter()
        found = self._answers(questions) if questions else []
        self._learn(sum(one.size for one in questions), time.perf_counter() - began)
        return taken + left, found + [LeftError()] * len(left)

    def _learn(self, size: int, seconds: float) -> None:
        if seconds > QUICK_S:
            self._quick_bytes = min(self._quick_bytes, size // 2)
        elif seconds < QUICK_S / 2:
            self._quick_bytes = min(max(self._quick_bytes, 2 * size), TOGETHER_BYTES)

    def _answers(self, questions: list[Question]) -> list[Any]:
        try:
            found, rows = answers(self._loaded(), questions, self._limits.rows)
            self._scored(rows)
            return found
        except Exception as error:  # the others go on, and nobody waits forever
            return [error] * len(questions)

    def _take(self, most_bytes: int) -> list["_Waiting"]:
        taken = [self._waiting.popleft()]
        size = taken[0].question.size
        while self._waiting and size + self._waiting[0].question.size <= most_bytes:
            taken.append(self._waiting.popleft())
            size += taken[-1].question.size
        return taken


@dataclass(frozen=True, eq=False)
class _Waiting:
    question: Question
    future: "asyncio.Future[Any]"


def _deliver_soon(asked: list[_Waiting], found: list[Any]) -> None:
    """Deliver in the event loop, which alone may touch futures."""
    with suppress(RuntimeError):  # a loop that has ended
        if asked:
            asked[0].future.get_loop().call_soon_threadsafe(_deliver, asked, found)


def _deliver(asked: list[_Waiting], found: list[Any]) -> None:
    for one, answer in zip(asked, found, strict=True):
        _settle(one.future, answer)


def _settle(future: "asyncio.Future[Any]", answer: Any) -> None:
    if future.done():  # the client has gone, or its time is over
        return
    if isinstance(answer, StopIteration):  # which no future takes
        answer = RuntimeError("the model raised StopIteration")
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def answers(loaded: Loaded, questions: Sequence[Question], most_rows: int) -> tuple[list[Any], int]:
    """The answer to each request, or what went wrong; and how many rows were scored.

    All rows go through the model together.
    """
    requests = [_attempt(_read, loaded, question, most_rows) for question in questions]
    good = [request for request in requests if not isinstance(request, Exception)]
    try:
        scores = loaded.scorer.score(good) if good else np.empty(0)
    except Exception as error:  # one request may have spoilt the pass: try each alone
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
        raise RefusalError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"The request has {len(rows):,} rows, expected at most {most_rows:,}. Send fewer at a "
            "time, or score a file with trainmark predict.",
        )
    return rows


def _write(loaded: Loaded, question: Question, scores: NDArray[Any]) -> Any:
    if not np.isfinite(scores).all():
        raise ArithmeticError("the model gave a score that is not finite")
    return question.write(loaded, scores)
