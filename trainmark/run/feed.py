"""Between the reader and the step: batches are fetched and prepared ahead of their use."""

import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic

import torch

from trainmark.contract import BatchT, PreparedT, Trainer
from trainmark.run.clocks import Clocks
from trainmark.training.transfer import wait_for


class Feed(Generic[BatchT, PreparedT]):
    """Prepared batches in order, each prepared one step before it is used.

    Preparing ahead lets a GPU copy the next batch, and sort its ids, while it computes this one.

    The feed tells the clocks how long the step waited for its input. On a CPU that is the time
    blocked in fetching a batch from the reader; what `prepare` does with it belongs to the step. On
    a GPU it is how long the compute stream stood idle, by two events around it. The first one
    follows the previous step's kernels at once, so that a host that blocks on its reader before it
    can launch anything is seen as well.
    """

    def __init__(
        self,
        batches: Iterator[BatchT],
        trainer: Trainer[BatchT, PreparedT],
        clocks: Clocks,
        device: torch.device,
    ) -> None:
        self._batches, self._trainer = batches, trainer
        self._clocks, self._device = clocks, device
        self._queue: deque[PreparedT] = deque()
        self._more = True
        self._idle: list[tuple[Any, Any]] = []
        """Events of a GPU, before and after it stood idle."""

    def __iter__(self) -> Iterator[PreparedT]:
        return self

    def __next__(self) -> PreparedT:
        before = self._event()
        while self._more and len(self._queue) < 2:  # this one, and the next
            self._fetch()
        if not self._queue:
            raise StopIteration
        prepared = self._queue.popleft()
        wait_for(prepared.ready)
        after = self._event()
        if before is not None and not self._clocks.in_warmup:
            self._idle.append((before, after))
        return prepared

    def _fetch(self) -> None:
        began = time.perf_counter()
        batch = next(self._batches, None)
        if self._device.type == "cpu" and not self._clocks.in_warmup:
            self._clocks.input_waited(time.perf_counter() - began)
        if batch is None:
            self._more = False
        else:
            self._queue.append(self._trainer.prepare(batch))

    def _event(self) -> Any:
        """One on the compute stream, now; None on a CPU."""
        if self._device.type == "cpu":
            return None
        event = torch.Event(device=self._device, enable_timing=True)
        event.record()
        return event

    def collect_waits(self) -> None:
        """Bring a GPU's waits so far into the clocks; it must be synchronised."""
        idle, self._idle = self._idle, []
        milliseconds = sum(before.elapsed_time(after) for before, after in idle)
        self._clocks.input_waited(milliseconds / 1000)
