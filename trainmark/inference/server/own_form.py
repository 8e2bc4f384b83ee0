"""Requests and answers in JSON of our own: what `Scorer.read` takes, and a list of scores."""

import json
from collections.abc import Callable
from typing import Any

import pydantic_core
from numpy.typing import NDArray

from trainmark.errors import InputError
from trainmark.inference.server.batching import Loaded, Question


def question(body: bytes, has_left: Callable[[], bool]) -> Question:
    """A request to score what its body holds."""
    return Question(
        size=len(body),
        read=lambda loaded: loaded.scorer.read(parse(body)),
        write=_write,
        has_left=has_left,
    )


def _write(loaded: Loaded, scores: NDArray[Any]) -> bytes:
    return pydantic_core.to_json({loaded.scorer.answer: scores.tolist()})


def parse(body: bytes) -> dict[str, Any]:
    """A JSON object. NaN and infinities, which are no JSON, are values that no feature takes."""
    try:
        # Several times as fast as the standard library, and as strict but for its recursion.
        data = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError:
        data = _by_the_standard_library(body)
    if not isinstance(data, dict):
        raise InputError(f"The body is a {type(data).__name__}, expected a JSON object.")
    return data


def _by_the_standard_library(body: bytes) -> Any:
    """For what is not JSON: its sentences name the place, and the caller's the value."""
    try:
        data = json.loads(body, parse_constant=NoNumber)
        json.dumps(data, ensure_ascii=False, default=repr).encode()  # half a character is no text
    except (ValueError, RecursionError) as error:
        raise InputError(f"The body is not JSON: {error}.") from None
    return data


class NoNumber:
    """NaN or an infinity."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name
