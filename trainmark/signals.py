"""Ctrl-C and SIGTERM ask a run to stop at the next step, so that it can save first."""

import signal
from types import FrameType
from typing import Any


class StopRequest:
    """While entered, the first signal is a request; a second one ends the process at once."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.signal_number = 0
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        return self.signal_number != 0

    def __enter__(self) -> "StopRequest":
        try:
            self._previous = {s: signal.signal(s, self._note) for s in self.SIGNALS}
        except ValueError:  # not in the main thread: its owner handles signals
            self._previous = {}
        return self

    def __exit__(self, *exc: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
