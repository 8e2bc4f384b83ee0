"""Waiting for what another thread or process does, however busy the machine is."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 300
"""For what takes a moment: a test that waits for longer is taken to hang."""


def wait_until(question: Callable[[], T], *, pause: float = 0.01) -> T:
    """Its first answer that is true; a test that gets none in time fails."""
    deadline = time.monotonic() + PATIENCE_S
    while not (answer := question()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(pause)
    return answer
