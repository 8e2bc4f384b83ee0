"""What a precision means for the dense computation."""

from contextlib import AbstractContextManager, nullcontext

import torch

# fp8 is for the GEMMs of large layers; everything else is bf16 then.
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def set_matmul_precision(precision: str) -> None:
    """Let fp32 matrix products use TF32 tensor cores, or forbid it."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context to run a forward pass in."""
    if precision not in _AUTOCAST:
        return nullcontext()
    return torch.autocast(device.type, dtype=_AUTOCAST[precision])


def compute_dtype(precision: str) -> torch.dtype:
    """The type of activations in a model that casts its weights itself, without autocast."""
    return _AUTOCAST.get(precision, torch.float32)
