"""What the writer and the reader of checkpoints share."""

import math
import threading
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

WORKERS = 4  # times a chunk's bytes: the most host memory that a device's tensors pass through


class Scratch(threading.local):
    """Memory for one chunk per thread, used again and again.

    Allocating and freeing such blocks would fill malloc's pools, one per thread: loading a table
    could take nearly twice its size.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        needed = math.prod(shape) * dtype.itemsize
        if needed > len(self._bytes):
            self._bytes = torch.empty(needed, dtype=torch.uint8)
        return self._bytes[:needed].view(dtype).view(shape)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    memory: memoryview = cast(Any, tensor.view(-1).view(torch.uint8).numpy()).data
    return memory


def slices(offsets: Iterable[int], sizes: Iterable[int]) -> tuple[slice, ...]:
    """The index of a part of a tensor."""
    return tuple(slice(o, o + size) for o, size in zip(offsets, sizes, strict=True))
