"""Timing steps on a device: what they take, and what its kernels are for."""

import itertools
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

WARMUP, WINDOW, PROFILED = 12, 10, 5  # steps
GIB = 2**30

# What a kernel is for, by its name; the first that matches counts.
PARTS = {
    "mlp": r"(?<!fb)gemm|cutlass|nvjet|xmma|cublas|splitk|mkldnn|addmm|aten::b?mm"
    r"|_masked_|^_column_sums|^_quantize|^_mask_codes|^_click_loss"
    r"|triton_(poi|red|per|tem|for)_",  # what the compiler fuses around the products
    "sort": r"sort|onesweep|histogram|segment|unique|scan|transpose_embedding_input|bounds_check",
    "update": r"_update_kernel|indexfunc|index_add|index_put|sparse"
    r"|embedding\w*backward|backward\w*embedding|scatter_add|multi_tensor|fused_sgd",
    "forward": r"_forward_kernel|_gather_kernel|_pool_kernel|embedding|index_?select|gather",
    "backward": r"_backward_kernel",
    "cross": r"^_cross",
    "exchange": r"nccl|^_copy_kernel",  # torch has a direct_copy_kernel
    "copy": r"memcpy|memset|copy|fill",
}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def step_times(step: Callable[[], Any], count: int, device: torch.device) -> list[float]:
    """Seconds of each of `count` steps."""
    synchronize(device)
    marks = [_mark(device)]
    for _ in range(count):
        step()
        marks.append(_mark(device))
    return _between(marks, device)


# --- endless steps


def warm_up(losses: Iterator[Tensor], device: torch.device) -> None:
    for _ in range(WARMUP):
        next(losses)
    synchronize(device)


def windows(losses: Iterator[Tensor], seconds: float, device: torch.device) -> list[float]:
    """Seconds per step, averaged over each window of steps, for as long as asked.

    The first third is left out: a GPU lowers its clock once it has been at its power limit for
    about half a second, and a run spends its time there.
    """
    (first,) = _timed_windows(losses, 1, device)
    count = max(3, round(seconds / (first * WINDOW)))
    return _timed_windows(losses, count, device)[count // 3 :]


def _timed_windows(losses: Iterator[Tensor], count: int, device: torch.device) -> list[float]:
    """By device events, so that the host need not wait between windows."""
    marks = [_mark(device)]
    for _ in range(count):
        for _ in range(WINDOW):
            next(losses)
        marks.append(_mark(device))
    return [seconds / WINDOW for seconds in _between(marks, device)]


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(marks: list[Any], device: torch.device) -> list[float]:
    """Seconds from each mark to the next."""
    synchronize(device)
    on_gpu = device.type == "cuda"
    return [a.elapsed_time(b) / 1e3 if on_gpu else b - a for a, b in itertools.pairwise(marks)]


def profiled(
    losses: Iterator[Tensor], device: torch.device, most: int = 12
) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of a step by part, and those of its longest kernels, so many at most."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        for _ in range(PROFILED):
            next(losses)
        synchronize(device)
    time_of = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    kernels = {e.key: getattr(e, time_of) / 1e3 / PROFILED for e in profiler.key_averages()}
    split = dict.fromkeys([*PARTS, "other"], 0.0)
    for name, ms in kernels.items():
        split[part_of(name)] += ms
    longest = sorted(kernels, key=kernels.__getitem__, reverse=True)[:most]
    return split, {name[:80]: kernels[name] for name in longest}


def part_of(kernel: str) -> str:
    """What a kernel is for."""
    return next((part for part, p in PARTS.items() if re.search(p, kernel, re.I)), "other")


def memory_gib(device: torch.device) -> float | None:
    return torch.cuda.max_memory_reserved() / GIB if device.type == "cuda" else None
