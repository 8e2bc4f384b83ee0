"""Checkpoints of some tensors, and the comparison of tensors to the last bit."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainmark.checkpoint import checkpoints

STATE = {"step": 7, "lr": 0.1, "data": {"position": 4096, "epochs": [1, 2]}, "name": "é", "n": None}


def save_checkpoint(
    root: Path,
    step: int,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    keep: int,
    best: int | None = None,
) -> Path:
    """Save without a thread; returns the checkpoint's folder."""
    return checkpoints.plan(root, step, tensors, state, keep, best).write()


def some_tensors() -> dict[str, Tensor]:
    return {
        "table": torch.rand(50, 4),
        "weight": torch.rand(3, 5).to(torch.bfloat16),
        "rng": torch.get_rng_state()[:100],
        "count": torch.tensor(12),
    }


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Every bit pattern, NaNs and all; booleans have two."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, dtype=torch.uint8).bool()
    raw = torch.randint(0, 256, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def zeros_like(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        assert bits(a[name]) == bits(b[name]), name
