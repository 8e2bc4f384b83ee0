"""Between the reader and the step: batches are fetched and prepared ahead of their use."""

import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic

import torch

from trainmark.contract import BatchT, PreparedT, Trainer
from trainmark.run.clocks import Clocks


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
    ) -> None:
        self._batches = batches
        self._trainer = trainer
        self._waits = HostWaits(clocks) if device.type == "cpu" else DeviceWaits(clocks, device)
        self._queue: deque[PreparedT] = deque()
        self._more = True

    def __iter__(self) -> Iterator[PreparedT]:
        return self

    def __next__(self) -> PreparedT:
        self._waits.begin()
        while self._more and len(self._queue) < 2:  # this one, and the next
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


# --- how long the step waited


class HostWaits:
    """Input wait on a CPU: the time blocked in fetching a batch from the reader."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks

    def begin(self) -> None:
        """The loop asks for a batch."""

    def fetched(self, seconds: float) -> None:
        """The batch is in host memory; what `prepare` does with it belongs to the step."""
        if not self._clocks.in_warmup:
            self._clocks.input_waited(seconds)

    def until(self, ready: Any) -> None:
        """On a CPU a prepared batch is ready."""

    def collect(self) -> None:
        """All waits are in the clocks already."""


class DeviceWaits:
    """Input wait on a GPU: how long the compute stream stood idle, by two events around it.

    The first event follows the previous step's kernels at once, so that a host that blocks on
    its reader before it can launch anything is seen as well.
    """

    def __init__(self, clocks: Clocks, device: Any) -> None:
        self._clocks = clocks
        self._device = device
        self._pairs: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        self._before = self._record()

    def fetched(self, seconds: float) -> None:
        """Nothing to note: the device may still be busy with the step before."""

    def until(self, ready: Any) -> None:
        """Let the compute stream wait until the batch is on the device."""
        ready.wait()
        after = self._record()
        if not self._clocks.in_warmup:
            self._pairs.append((self._before, after))

    def collect(self) -> None:
        """Hand the waits since the last call to the clocks; the device must be synchronised."""
        pairs, self._pairs = self._pairs, []
        milliseconds = sum(before.elapsed_time(after) for before, after in pairs)
        self._clocks.input_waited(milliseconds / 1000)

    def _record(self) -> Any:
        event = torch.Event(device=self._device, enable_timing=True)
        event.record()
        return event
