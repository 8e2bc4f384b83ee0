"""What ranks say to each other, as a benchmark counts it: bytes sent, and time spent waiting."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor


class Communication:
    """Counts bytes sent to other ranks and the time blocked in PyTorch's collectives."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.bytes, self.seconds = ranks, 0.0, 0.0

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within, every collective that is called through `torch.distributed` is counted."""
        sizes: dict[str, Callable[..., float]] = {
            "all_to_all_single": self._all_to_all,
            "all_reduce": lambda tensor, *a, **k: 2 * self._others(tensor),
            "reduce_scatter_tensor": lambda output, input, *a, **k: self._others(input),
            "all_gather_into_tensor": lambda output, input, *a, **k: self._others(output),
            "reduce_scatter": lambda output, input_list, *a, **k: sum(
                map(self._others, input_list)
            ),
            "all_gather": lambda tensor_list, tensor, *a, **k: sum(map(self._others, tensor_list)),
        }
        originals = {name: getattr(dist, name) for name in sizes}
        for name, size in sizes.items():
            setattr(dist, name, self._watch(originals[name], size))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)

    def _others(self, tensor: Tensor) -> float:
        return tensor.nbytes * (self.ranks - 1) / self.ranks

    def _all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> float:
        if not input_split_sizes:
            return self._others(input)
        row_bytes = input.nbytes / max(len(input), 1)
        return (sum(input_split_sizes) - input_split_sizes[dist.get_rank()]) * row_bytes

    def _watch(self, collective: Callable[..., Any], size: Callable[..., float]) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.bytes += size(*args, **kwargs)
            work = self.clocked(collective, *args, **kwargs)
            return work if work is None else _ClockedWork(work, self)

        return watched

    def clocked(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - began


class _ClockedWork(dist.Work):
    """A collective under way, whose waiting is clocked. TorchRec waits only for a `Work`."""

    def __init__(self, work: Any, communication: Communication) -> None:
        super().__init__()
        self._work, self._communication = work, communication

    def wait(self, *args: Any) -> Any:
        return self._communication.clocked(self._work.wait, *args)
