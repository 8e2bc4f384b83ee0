"""A batch's way to the device, on a stream of its own, ahead of the step."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Convert = Callable[[list[Tensor]], list[Tensor]]
Make = Callable[[list[Tensor]], None]
"""Fills tensors on the device that have the shapes of a batch's."""
Result = TypeVar("Result")


class Copier:
    """Copies host tensors to `device` and converts them there, while the device computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_host = device.type in ("cpu", "meta")
        self._stream: Any = None if on_host else torch.Stream(device=device)

    def __call__(
        self, tensors: list[Tensor], convert: Convert, make: Make | None = None
    ) -> tuple[list[Tensor], Any]:
        """The converted tensors, and the event after which the compute stream may read them.

        With `make`, there is nothing to copy: it makes them on the device, like `tensors`.
        """
        converted, ready = self.then(lambda: convert(self._copied(tensors, make)))
        used_here(converted)
        return converted, ready

    def _copied(self, tensors: list[Tensor], make: Make | None) -> list[Tensor]:
        if self._stream is None:
            return tensors
        if make is None:
            return [tensor.to(self.device, non_blocking=True) for tensor in tensors]
        places = [torch.empty_like(tensor, device=self.device) for tensor in tensors]
        make(places)
        return places

    def into(
        self, places: list[Tensor], tensors: Sequence[Tensor], make: Make | None = None
    ) -> Any:
        """Copy to given places on a GPU, or `make`; the event after which they may be read."""

        def fill() -> None:
            if make is not None:
                make(places)
                return
            for place, tensor in zip(places, tensors, strict=True):
                place.copy_(tensor, non_blocking=True)

        return self.then(fill)[1]

    def then(self, function: Callable[[], Result], after: Any = None) -> tuple[Result, Any]:
        """Run `function` on the copies' stream, after them. Returns its result and an event.

        It waits for the event `after`, too. If you read the result on the compute stream, call
        `used_here`.
        """
        if self._stream is None:
            return function(), None
        with self._stream:
            if after is not None:
                after.wait()
            result = function()
            done = torch.Event(device=self.device)
            done.record()
        return result, done


def wait_for(event: Any) -> None:
    """Let the compute stream wait for work on another; on a CPU there is none, and no event."""
    if event is not None:
        event.wait()


def used_here(tensors: Iterable[Tensor]) -> None:
    """Say that what was allocated on another stream is used, and freed, on the current one."""
    for tensor in tensors:
        if tensor.device.type not in ("cpu", "meta"):
            tensor.record_stream(torch.accelerator.current_stream(tensor.device))
