"""Ctrl-C, SIGTERM and a closed terminal ask a run to stop at the next step; it saves first."""

import os
import signal
import time
from types import FrameType
from typing import Any

SAME_REQUEST_S = 5.0


def stop_signals() -> list[signal.Signals]:
    """Those that ask for an end; not a closed terminal, SIGHUP, where `nohup` has it ignored."""
    hung_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hung_up]


class StopRequest:
    """While entered, the first signal is a request; a second one ends the process at once.

    To a rank, one request may come twice: from the scheduler, which signals every process of a
    job, and from the launcher, which passes on what it got.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self._previous: dict[int, Any] = {}
        self._same_request_s = SAME_REQUEST_S if "TORCHELASTIC_RUN_ID" in os.environ else 0.0
        self._asked_at = 0.0

    @property
    def requested(self) -> bool:
        return self.signal_number != 0

    def __enter__(self) -> "StopRequest":
        try:
            self._previous = {s: signal.signal(s, self._note) for s in stop_signals()}
        except ValueError:  # not in the main thread: its owner handles signals
            self._previous = {}
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End by the signal where it came because another rank had died: the sender tells why."""
        self._restore()
        if self.requested and isinstance(error, Exception):
            # Here, because who waits for signals may not need torch.
            from trainmark.distributed.launched import is_echo

            if is_echo(error):
                signal.raise_signal(self.signal_number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.signal_number, self._asked_at = number, time.monotonic()
        elif time.monotonic() - self._asked_at >= self._same_request_s:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
