"""Requests in host memory, answered there: copies and computation as one CUDA graph for each size.

Lanes work at the same time, each on a stream of its own: while one copies, another computes. On a
CPU the function is called in the place of its graph; all that is around it is the same.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import torch
from numpy.typing import NDArray
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

    def copy(self, place: Tensor, given: Tensor) -> None:
        """Bring there what lies in host memory: from pinned memory without waiting, so it must
        stay as it is until the lane has come to it.

        Each may be a part of the columns of something larger.
        """
        if self.on_gpu and given.numel() and given.is_pinned() and (copy_rows := _copy_rows()):
            _copy_pinned(copy_rows, place, given, self._stream.cuda_stream)
        else:
            place.copy_(given, non_blocking=True)

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
        staged: requests are written to `places` in pinned memory, which are also `arrays`, and the
            graph copies them, all at once. Else `places` are on the device: for requests that take
            long to write again.
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
            self.arrays: list[NDArray[Any]] = []
            if staged:
                host, self.places = _packed(like, torch.device("cpu"), pinned=lane.on_gpu)
                self._staged = (room, host)
                self.arrays = [place.numpy() for place in self.places]
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

    def begin(self, put: Callable[[], None] | None = None) -> None:
        """Hand the lane the request that lies in the places, or that `put` copies there."""
        with torch.inference_mode(), self._lane.working():
            if put is not None:
                put()
            self._run()

    def answer(self, samples: int) -> Tensor:
        """Of the first samples of the request that was begun. The next one overwrites it."""
        self._lane.wait()
        return self._answer[:samples]


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


# --- copies of a part of each row, which torch would gather in pageable memory first

_HOST_TO_DEVICE = 1


def _copy_pinned(copy_rows: Callable[..., int], place: Tensor, given: Tensor, stream: int) -> None:
    """`place.copy_(given)` of one type, on a stream. What belongs to an index of the first
    dimension lies together in each."""
    in_one = place.is_contiguous() and given.is_contiguous()
    rows = 1 if in_one else len(given)
    row_bytes = given.numel() * given.element_size() // rows
    steps = [row_bytes if in_one else t.stride(0) * t.element_size() for t in (place, given)]
    status = copy_rows(
        place.data_ptr(), steps[0], given.data_ptr(), steps[1], row_bytes, rows,
        _HOST_TO_DEVICE, stream,
    )  # fmt: skip
    if status:
        raise RuntimeError(f"cudaMemcpy2DAsync failed with error {status}.")


@functools.cache
def _copy_rows() -> Callable[..., int] | None:
    """cudaMemcpy2DAsync of the CUDA runtime that torch has loaded; None where there is none. It
    returns at once, so threads that call it keep Python's lock."""
    try:
        runtime = ctypes.PyDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
    except OSError:
        return None
    function = runtime.cudaMemcpy2DAsync
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    function.argtypes = [pointer, size, pointer, size, size, size, ctypes.c_int, pointer]
    typed: Callable[..., int] = function
    return typed
