"""Requests in host memory, answered there: copies and computation as one CUDA graph for each size.

Lanes work at the same time, each on a stream of its own: while one copies, another computes. On a
CPU the function is called in the place of its graph; all that is around it is the same.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate

import torch
from torch import Tensor

from trainmark.kernels.graph import WARMUPS, captured, shared_pool

ALIGNED = 256
"""Bytes at which tensors begin that are copied together, as those of an allocation do."""


class Lane:
    """A stream for requests that are answered one after another, and the memory of their graphs.

    Graphs are captured on it, too: what libraries keep for each stream, such as cuBLAS its
    workspace, is then never another lane's.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            self._stream, self._pool = torch.cuda.Stream(device), shared_pool()
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def working(self) -> AbstractContextManager[object]:
        """Within it, the thread's work goes to this lane."""
        return torch.cuda.stream(self._stream) if self.on_gpu else nullcontext()

    def captured(self, function: Callable[[], None]) -> Callable[[], None]:
        """What does on this lane what the function does."""
        if not self.on_gpu:
            return function
        graph = captured(function, self._pool, self._stream)
        replay: Callable[[], None] = graph.replay
        return replay

    def wait(self) -> None:
        """Until its work is done. Other threads go on."""
        if self.on_gpu:
            self._stream.synchronize()


class RequestGraph:
    """Requests of one size: places for what they hold, and the graph from there to the answer.

    Args:
        lane: where it works.
        like: tensors with the shapes and types of what a request holds.
        function: from such tensors on the device to the answer, a row a sample.
        staged: requests are written to `places` in pinned memory, and the graph copies them, all at
            once. Else `places` are on the device: for requests that take long to write again.
    """

    def __init__(
        self,
        lane: Lane,
        like: Sequence[Tensor],
        function: Callable[[list[Tensor]], Tensor],
        *,
        staged: bool,
    ) -> None:
        self._lane, self._function = lane, function
        with torch.inference_mode(), lane.working():
            # Zeros: ids that every table has a row for.
            room, self._inputs = _packed(like, lane.device, pinned=False)
            self._staged: tuple[Tensor, Tensor] | None = None
            self.places = self._inputs
            if staged:
                host, self.places = _packed(like, torch.device("cpu"), pinned=lane.on_gpu)
                self._staged = (room, host)
            for _ in range(WARMUPS):
                answer = function(self._inputs)
            self._answer = torch.empty(
                answer.shape, dtype=answer.dtype, device="cpu", pin_memory=lane.on_gpu
            )
            del answer
            lane.wait()
            self._run = lane.captured(self._work)

    def _work(self) -> None:
        if self._staged is not None:
            room, host = self._staged
            room.copy_(host, non_blocking=True)
        self._answer.copy_(self._function(self._inputs), non_blocking=True)

    def answer(self, samples: int, put: Callable[[], None] | None = None) -> Tensor:
        """Of the first samples that lie in the places, or that `put` copies there."""
        with torch.inference_mode(), self._lane.working():
            if put is not None:
                put()
            self._run()
        self._lane.wait()
        return self._answer[:samples].clone()


def _packed(
    like: Sequence[Tensor], device: torch.device, *, pinned: bool
) -> tuple[Tensor, list[Tensor]]:
    """Zeros in one piece of memory, and the tensors that it is made of."""
    ends = list(accumulate(-(-t.nbytes // ALIGNED) * ALIGNED for t in like))
    room = torch.zeros(ends[-1], dtype=torch.uint8, device=device, pin_memory=pinned)
    starts = [0, *ends[:-1]]
    return room, [
        room[start : start + t.nbytes].view(t.dtype).view(t.shape)
        for start, t in zip(starts, like, strict=True)
    ]


def empty_like(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """For `RequestGraph`: a shape and a type alone."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")
