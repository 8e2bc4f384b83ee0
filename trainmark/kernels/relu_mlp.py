"""A multi-layer perceptron with ReLUs, forward and backward, with little besides the products.

Bias and ReLU ride on the forward products. In the backward pass the gradient of a hidden layer is
masked where its ReLU was closed, and summed over the batch for the bias: both ride on the product
that makes that gradient, cuBLASLt's where it can, else our own, or, for small layers, take one pass
together. A last layer with one output (a click's logit) takes one pass for its whole backward.

Shapes: B samples, M inputs and N outputs of a layer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, pad

from trainmark.kernels import cublaslt
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


def single_output_backward_reference(
    gradient_B1: Tensor, w_1M: Tensor, x_BM: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of a layer with one output, whose input came out of a ReLU: the gradient of that ReLU's
    input and its sum over the batch, and the gradients of the layer's weight and bias."""
    masked_BM, sums_M = masked_sums_reference(gradient_B1 * w_1M, x_BM)
    bias_grad_1 = gradient_B1.sum(dim=0, dtype=torch.float32)
    return masked_BM, sums_M, _weight_gradient(gradient_B1, x_BM), bias_grad_1


# --- dispatch


def relu_mlp(
    x_BM: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    last_relu: bool,
    *,
    comes_masked: bool = False,
) -> Tensor:
    """The same, once differentiable. Weights are cast to the type of `x_BM` in one launch.

    Args:
        comes_masked: what comes back in the backward pass is 0 where the last ReLU is closed.
    """
    if not x_BM.is_cuda:
        return relu_mlp_reference(x_BM, weights, biases, last_relu)
    return _ReluMlp.apply(x_BM, last_relu, comes_masked, *weights, *biases)


class _ReluMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BM: Tensor, last_relu: bool, comes_masked: bool, *parameters: Tensor
    ) -> Tensor:
        cast = _cast(parameters, x_BM.dtype)
        weights, biases = cast[: len(cast) // 2], cast[len(cast) // 2 :]
        # A width that tensor cores like; the only one that data, not a designer, may have chosen.
        ctx.width = x_BM.shape[1]
        missing = -ctx.width % PAD_TO
        if missing:
            x_BM, weights[0] = pad(x_BM, (0, missing)), pad(weights[0], (0, missing))
        inputs, bits = [x_BM], []
        for w_NM, b_N in zip(weights[:-1], biases[:-1], strict=True):
            output, open_bits = _relu_product(inputs[-1], w_NM, b_N)
            inputs.append(output)
            bits.append(open_bits)
        last = torch._addmm_activation if last_relu else torch.addmm
        output = last(biases[-1], inputs[-1], weights[-1].t())
        ctx.must_mask = last_relu and not comes_masked
        ctx.save_for_backward(output if ctx.must_mask else None, *inputs, *weights, *bits)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        output, *saved = ctx.saved_tensors
        count = (len(saved) + 1) // 3
        inputs, weights, bits = saved[:count], saved[count : 2 * count], saved[2 * count :]
        gradient, hidden = grads[0].contiguous(), count - 1
        weight_grads, bias_grads = [], []
        if ctx.must_mask:
            gradient, bias_grad = masked_sums(gradient, output)
            bias_grads.append(bias_grad)
        elif hidden > 0 and len(weights[-1]) == 1:
            gradient, bias_grad, weight_grad, own_bias_grad = single_output_backward(
                gradient, weights[-1], inputs[-1]
            )
            weight_grads.append(weight_grad)
            bias_grads += [own_bias_grad, bias_grad]
            hidden -= 1
        else:
            bias_grads.append(gradient.sum(dim=0, dtype=torch.float32))
        for layer in range(hidden, 0, -1):
            weight_grads.append(_weight_gradient(gradient, inputs[layer]))
            gradient, bias_grad = masked_product(
                gradient, weights[layer], inputs[layer], bits[layer - 1]
            )
            bias_grads.append(bias_grad)
        weight_grads.append(_weight_gradient(gradient, inputs[0])[:, : ctx.width])
        x_grad = (gradient @ weights[0])[:, : ctx.width] if ctx.needs_input_grad[0] else None
        return (x_grad, None, None, *reversed(weight_grads), *reversed(bias_grads))


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Copies in another type, by one launch for all; the tensors themselves where it is theirs."""
    if all(tensor.dtype == dtype for tensor in tensors):
        return list(tensors)
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, list(tensors))
    return copies


def _relu_product(x_BM: Tensor, w_NM: Tensor, b_N: Tensor) -> tuple[Tensor, Tensor | None]:
    """The layer's output, and the bits where its ReLU is open where the backward can use them."""
    found = cublaslt.relu_product(x_BM, w_NM, b_N)
    return found or (torch._addmm_activation(b_N, x_BM, w_NM.t()), None)


def _weight_gradient(gradient_BN: Tensor, x_BM: Tensor) -> Tensor:
    """[N, M] in fp32: a sum over the batch, which 16 bits would round."""
    if gradient_BN.is_cuda and gradient_BN.dtype != torch.float32:
        return torch.mm(gradient_BN.t(), x_BM, out_dtype=torch.float32)
    return (gradient_BN.t() @ x_BM).float()


def masked_product(
    gradient_BN: Tensor, w_NM: Tensor, x_BM: Tensor, open_bits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(gradient @ w) where x is positive, and its sum over the batch: x came out of a ReLU.

    The bits say the same as x in less room.
    """
    if open_bits is not None:
        found = cublaslt.masked_product(gradient_BN, w_NM, open_bits)
        if found is not None:
            return found
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


def single_output_backward(
    gradient_B1: Tensor, w_1M: Tensor, x_BM: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`single_output_backward_reference` in one pass."""
    if x_BM.is_cuda and x_BM.shape[1] <= MOST_SINGLE_INPUTS:
        return _single_output_backward(gradient_B1, w_1M, x_BM)
    return single_output_backward_reference(gradient_B1, w_1M, x_BM)


# --- Triton
#
# Column sums are taken per tile of rows and added up afterwards, always in the same order, so that
# results are repeatable bit by bit.

TILE_ROWS, TILE_COLUMNS, TILE_INNER = 128, 128, 64
SUM_ROWS, SUM_COLUMNS = 32, 128
SINGLE_TILES, SINGLE_NUMBERS = 8, 4096  # of a program's rows, one after the other; of a tile
MOST_SINGLE_INPUTS = 1024


def _masked_product(gradient_BN: Tensor, w_NM: Tensor, x_BM: Tensor) -> tuple[Tensor, Tensor]:
    (B, N), M = gradient_BN.shape, w_NM.shape[1]
    gradient_BN, w_NM, x_BM = gradient_BN.contiguous(), w_NM.contiguous(), x_BM.contiguous()
    result_BM = torch.empty_like(x_BM)
    row_tiles, column_tiles = -(-B // TILE_ROWS), -(-M // TILE_COLUMNS)
    sums = result_BM.new_empty(row_tiles, M, dtype=torch.float32)
    _masked_product_kernel[(row_tiles * column_tiles,)](
        gradient_BN, w_NM, x_BM, result_BM, sums, B, N, M,
        TILE_ROWS=TILE_ROWS, TILE_COLUMNS=TILE_COLUMNS, TILE_INNER=TILE_INNER,
        num_warps=8, num_stages=3,
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


def _single_output_backward(
    gradient_B1: Tensor, w_1M: Tensor, x_BM: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x_BM = x_BM.contiguous()
    B, M = x_BM.shape
    columns = triton.next_power_of_2(M)
    rows = max(SINGLE_NUMBERS // columns, 1)
    masked_BM = torch.empty_like(x_BM)
    programs = -(-B // (rows * SINGLE_TILES))
    sums = masked_BM.new_empty(programs, 2 * M + 1, dtype=torch.float32)
    _single_output_kernel[(programs,)](
        gradient_B1, w_1M, x_BM, masked_BM, sums, B, M,
        TILES=SINGLE_TILES, ROWS=rows, COLUMNS=columns,
    )  # fmt: skip
    total = sums.sum(dim=0)
    return masked_BM, total[:M], total[M : 2 * M].view(1, M), total[2 * M :]


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

    @triton.jit
    def _single_output_kernel(
        gradient, weight, relu_output, masked, sums, B, M,
        TILES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        program = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, COLUMNS)
        w = tl.load(weight + column, column < M, other=0.0).to(tl.float32)
        masked_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
        weight_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
        own_sum = tl.zeros((ROWS,), tl.float32)
        for tile in range(TILES):
            row = (program * TILES + tile) * ROWS + tl.arange(0, ROWS)
            g = tl.load(gradient + row, row < B, other=0.0).to(tl.float32)
            inside = (row[:, None] < B) & (column[None, :] < M)
            place = row[:, None] * M + column[None, :]
            x = tl.load(relu_output + place, inside, other=0.0).to(tl.float32)
            value = tl.where(x > 0, g[:, None] * w[None, :], 0.0)
            tl.store(masked + place, value.to(masked.dtype.element_ty), inside)
            masked_sum += value
            weight_sum += g[:, None] * x
            own_sum += g
        sums += program * (2 * M + 1)
        tl.store(sums + column, tl.sum(masked_sum, axis=0), column < M)
        tl.store(sums + M + column, tl.sum(weight_sum, axis=0), column < M)
        tl.store(sums + 2 * M, tl.sum(own_sum, axis=0))
