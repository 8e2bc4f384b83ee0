"""Tensors as bytes, which the writer and the reader of checkpoints share."""

import math
from typing import Any, cast

import torch
from torch import Tensor

from trainmark.checkpoint.data_files import Scratch

DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The safetensors name of every dtype that a checkpoint can hold."""

DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


def scratch_tensor(scratch: Scratch, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """This thread's memory as a tensor."""
    memory = scratch.empty(math.prod(shape) * dtype.itemsize)
    return torch.from_numpy(memory).view(dtype).view(shape)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    memory: memoryview = cast(Any, tensor.view(-1).view(torch.uint8).numpy()).data
    return memory
