"""Waiting for what another thread or process does, however busy the machine is."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(question: Callable[[], T], *, pause: float = 0.01) -> T:
    """Its first answer that is true; a test that gets none in five minutes fails."""
    deadline = time.monotonic() + 300
    while not (answer := question()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(pause)
    return answer
