"""What surrounds the products of an MLP's backward pass on a CPU, compiled by numba (extra `fast`).

Each function goes through the activations once, where plain torch takes a pass for each operation.
Sums over the batch are taken of blocks of samples, which are then added up: they do not depend on
the number of threads.

Shapes: B samples, N outputs of a layer with a ReLU.
"""

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from trainmark.kernels.compiled import in_threads

BLOCK = 256  # samples
_ZERO = np.float32(0)

_compiled = numba.njit(nogil=True, cache=True, fastmath={"contract"})


def masked_sums(gradient_BN: Tensor, output_BN: Tensor, *, in_place: bool) -> tuple[Tensor, Tensor]:
    """The gradient where the ReLU's output is positive, and [N]: its sum over the batch."""
    # The kernel gets one array: had it two, which may overlap, it would take floats one by one.
    masked_BN = gradient_BN.contiguous()
    if masked_BN is gradient_BN and not in_place:
        masked_BN = gradient_BN.clone()
    sums_N = _by_blocks(_masked_sums, masked_BN, output_BN.contiguous())
    return masked_BN, sums_N


def last_layer(grad_B: Tensor, weight_N: Tensor, x_BN: Tensor) -> tuple[Tensor, Tensor]:
    """A layer with one output behind a ReLU, which gave x: gradients of its input and weight.

    `grad_B` is that of the output. That of the input, [B, N], is 0 where the ReLU is closed.
    """
    x_BN = x_BN.contiguous()
    grad_BN = torch.empty_like(x_BN)
    sums_N = _by_blocks(_last_layer, x_BN, grad_BN, grad_B.contiguous(), weight_N.contiguous())
    return grad_BN, sums_N


def _by_blocks(kernel: Any, *arguments: Tensor) -> Tensor:
    """Call a kernel that adds to a row of sums for each block; returns their sum."""
    B, N = arguments[0].shape
    blocks = -(-B // BLOCK)
    sums = arguments[0].new_zeros(blocks, N)
    in_threads(kernel, blocks, *arguments, sums)
    return sums.sum(0)


# --- kernels


@_compiled
def _masked_sums(gradient_BN, output_BN, sums, begin, end):
    B, N = output_BN.shape
    for b in range(begin * BLOCK, min(end * BLOCK, B)):
        gradient, output, total = gradient_BN[b], output_BN[b], sums[b // BLOCK]
        for k in range(N):
            value = gradient[k] if output[k] > 0 else _ZERO
            gradient[k] = value
            total[k] += value


@_compiled
def _last_layer(x_BN, grad_BN, grad_B, weight_N, sums, begin, end):
    B, N = x_BN.shape
    for b in range(begin * BLOCK, min(end * BLOCK, B)):
        x, grad, total, factor = x_BN[b], grad_BN[b], sums[b // BLOCK], grad_B[b]
        for k in range(N):
            grad[k] = factor * weight_N[k] if x[k] > 0 else _ZERO
            total[k] += factor * x[k]
