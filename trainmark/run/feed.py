"""Between the reader and the step: batches are fetched and prepared ahead of their use."""

import time
from collections import deque
from collections.abc import Iterator
from typing import Generic

import torch

from trainmark.contract import BatchT, PreparedT, Trainer
from trainmark.run.clocks import Clocks, DeviceWaits, HostWaits


class Feed(Generic[BatchT, PreparedT]):
    """Prepared batches in order, each prepared one step before it is used.

    Preparing ahead lets a GPU copy the next batch, and sort its ids, while it computes this one.
    """

    def __init__(
        self,
        batches: Iterator[BatchT],
        trainer: Trainer[BatchT, PreparedT],
        clocks: Clocks,
        device: torch.device,
        ahead: int = 1,
    ) -> None:
        self._batches = batches
        self._trainer = trainer
        self._waits = HostWaits(clocks) if device.type == "cpu" else DeviceWaits(clocks, device)
        self._queue: deque[PreparedT] = deque()
        self._ahead = ahead
        self._more = True

    def __iter__(self) -> Iterator[PreparedT]:
        return self

    def __next__(self) -> PreparedT:
        self._waits.begin()
        while self._more and len(self._queue) <= self._ahead:
            self._fetch()
        if not self._queue:
            raise StopIteration
        prepared = self._queue.popleft()
        self._waits.until(prepared.ready)
        return prepared

    def _fetch(self) -> None:
        began = time.perf_counter()
        batch = next(self._batches, None)
        self._waits.fetched(time.perf_counter() - began)
        if batch is None:
            self._more = False
        else:
            self._queue.append(self._trainer.prepare(batch))

    def collect_waits(self) -> None:
        """Bring the input waits so far into the clocks; the device must be synchronised."""
        self._waits.collect()
