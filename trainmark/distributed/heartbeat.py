"""Ranks listen to one another: one that falls silent ends the job within a minute, in a sentence.

A rank that dies is noticed by the launcher on its machine, and by its partners when their
connection breaks. One that is stopped, or whose machine vanishes, breaks nothing: collectives wait
for it, many minutes. So every rank writes a growing count to the launcher's store, and watches that
of the next rank.
"""

import os
import threading
import time

from trainmark.distributed.launched import (
    LOST_RANK,
    STORE_TIMEOUT,
    connect,
    first_cause,
    is_first,
    key,
    leave_cause,
    repeat,
    say,
)

BEAT_S = 5.0
SILENCE_S = 40.0
"""A rank that has not been heard of for this long is taken for dead. Long, because a busy
interpreter may delay a beat; short enough that a job ends within a minute."""
PATIENCE_S = 5.0
"""How long a rank may take to end by itself once another has told why the job ends."""
GONE = "gone"


class Heartbeat:
    """Ends this rank when the next one has fallen silent, or any has failed.

    One thread talks to the store, which may hang with the network; the other only looks at the
    clock. Both go on while the main thread waits in a collective.
    """

    def __init__(self, *, beat_s: float = BEAT_S, silence_s: float = SILENCE_S) -> None:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._listens_to = (rank + 1) % ranks
        self._mine, self._next = key(f"beat/{rank}"), key(f"beat/{self._listens_to}")
        self._beat_s, self._silence_s = beat_s, silence_s
        self._heard_at = time.monotonic()
        self._cause: dict[str, str] | None = None
        self._ended = threading.Event()
        self._talker = threading.Thread(target=self._talk, daemon=True)
        self._talker.start()
        threading.Thread(target=self._judge, daemon=True).start()

    def stop(self) -> None:
        """Tell the others that this rank ends as planned."""
        self._ended.set()
        self._talker.join(timeout=STORE_TIMEOUT.total_seconds())

    def _talk(self) -> None:
        store, beat, heard = connect(), 0, ""
        while store is not None:
            try:
                leaving = self._ended.wait(self._beat_s)
                beat += 1
                store.set(self._mine, GONE if leaving else str(beat))
                now = store.get(self._next).decode() if store.check([self._next]) else heard
                self._cause = first_cause(store)
            except RuntimeError:
                return  # the store is gone: the other thread ends this rank
            if leaving:
                return
            if now != heard or now == GONE:
                heard, self._heard_at = now, time.monotonic()

    def _judge(self) -> None:
        looked_at, told_at = time.monotonic(), None
        while not self._ended.wait(self._beat_s / 2):
            now = time.monotonic()
            if now - looked_at > self._silence_s / 2:  # this process has slept: nobody is to blame
                self._heard_at, told_at = now, None
            looked_at = now
            if now - self._heard_at > self._silence_s:
                self._end_for_silence(now - self._heard_at)
            if self._cause is not None:
                told_at = told_at or now
                if now - told_at > PATIENCE_S:
                    repeat(self._cause)
                    os._exit(1)  # the main thread hangs in a collective

    def _end_for_silence(self, silence: float) -> None:
        store = connect()
        if is_first(store):
            error = ConnectionError(
                f"rank {self._listens_to} has not been heard of for {silence:.0f} s: its process "
                "is stopped or hangs, or its machine or the network between is down."
            )
            leave_cause(store, error)
            say(error, debug=False)
        os._exit(LOST_RANK)  # the main thread hangs in a collective
