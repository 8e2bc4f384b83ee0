"""Kernels for CPUs that numba compiles (extra `fast`): where there are any, and on which threads.

They are used wherever they can be; each stands beside the plain torch that does the same elsewhere.
A kernel is an ordinary function of arrays that works on a range, of samples or of whatever it
computes independently, so that its result does not depend on the number of threads. It does not
hold Python's lock; the threads are ours, as many as PyTorch's, so no threading layer of numba's is
needed and nothing breaks in a forked process.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from trainmark.hardware.devices import usable_cores

if TYPE_CHECKING:  # a server of small models starts without torch
    import torch
    from torch import Tensor

INSTALLED = importlib.util.find_spec("numba") is not None


def has_compiled(*tensors: Tensor) -> bool:
    """Whether there are kernels for tensors of these kinds."""
    return all(is_compiled_for(tensor.device, tensor.dtype) for tensor in tensors)


def is_compiled_for(device: torch.device, dtype: torch.dtype) -> bool:
    return INSTALLED and device.type == "cpu" and str(dtype) == "torch.float32"


def in_threads(
    kernel: Callable[..., Any], count: int, *arguments: Any, ranges: int = 1
) -> list[Any]:
    """Call `kernel(*arguments, begin, end)` for ranges that make up 0 ... count - 1.

    Tensors, which are contiguous, become arrays. What the calls return comes in order. The calling
    thread takes ranges, too: whoever is free takes the next, and a thread that has not begun when
    none is left, because others have its core, is not waited for.

    Args:
        ranges: how many, at least; there is one for each thread.
    """
    arrays = [a.detach().numpy() if hasattr(a, "detach") else a for a in arguments]
    threads = max(1, min(num_threads(), count))
    if threads == 1:
        return [kernel(*arrays, 0, count)]
    ranges = min(max(threads, ranges), count)
    bounds = [count * number // ranges for number in range(ranges + 1)]
    results: list[Any] = [None] * ranges
    waiting = deque(range(ranges))

    def work() -> None:
        while True:
            try:
                number = waiting.popleft()
            except IndexError:  # none is left
                return
            results[number] = kernel(*arrays, bounds[number], bounds[number + 1])

    others = [_threads(os.getpid(), threads - 1).submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        for other in others:
            if not other.cancel():
                other.result()
    return results


def num_threads() -> int:
    """As many as PyTorch's; where that is not loaded, as many as it would have."""
    if "torch" in sys.modules:
        found: int = sys.modules["torch"].get_num_threads()
        return found
    return _threads_without_torch()


@functools.cache
def _threads_without_torch() -> int:
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) else usable_cores()


@functools.cache
def _threads(process: int, threads: int) -> ThreadPoolExecutor:
    """A child of fork has none of its parent's threads, and so gets its own."""
    return ThreadPoolExecutor(threads, thread_name_prefix="kernels")
