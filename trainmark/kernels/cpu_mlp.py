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
from trainmark.kernels.simd import (
    LANES,
    add,
    fma,
    get,
    load,
    multiply,
    put,
    splat,
    store,
    where_positive,
)

BLOCK = 256  # samples
_ZERO = np.float32(0)

_compiled = numba.njit(nogil=True, cache=True)


def masked_sums(gradient_BN: Tensor, output_BN: Tensor, *, in_place: bool) -> tuple[Tensor, Tensor]:
    """The gradient where the ReLU's output is positive, and [N]: its sum over the batch."""
    gradient_BN = gradient_BN.contiguous()
    masked_BN = gradient_BN if in_place else torch.empty_like(gradient_BN)
    sums_N = _by_blocks(_masked_sums, gradient_BN, output_BN.contiguous(), masked_BN)
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
    in_threads(kernel, blocks, *arguments, sums, B, N)
    return sums.sum(0)


# --- kernels; arrays of floats are flat


@_compiled
def _masked_sums(gradient, output, masked, sums, B, N, begin, end):
    whole = N // LANES * LANES
    for b in range(begin * BLOCK, min(end * BLOCK, B)):
        at, total = b * N, b // BLOCK * N
        for k in range(0, whole, LANES):
            value = where_positive(load(output, at + k), load(gradient, at + k))
            store(masked, at + k, value)
            store(sums, total + k, add(load(sums, total + k), value))
        for k in range(whole, N):
            value = get(gradient, at + k) if get(output, at + k) > 0 else _ZERO
            put(masked, at + k, value)
            put(sums, total + k, get(sums, total + k) + value)


@_compiled
def _last_layer(x, grad, grad_outputs, weight, sums, B, N, begin, end):
    whole = N // LANES * LANES
    for b in range(begin * BLOCK, min(end * BLOCK, B)):
        at, total, factor = b * N, b // BLOCK * N, get(grad_outputs, b)
        factors = splat(factor)
        for k in range(0, whole, LANES):
            value = load(x, at + k)
            store(grad, at + k, where_positive(value, multiply(factors, load(weight, k))))
            store(sums, total + k, fma(factors, value, load(sums, total + k)))
        for k in range(whole, N):
            value = get(x, at + k)
            put(grad, at + k, factor * get(weight, k) if value > 0 else _ZERO)
            put(sums, total + k, get(sums, total + k) + factor * value)
