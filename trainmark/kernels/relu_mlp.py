"""A multi-layer perceptron with ReLUs, forward and backward, with little besides the products.

Bias and ReLU ride on the forward products (cuBLASLt's epilogue). In the backward pass the gradient
of a hidden layer is masked where its ReLU was closed, and summed over the batch for the bias: both
ride on the product that makes that gradient, or, for small layers, take one pass together.

Shapes: B samples, M inputs and N outputs of a layer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, pad

from trainmark.kernels.interaction import PAD_TO

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without a GPU
    triton = None

# --- plain torch


def relu_mlp_reference(
    x_BM: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], last_relu: bool
) -> Tensor:
    """Layers in order, differentiated by autograd, in the type of `x_BM`."""
    last = len(weights) - 1
    for layer, (w_NM, b_N) in enumerate(zip(weights, biases, strict=True)):
        x_BM = linear(x_BM, w_NM.to(x_BM.dtype), b_N.to(x_BM.dtype))
        x_BM = x_BM.relu() if layer < last or last_relu else x_BM
    return x_BM


def masked_sums_reference(gradient_BN: Tensor, output_BN: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient where the ReLU's output is positive, and its sum over the batch in fp32."""
    masked_BN = torch.where(output_BN > 0, gradient_BN, torch.zeros_like(gradient_BN))
    return masked_BN, masked_BN.sum(dim=0, dtype=torch.float32)


# --- dispatch


def relu_mlp(
    x_BM: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], last_relu: bool
) -> Tensor:
    """The same, once differentiable. Weights are cast to the type of `x_BM` in one launch."""
    if not x_BM.is_cuda:
        return relu_mlp_reference(x_BM, weights, biases, last_relu)
    return _ReluMlp.apply(x_BM, last_relu, *weights, *biases)


class _ReluMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BM: Tensor, last_relu: bool, *parameters: Tensor) -> Tensor:
        cast = _cast(parameters, x_BM.dtype)
        weights, biases = cast[: len(cast) // 2], cast[len(cast) // 2 :]
        # A width that tensor cores like; the only one that data, not a designer, may have chosen.
        ctx.width = x_BM.shape[1]
        missing = -ctx.width % PAD_TO
        if missing:
            x_BM, weights[0] = pad(x_BM, (0, missing)), pad(weights[0], (0, missing))
        inputs = [x_BM]
        for layer, (w_NM, b_N) in enumerate(zip(weights, biases, strict=True)):
            has_relu = layer < len(weights) - 1 or last_relu
            product = _relu_product if has_relu else torch.addmm
            inputs.append(product(b_N, inputs[-1], w_NM.t()))
        ctx.last_relu = last_relu
        ctx.save_for_backward(*inputs, *weights)
        return inputs[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        count = len(saved) // 2
        inputs, weights = saved[: count + 1], saved[count + 1 :]
        if ctx.last_relu:
            gradient, bias_grad = masked_sums(grads[0], inputs[-1])
        else:
            gradient, bias_grad = grads[0], grads[0].sum(dim=0, dtype=torch.float32)
        weight_grads, bias_grads = [], [bias_grad]
        for layer in reversed(range(1, count)):
            weight_grads.append(_weight_gradient(gradient, inputs[layer]))
            gradient, bias_grad = masked_product(gradient, weights[layer], inputs[layer])
            bias_grads.append(bias_grad)
        weight_grads.append(_weight_gradient(gradient, inputs[0])[:, : ctx.width])
        x_grad = (gradient @ weights[0])[:, : ctx.width] if ctx.needs_input_grad[0] else None
        return (x_grad, None, *reversed(weight_grads), *reversed(bias_grads))


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Copies in another type, by one launch for all; the tensors themselves where it is theirs."""
    if all(tensor.dtype == dtype for tensor in tensors):
        return list(tensors)
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, list(tensors))
    return copies


def _relu_product(b_N: Tensor, x_BM: Tensor, w_MN: Tensor) -> Tensor:
    return torch._addmm_activation(b_N, x_BM, w_MN)


def _weight_gradient(gradient_BN: Tensor, x_BM: Tensor) -> Tensor:
    """[N, M] in fp32: a sum over the batch, which 16 bits would round."""
    if gradient_BN.is_cuda and gradient_BN.dtype != torch.float32:
        return torch.mm(gradient_BN.t(), x_BM, out_dtype=torch.float32)
    return (gradient_BN.t() @ x_BM).float()


def masked_product(gradient_BN: Tensor, w_NM: Tensor, x_BM: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient @ w) where x is positive, and its sum over the batch: x came out of a ReLU."""
    if _worth_fusing(gradient_BN, w_NM):
        return _masked_product(gradient_BN, w_NM, x_BM)
    return masked_sums(gradient_BN @ w_NM, x_BM)


def _worth_fusing(gradient_BN: Tensor, w_NM: Tensor) -> bool:
    """Whether our product is near cuBLAS's; of fp32 it is not, and small ones gain nothing."""
    is_half = gradient_BN.dtype in (torch.bfloat16, torch.float16)
    return gradient_BN.is_cuda and is_half and min(w_NM.shape) >= TILE_INNER


def masked_sums(gradient_BN: Tensor, output_BN: Tensor) -> tuple[Tensor, Tensor]:
    """`masked_sums_reference` in one pass."""
    if gradient_BN.is_cuda:
        return _masked_sums(gradient_BN, output_BN)
    return masked_sums_reference(gradient_BN, output_BN)


# --- Triton
#
# Column sums are taken per tile of rows and added up afterwards, always in the same order, so that
# results are repeatable bit by bit.

TILE_ROWS, TILE_COLUMNS, TILE_INNER = 128, 128, 64
SUM_ROWS, SUM_COLUMNS = 32, 128


def _masked_product(gradient_BN: Tensor, w_NM: Tensor, x_BM: Tensor) -> tuple[Tensor, Tensor]:
    (B, N), M = gradient_BN.shape, w_NM.shape[1]
    gradient_BN, w_NM, x_BM = gradient_BN.contiguous(), w_NM.contiguous(), x_BM.contiguous()
    result_BM = torch.empty_like(x_BM)
    row_tiles, column_tiles = -(-B // TILE_ROWS), -(-M // TILE_COLUMNS)
    sums = result_BM.new_empty(row_tiles, M, dtype=torch.float32)
    _masked_product_kernel[(row_tiles * column_tiles,)](
        gradient_BN, w_NM, x_BM, result_BM, sums, B, N, M,
        TILE_ROWS=TILE_ROWS, TILE_COLUMNS=TILE_COLUMNS, TILE_INNER=TILE_INNER,
        num_warps=8, num_stages=4,
    )  # fmt: skip
    return result_BM, sums.sum(dim=0)


def _masked_sums(gradient_BN: Tensor, output_BN: Tensor) -> tuple[Tensor, Tensor]:
    gradient_BN, output_BN = gradient_BN.contiguous(), output_BN.contiguous()
    B, N = gradient_BN.shape
    masked_BN = torch.empty_like(gradient_BN)
    row_tiles, column_tiles = -(-B // SUM_ROWS), -(-N // SUM_COLUMNS)
    sums = masked_BN.new_empty(row_tiles, N, dtype=torch.float32)
    _masked_sums_kernel[(row_tiles, column_tiles)](
        gradient_BN, output_BN, masked_BN, sums, B, N, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS
    )
    return masked_BN, sums.sum(dim=0)


if triton is not None:

    @triton.jit
    def _masked_product_kernel(
        gradient, weight, relu_output, result, sums, B, N, M,
        TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_INNER: tl.constexpr,
    ):  # fmt: skip
        # Neighbouring programs share their rows of the gradient, which the second-level cache
        # then reads once; the weight is small enough to stay there whole.
        column_tiles = tl.cdiv(M, TILE_COLUMNS)
        row_tile = (tl.program_id(0) // column_tiles).to(tl.int64)
        # Places within a tile's rows fit 32 bits, and as many registers.
        gradient += row_tile * TILE_ROWS * N
        relu_output += row_tile * TILE_ROWS * M
        result += row_tile * TILE_ROWS * M
        rows_left = (B - row_tile * TILE_ROWS).to(tl.int32)
        row = tl.arange(0, TILE_ROWS)
        column = tl.program_id(0) % column_tiles * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
        inner = tl.arange(0, TILE_INNER)
        total = tl.zeros((TILE_ROWS, TILE_COLUMNS), tl.float32)
        for start in range(0, N, TILE_INNER):
            k = start + inner
            left = tl.load(
                gradient + row[:, None] * N + k[None, :],
                (row[:, None] < rows_left) & (k[None, :] < N),
                other=0.0,
            )
            right = tl.load(
                weight + k[:, None] * M + column[None, :],
                (k[:, None] < N) & (column[None, :] < M),
                other=0.0,
            )
            total = tl.dot(left, right, total)
        inside = (row[:, None] < rows_left) & (column[None, :] < M)
        place = row[:, None] * M + column[None, :]
        is_open = tl.load(relu_output + place, inside, other=0.0) > 0
        total = tl.where(is_open, total, 0.0)
        tl.store(result + place, total.to(result.dtype.element_ty), inside)
        tl.store(sums + row_tile * M + column, tl.sum(total, axis=0), column < M)

    @triton.jit
    def _masked_sums_kernel(
        gradient, relu_output, masked, sums, B, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr
    ):
        row_tile = tl.program_id(0).to(tl.int64)
        first = row_tile * ROWS * N
        row = tl.arange(0, ROWS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (row[:, None] < (B - row_tile * ROWS)) & (column[None, :] < N)
        place = row[:, None] * N + column[None, :]
        is_open = tl.load(relu_output + first + place, inside, other=0.0) > 0
        value = tl.where(is_open, tl.load(gradient + first + place, inside, other=0.0), 0.0)
        tl.store(masked + first + place, value, inside)
        total = tl.sum(value.to(tl.float32), axis=0)
        tl.store(sums + row_tile * N + column, total, column < N)
