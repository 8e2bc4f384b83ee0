"""A multi-layer perceptron with ReLUs, forward and backward, with little besides the GEMMs.

Bias and ReLU are epilogues of the forward GEMMs. In the backward pass the gradient of a hidden
layer is masked where its ReLU was closed, and summed over the batch for the bias: for large layers
both are epilogues of the GEMM that makes that gradient, which is then our own; for small ones
cuBLAS's GEMM and one pass for both are faster. (cuBLASLt has such epilogues, but no fast ones.)

Shapes: B samples, M inputs and N outputs of a layer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, pad

from trainmark.hardware.nvidia import capability
from trainmark.kernels.compiled import has_compiled
from trainmark.kernels.interaction_layout import PAD_TO

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
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

SAMPLE_STEP = 8
MIN_ONEDNN = 16  # samples; fewer take up to 2.5 times as long as by MKL


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
    on_cpu = has_compiled(x_BM, *weights) and not torch.is_autocast_enabled("cpu")
    if not (x_BM.is_cuda or on_cpu):
        return relu_mlp_reference(x_BM, weights, biases, last_relu)
    if not torch.is_grad_enabled():  # to predict, without the work of autograd around it
        return _forward(x_BM, last_relu, [*weights, *biases])[0][-1]
    result: Tensor = _ReluMlp.apply(x_BM, last_relu, comes_masked, *weights, *biases)
    return result


class _ReluMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BM: Tensor, last_relu: bool, comes_masked: bool, *parameters: Tensor
    ) -> Tensor:
        ctx.width = x_BM.shape[1]
        (*inputs, output), weights = _forward(x_BM, last_relu, parameters)
        ctx.must_mask = last_relu and not comes_masked
        ctx.save_for_backward(output if ctx.must_mask else None, *inputs, *weights)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        output, *saved = ctx.saved_tensors
        inputs, weights = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        gradient = grads[0].contiguous()
        if ctx.must_mask:
            gradient, bias_grad = masked_sums(gradient, output)
        else:
            bias_grad = _batch_sum(gradient)
        weight_grads, bias_grads = [], [bias_grad]
        for layer in range(len(weights) - 1, 0, -1):
            weight_grads.append(weight_gradient(gradient, inputs[layer]))
            gradient, bias_grad = masked_gemm(gradient, weights[layer], inputs[layer])
            bias_grads.append(bias_grad)
        weight_grads.append(weight_gradient(gradient, inputs[0])[:, : ctx.width])
        x_grad = (gradient @ weights[0])[:, : ctx.width] if ctx.needs_input_grad[0] else None
        return (x_grad, None, None, *reversed(weight_grads), *reversed(bias_grads))


def _forward(
    x_BM: Tensor, last_relu: bool, parameters: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Every layer's input, then the output; and the weights as the GEMMs took them.

    `parameters` are all weights, then all biases.
    """
    cast = cast_together(parameters, x_BM.dtype)
    weights, biases = cast[: len(cast) // 2], cast[len(cast) // 2 :]
    # A width that tensor cores like; the only one that data, not a designer, may have chosen.
    missing = -x_BM.shape[1] % PAD_TO if x_BM.is_cuda else 0
    if missing:
        x_BM, weights[0] = pad(x_BM, (0, missing)), pad(weights[0], (0, missing))
    values = [x_BM]
    for w_NM, b_N in zip(weights[:-1], biases[:-1], strict=True):
        values.append(_layer(values[-1], w_NM, b_N, relu=True))
    values.append(_layer(values[-1], weights[-1], biases[-1], relu=last_relu))
    return values, weights


def _layer(x_BM: Tensor, w_NM: Tensor, b_N: Tensor, *, relu: bool) -> Tensor:
    y_BN: Tensor
    if _is_onednns(x_BM):
        # Its GEMM, unlike MKL's, adds the bias. Its ReLU would make zeros of NaNs.
        y_BN = torch.ops.mkldnn._linear_pointwise(x_BM, w_NM, b_N, "none", [], "")
    elif relu and x_BM.shape[1]:
        return torch._addmm_activation(b_N, x_BM, w_NM.t())
    else:  # of no inputs, torch's GEMM with a ReLU is the bias itself on a GPU
        y_BN = torch.addmm(b_N, x_BM, w_NM.t())
    return y_BN.relu_() if relu else y_BN


def _is_onednns(x_BM: Tensor) -> bool:
    """Whether to leave a GEMM to oneDNN, which reorders the weights for it."""
    is_there = has_compiled(x_BM) and torch.backends.mkldnn.is_available()
    return is_there and len(x_BM) >= MIN_ONEDNN and x_BM.shape[1] > 0


def cast_together(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Copies in another type, by one launch for all; the tensors themselves where it is theirs."""
    if all(tensor.dtype == dtype for tensor in tensors):
        return list(tensors)
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, list(tensors))
    return copies


def weight_gradient(gradient_BN: Tensor, x_BM: Tensor) -> Tensor:
    """[N, M] in fp32: a sum over the batch, which 16 bits would round."""
    if not gradient_BN.is_cuda or gradient_BN.dtype == torch.float32:
        return (gradient_BN.t() @ x_BM).float()
    # Of 4097 samples in fp16, torch's GEMM was 1.5 % off, as if one of them were missing (H200,
    # CUDA 13.0); of 1000 it was right. So the last few, if any, are multiplied apart.
    whole = len(x_BM) // SAMPLE_STEP * SAMPLE_STEP
    if whole == 0:
        return gradient_BN.float().t() @ x_BM.float()
    grad_NM = torch.mm(gradient_BN[:whole].t(), x_BM[:whole], out_dtype=torch.float32)
    if whole < len(x_BM):
        grad_NM += gradient_BN[whole:].float().t() @ x_BM[whole:].float()
    return grad_NM


def _batch_sum(gradient_BN: Tensor) -> Tensor:
    """[N] in fp32."""
    if gradient_BN.is_cuda:
        return column_sums(gradient_BN)
    return gradient_BN.sum(dim=0, dtype=torch.float32)


def masked_gemm(gradient_BN: Tensor, w_NM: Tensor, x_BM: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient @ w) where x is positive, and its sum over the batch: x came out of a ReLU."""
    if _worth_fusing(gradient_BN, w_NM, x_BM):
        return _masked_gemm(gradient_BN, w_NM, x_BM)
    return masked_sums(gradient_BN @ w_NM, x_BM, in_place=True)


def _worth_fusing(gradient_BN: Tensor, w_NM: Tensor, x_BM: Tensor) -> bool:
    """Whether our GEMM is near cuBLAS's: a large one in 16 bits, by Hopper's bulk copies, which
    take rows that begin at multiples of 16 bytes."""
    if not gradient_BN.numel() or gradient_BN.dtype not in (torch.bfloat16, torch.float16):
        return False
    is_aligned = all(
        t.is_contiguous() and t.shape[1] % 8 == 0 and t.data_ptr() % 16 == 0
        for t in (gradient_BN, w_NM, x_BM)
    )
    if not (gradient_BN.is_cuda and is_aligned and w_NM.numel() >= SMALLEST_FUSED):
        return False
    # What came after these has bulk copies, too, but too little memory on the chip for such tiles.
    found = capability(gradient_BN.device)
    return found is not None and found[0] in (9, 10)


def masked_sums(
    gradient_BN: Tensor, output_BN: Tensor, *, in_place: bool = False
) -> tuple[Tensor, Tensor]:
    """`masked_sums_reference` in one pass; `in_place`: the gradient may be overwritten."""
    if gradient_BN.is_cuda:
        return _masked_sums(gradient_BN, output_BN)
    if has_compiled(gradient_BN, output_BN):
        from trainmark.kernels import cpu_mlp

        return cpu_mlp.masked_sums(gradient_BN, output_BN, in_place=in_place)
    return masked_sums_reference(gradient_BN, output_BN)


# --- Triton
#
# Column sums are taken by each program and added up afterwards, always in the same order, so that
# results are repeatable bit by bit.

TILE_ROWS, TILE_COLUMNS, TILE_INNER = 256, 128, 64
SMALLEST_FUSED = 2**17  # weights: below, prologue and epilogue take most of it
SUM_ROWS, SUM_COLUMNS, SUM_PROGRAMS = 32, 128, 512
TOTAL_ROWS, TOTAL_COLUMNS, FEW_ROWS = 512, 8, 1024


def _masked_gemm(gradient_BN: Tensor, w_NM: Tensor, x_BM: Tensor) -> tuple[Tensor, Tensor]:
    B, M = x_BM.shape
    result_BM = torch.empty_like(x_BM)
    row_tiles, column_tiles = -(-B // TILE_ROWS), -(-M // TILE_COLUMNS)
    sums = result_BM.new_empty(row_tiles, M, dtype=torch.float32)
    tiles = row_tiles * column_tiles
    programs = min(_processors(x_BM.device), tiles)
    outer = [TILE_ROWS, TILE_COLUMNS // 2]
    _masked_gemm_kernel[(programs,)](
        TensorDescriptor.from_tensor(gradient_BN, [TILE_ROWS, TILE_INNER]),
        TensorDescriptor.from_tensor(w_NM, [TILE_INNER, TILE_COLUMNS]),
        TensorDescriptor.from_tensor(x_BM, outer), TensorDescriptor.from_tensor(result_BM, outer),
        sums, len(w_NM), M, tiles, PROGRAMS=programs,
        TILE_ROWS=TILE_ROWS, TILE_COLUMNS=TILE_COLUMNS, TILE_INNER=TILE_INNER,
        num_warps=8, num_stages=3,
    )  # fmt: skip
    return result_BM, column_sums(sums)


def _processors(device: torch.device) -> int:
    """Of a GPU; elsewhere a few, for the interpreter."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def _masked_sums(gradient_BN: Tensor, output_BN: Tensor) -> tuple[Tensor, Tensor]:
    gradient_BN, output_BN = gradient_BN.contiguous(), output_BN.contiguous()
    B, N = gradient_BN.shape
    masked_BN = torch.empty_like(gradient_BN)
    programs, column_tiles = min(-(-B // SUM_ROWS), SUM_PROGRAMS), -(-N // SUM_COLUMNS)
    sums = masked_BN.new_empty(programs, N, dtype=torch.float32)
    _masked_sums_kernel[(programs, column_tiles)](
        gradient_BN, output_BN, masked_BN, sums, B, N, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS
    )
    return masked_BN, column_sums(sums)


def column_sums(x: Tensor) -> Tensor:
    """Of any rows, in fp32; torch's reduction takes several times as long."""
    x = x.contiguous()
    if len(x) > FEW_ROWS:
        x = _partial_sums(x, SUM_PROGRAMS, SUM_ROWS, SUM_COLUMNS)
    return _partial_sums(x, 1, TOTAL_ROWS, TOTAL_COLUMNS)[0]


def _partial_sums(x: Tensor, programs: int, rows: int, columns: int) -> Tensor:
    """[programs, N], each of every so many-th tile of rows."""
    B, N = x.shape
    sums = x.new_empty(programs, N, dtype=torch.float32)
    _column_sums_kernel[(programs, -(-N // columns))](x, sums, B, N, ROWS=rows, COLUMNS=columns)
    return sums


if triton is not None:

    @triton.jit
    def _masked_gemm_kernel(
        gradient, weight, relu_output, result, sums, N, M, tiles, PROGRAMS: tl.constexpr,
        TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_INNER: tl.constexpr,
    ):  # fmt: skip
        # Neighbouring tiles share their rows of the gradient, which the second-level cache then
        # reads once; the weight is small enough to stay there whole. The loops are flattened so
        # that the next tile's first loads are under way while this one ends.
        column_tiles = tl.cdiv(M, TILE_COLUMNS)
        steps = tl.cdiv(N, TILE_INNER)
        for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
            row_tile = tile // column_tiles
            row = row_tile * TILE_ROWS
            column = tile % column_tiles * TILE_COLUMNS
            total = tl.zeros((TILE_ROWS, TILE_COLUMNS), tl.float32)
            for step in range(steps):
                left = gradient.load([row, step * TILE_INNER])
                right = weight.load([step * TILE_INNER, column])
                total = tl.dot(left, right, total)
            # In halves, for which there is room beside the next loads.
            HALF: tl.constexpr = TILE_COLUMNS // 2
            halves = tl.permute(tl.reshape(total, (TILE_ROWS, 2, HALF)), (0, 2, 1))
            first, second = tl.split(halves)
            row_sums = sums + row_tile * M
            _mask_and_sum(first, relu_output, result, row_sums, row, column, M, HALF)
            _mask_and_sum(second, relu_output, result, row_sums, row, column + HALF, M, HALF)

    @triton.jit
    def _mask_and_sum(values, relu_output, result, sums, row, column, M, COLUMNS: tl.constexpr):
        # Outside of the matrix, copies read zeros and write nothing.
        values = tl.where(relu_output.load([row, column]) > 0, values, 0.0)
        result.store([row, column], values.to(result.dtype))
        columns = column + tl.arange(0, COLUMNS)
        tl.store(sums + columns, tl.sum(values, axis=0), columns < M)

    @triton.jit
    def _masked_sums_kernel(
        gradient, relu_output, masked, sums, B, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr
    ):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for tile in range(tl.program_id(0), tl.cdiv(B, ROWS), tl.num_programs(0)):
            row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
            inside = (row[:, None] < B) & (column[None, :] < N)
            place = row[:, None] * N + column[None, :]
            is_open = tl.load(relu_output + place, inside, other=0.0) > 0
            value = tl.where(is_open, tl.load(gradient + place, inside, other=0.0), 0.0)
            tl.store(masked + place, value, inside)
            total += value.to(tl.float32)
        sums += tl.program_id(0) * N
        tl.store(sums + column, tl.sum(total, axis=0), column < N)

    @triton.jit
    def _column_sums_kernel(x, sums, B, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for tile in range(tl.program_id(0), tl.cdiv(B, ROWS), tl.num_programs(0)):
            row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
            inside = (row[:, None] < B) & (column[None, :] < N)
            total += tl.load(x + row[:, None] * N + column[None, :], inside, other=0.0)
        sums += tl.program_id(0) * N
        tl.store(sums + column, tl.sum(total, axis=0), column < N)
