"""Requests that wait for a model, which works in a thread of its own.

Requests that arrive while the model is busy are scored together as soon as it is free: a lone
client waits for nobody, and many clients share the cost of a pass through the model. It is the
same queue for all protocols.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    async def answer(self, question: Question) -> Any:
        """The answer to a request; raises what is wrong with it."""
        if len(self._waiting) >= self._limits.waiting:
            raise TooManyError("Too many requests are waiting. Send this one again in a moment.")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(question, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())
        try:
            async with asyncio.timeout(self._limits.seconds):
                return await future
        except TimeoutError:
            raise TooLateError(f"The answer took longer than {self._limits.seconds:g} s.") from None

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            taken = [one for one in self._take() if one.is_wanted()]
            if not taken:
                continue
            questions = [one.question for one in taken]
            found, rows = await loop.run_in_executor(
                self._thread, answers, self._loaded(), questions, self._limits.rows
            )
            self._scored(rows)
            for one, answer in zip(taken, found, strict=True):
                if one.future.done():  # the client has gone
                    continue
                if isinstance(answer, Exception):
                    one.future.set_exception(answer)
                else:
                    one.future.set_result(answer)

    def _take(self) -> list["_Waiting"]:
        taken = [self._waiting.popleft()]
        size = taken[0].question.size
        while self._waiting and size + self._waiting[0].question.size <= TOGETHER_BYTES:
            taken.append(self._waiting.popleft())
            size += taken[-1].question.size
        return taken


@dataclass(frozen=True)
class _Waiting:
    question: Question
    future: "asyncio.Future[Any]"

    def is_wanted(self) -> bool:
        """Whether the answer is worth a pass."""
        if not self.future.done() and self.question.has_left():
            self.future.set_exception(InputError(GONE))
        return not self.future.done()


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
