"""Replaying a function as a CUDA graph: hundreds of launches become one."""

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
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARMUPS):
                self._function(*static)
        torch.cuda.current_stream().wait_stream(aside)
        for tensor, value in zip(self._changes, before, strict=True):
            tensor.copy_(value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._function(*static)
        return graph, static
