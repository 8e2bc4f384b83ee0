"""An accelerator that is none: PyTorch is told of one `xpu`, and computes on the CPU.

Shared code sees a device with memory, streams and events of its own, and takes all roads that are
for such devices. Whatever asks `torch.cuda` from within the package is noted.
"""

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

NAME = "Stand-in 9000"
TOTAL, FREE, PEAK = 16 * 2**30, 12 * 2**30, 3 * 2**20
ACCELERATOR = torch.device("xpu")


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == ACCELERATOR.type else value
    return "cpu" if isinstance(value, str) and value.startswith(ACCELERATOR.type) else value


class OnCpu(TorchFunctionMode):
    """Tensors that were to be made on the stand-in are made in host memory."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        given = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*map(_on_cpu, args), **given)


class Stream:
    """Work is done when it is asked for."""

    def __init__(self, device: Any = None) -> None: ...
    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exc: object) -> None: ...
    def wait_stream(self, other: Any) -> None: ...
    def is_capturing(self) -> bool:
        return False


class Event:
    made = 0

    def __init__(self, device: Any = None, enable_timing: bool = False) -> None:
        Event.made += 1

    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def elapsed_time(self, other: Any) -> float:
        return 0.0


@contextmanager
def stand_in() -> Iterator[list[str]]:
    """Lets PyTorch have the accelerator; gives the calls of `torch.cuda` by the package."""
    asked: list[str] = []
    real_generator, real_empty = torch.Generator, torch.empty
    _device_constructors()  # PyTorch keeps a list of these, which has to have its own `empty`

    def pageable(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return real_empty(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, OnCpu():
        patch.setattr(torch, "Stream", Stream)
        patch.setattr(torch, "Event", Event)
        patch.setattr(torch, "Generator", lambda device="cpu": real_generator(_on_cpu(device)))
        patch.setattr(torch, "empty", pageable)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        for name, answer in _answers().items():
            patch.setattr(torch.accelerator, name, answer)
        properties = SimpleNamespace(name=NAME, total_memory=TOTAL)
        patch.setattr(torch.xpu, "get_device_properties", lambda device: properties)
        for name, value in vars(torch.cuda).items():
            if isinstance(value, types.FunctionType):
                patch.setattr(torch.cuda, name, _noted(value, asked))
        yield asked


def _answers() -> dict[str, Callable[..., Any]]:
    """Of `torch.accelerator`."""
    return {
        "is_available": lambda: True,
        "current_accelerator": lambda check_available=False: ACCELERATOR,
        "device_count": lambda: 1,
        "current_device_index": lambda: 0,
        "set_device_index": lambda device: None,
        "synchronize": lambda device=None: None,
        "current_stream": lambda device=None: Stream(),
        "get_memory_info": lambda device=None: (FREE, TOTAL),
        "max_memory_allocated": lambda device=None: PEAK,
        "max_memory_reserved": lambda device=None: 2 * PEAK,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
    }


def _noted(function: Callable[..., Any], asked: list[str]) -> Callable[..., Any]:
    @wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("trainmark"):
            asked.append(f"{caller}: torch.cuda.{function.__name__}")
        return function(*args, **kwargs)

    return noting
