"""Replaying a function as a CUDA graph, so that hundreds of launches become one; and branches."""

import functools
import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

WARMUPS = 2  # calls before the capture, in which compilers and libraries settle


class Graphed:
    """`function(*inputs)`, captured once for each set of input shapes, then replayed.

    Args:
        function: works on the device alone, and returns nothing.
        changes: tensors that it changes in place; the warm-up calls leave them as they were.
    """

    def __init__(self, function: Callable[..., None], changes: Sequence[Tensor]) -> None:
        self._function, self._changes = function, changes
        self._captured: dict[tuple[torch.Size, ...], tuple[Any, list[Tensor]]] = {}

    def __call__(self, inputs: Sequence[Tensor]) -> None:
        graph, static = self.capture(inputs)
        for mine, given in zip(static, inputs, strict=True):
            mine.copy_(given)
        graph.replay()

    def capture(self, inputs: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        """Capture for the shapes of `inputs`, unless that is done already."""
        shapes = tuple(tensor.shape for tensor in inputs)
        if shapes not in self._captured:
            self._captured[shapes] = self._capture([tensor.clone() for tensor in inputs])
        return self._captured[shapes]

    def _capture(self, static: list[Tensor]) -> tuple[Any, list[Tensor]]:
        before = [tensor.clone() for tensor in self._changes]
        for _ in range(WARMUPS):
            _aside(lambda: self._function(*static))
        for tensor, value in zip(self._changes, before, strict=True):
            tensor.copy_(value)
        return captured(lambda: self._function(*static)), static


class GraphedInPlace:
    """`function()`, which works on tensors that stay where they are.

    Its first calls are made as they are; the next one is captured, and from then on replayed.

    Args:
        function: works on the device alone, and returns nothing.
        pool: memory shared by graphs that never run at the same time, and of which nothing is read
            once they have ended; by default a graph has its own.
    """

    def __init__(self, function: Callable[[], None], pool: Any = None) -> None:
        self._function, self._pool = function, pool
        self._calls = 0
        self._graph: Any = None

    def __call__(self) -> None:
        self._calls += 1
        if self._calls <= WARMUPS:
            return _aside(self._function)
        if self._graph is None:
            self._graph = captured(self._function, self._pool)
        self._graph.replay()


def shared_pool() -> Any:
    """Memory for several graphs; see `GraphedInPlace`."""
    return torch.cuda.graph_pool_handle()


class Beside:
    """What `function()` returns, computed on a stream of its own until somebody asks for it.

    Small kernels fill the gaps that others leave. In a CUDA graph they become a branch.
    """

    def __init__(self, function: Callable[[], Any], device: torch.device) -> None:
        self._stream = _stream_beside(device) if device.type == "cuda" else None
        if self._stream is None:
            self._result = function()
            return
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            self._result = function()

    def result(self) -> Any:
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return self._result


@functools.cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    """Always the same one: memory that was used on a stream is free for that stream only."""
    return torch.cuda.Stream(device)


def _aside(function: Callable[[], None]) -> None:
    """On another stream, as captures are: autograd's notes of the default one would break them."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        function()
    torch.cuda.current_stream().wait_stream(aside)


def captured(function: Callable[[], None], pool: Any = None, stream: Any = None) -> Any:
    """What `function()` does, as a graph.

    Meanwhile no garbage is collected: an old graph that is destroyed by a thread which captures
    breaks the capture off.
    """
    graph = torch.cuda.CUDAGraph()
    with _CAPTURES:
        collects = gc.isenabled()
        gc.disable()
        try:
            # Other threads may go on, to read the coming batches into pinned memory.
            with torch.cuda.graph(
                graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                function()
        finally:
            if collects:
                gc.enable()
    return graph


_CAPTURES = threading.Lock()
