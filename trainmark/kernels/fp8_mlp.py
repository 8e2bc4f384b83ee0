"""The large layers of a perceptron with their products in fp8, forward and backward.

Inputs and weights are e4m3 (more digits), gradients e5m2 (more range). What the layers pass on to
one another is written in fp8 by the products themselves, never in 16 bits. In the backward pass one
pass between two products masks a gradient, sums it for the bias, and copies it in columns: the
units multiply rows by rows, and the weight's gradient sums over the batch.

Scales hold nothing from step to step, so there is nothing to save or to resume:
- a weight's comes from its largest number;
- the input's and the gradients' from the largest of some rows, with room above, where numbers are
  cut off. e5m2 has so much range that the gradients of all layers share one;
- between layers it is 1: behind a ReLU, e4m3 holds 0.002 to 448.

Shapes: B samples, M inputs and N outputs of a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from trainmark.kernels import cublaslt
from trainmark.kernels.cublaslt import Product
from trainmark.kernels.relu_mlp import column_sums

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without a GPU
    triton = None

CODES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
SMALL_LAYER = 2**17  # weights: of a small layer, 16-bit products take as long
WIDTH_STEP = 16  # bytes that the units load together
SAMPLED_ROWS = 1024
INPUT_ROOM, GRADIENT_ROOM = 4.0, 128.0  # how far above the sampled largest numbers may lie
_LEAST = 1e-30  # zeros must not give an infinite scale


def fp8_layers(weights: Sequence[Tensor]) -> int:
    """How many of the first layers are worth it: large, of whole steps, and with a ReLU behind."""
    count = 0
    for w_NM in weights[:-1]:
        if w_NM.numel() <= SMALL_LAYER or len(w_NM) % WIDTH_STEP:
            break
        count += 1
    return count


def fp8_relu_layers(
    x_BM: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    encoded: Sequence["Fp8Weight"] | None = None,
) -> Tensor:
    """Layers in order, a ReLU behind each; once differentiable. The result is of x's type.

    Their widths are whole steps. That of the input may be any: zeros fill it up.

    Args:
        encoded: what `encode_weights` made of these weights, if it was called already.
    """
    x_BM = _filled_up(x_BM)
    return _Fp8Layers.apply(x_BM, encoded or encode_weights(weights), *weights, *biases)


class Fp8Weight:
    """A weight in fp8, in rows and in columns."""

    def __init__(self, w_NM: Tensor, largest: Tensor) -> None:
        self.scale = largest.float().clamp(min=_LEAST) / torch.finfo(CODES).max
        self.w8_NM, self.w8_MN = quantize(_filled_up(w_NM), self.scale, CODES)


@torch.no_grad()
def encode_weights(weights: Sequence[Tensor]) -> list[Fp8Weight]:
    """The weights of consecutive layers."""
    largest = torch._foreach_norm(list(weights), ord=float("inf"))
    return [Fp8Weight(w_NM, most) for w_NM, most in zip(weights, largest, strict=True)]


def _filled_up(x_BM: Tensor) -> Tensor:
    missing = -x_BM.shape[1] % WIDTH_STEP
    return pad(x_BM, (0, missing)) if missing else x_BM


class _Fp8Layers(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BM: Tensor, factors: Sequence[Fp8Weight], *parameters: Tensor
    ) -> Tensor:
        biases, ctx.width = parameters[len(factors) :], parameters[0].shape[1]
        x_scale = _sampled_scale(x_BM, CODES, INPUT_ROOM)
        x8_BM, x8_MB = quantize(x_BM, x_scale, CODES)
        y_BN: Tensor = x8_BM
        scale: Tensor | None = x_scale
        outputs = []
        for layer, (factor, b_N) in enumerate(zip(factors, biases, strict=True)):
            dtype = x_BM.dtype if layer == len(factors) - 1 else CODES
            y_BN = _product(
                y_BN, factor.w8_NM, (scale, factor.scale), dtype, bias=b_N.to(x_BM.dtype)
            )
            scale = None
            outputs.append(y_BN)
        ctx.save_for_backward(
            x_scale, x8_MB, *outputs, *(f.w8_MN for f in factors), *(f.scale for f in factors)
        )
        return outputs[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_scale, x8_MB, *saved = ctx.saved_tensors
        count = len(saved) // 3
        outputs, weights, scales = saved[:count], saved[count : 2 * count], saved[2 * count :]
        scale = _sampled_scale(grads[0], GRADIENTS, GRADIENT_ROOM)
        g8_BN, g8_NB, sums_N = quantize_masked(grads[0], outputs[-1], scale)
        weight_grads, bias_grads = [], [sums_N]
        for layer in range(count - 1, 0, -1):
            # Codes of both gradients have the same scale, so only the weight's is left.
            codes_BM = _product(g8_BN, weights[layer], (None, scales[layer]), GRADIENTS)
            # This also copies the layer's input in columns, which it reads as the ReLU's mask.
            flipped = mask_codes(codes_BM, outputs[layer - 1], scale)
            weight_grads.append(_weight_gradient(g8_NB, flipped.output_NB, (scale, None)))
            bias_grads.append(flipped.sums_N)
            g8_BN, g8_NB = codes_BM, flipped.codes_NB
        weight_grads.append(_weight_gradient(g8_NB, x8_MB, (scale, x_scale))[:, : ctx.width])
        x_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = _product(g8_BN, weights[0], (scale, scales[0]), grads[0].dtype)
        return (x_grad, None, *reversed(weight_grads), *reversed(bias_grads))


def _sampled_scale(x_BM: Tensor, dtype: torch.dtype, room: float) -> Tensor:
    rows = x_BM[:: max(len(x_BM) // SAMPLED_ROWS, 1)]
    if not rows.numel():
        return torch.ones((), device=x_BM.device)
    largest = torch.linalg.vector_norm(rows, ord=float("inf"), dtype=torch.float32)
    return largest.clamp(min=_LEAST) * (room / torch.finfo(dtype).max)


def _weight_gradient(
    left_NB: Tensor, right_MB: Tensor, scales: tuple[Tensor | None, Tensor | None]
) -> Tensor:
    """Summed over all samples: here the units' short accumulators would be heard."""
    return _product(left_NB, right_MB, scales, torch.float32, fast=False)


def _product(
    left8: Tensor,
    right8: Tensor,
    scales: tuple[Tensor | None, Tensor | None],
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    fast: bool = True,
) -> Tensor:
    """left right^T, both in rows; with a bias, a ReLU behind it."""
    if not (left8.numel() and right8.numel()):  # no samples: libraries refuse such factors
        return left8.new_zeros(len(left8), len(right8), dtype=dtype)
    if left8.is_cuda:
        result = left8.new_empty(len(left8), len(right8), dtype=dtype)
        product = Product(
            left=left8, right=right8, result=result, bias=bias, scales=scales, fast=fast
        )
        if cublaslt.run(product):
            return result
    exact = _plain_product(left8, right8, scales, fast)
    exact = exact if bias is None else (exact + bias).relu()
    return _cut_off(exact, dtype) if dtype in (CODES, GRADIENTS) else exact.to(dtype)


def _plain_product(
    left8: Tensor, right8: Tensor, scales: tuple[Tensor | None, Tensor | None], fast: bool
) -> Tensor:
    """In fp32: torch's on a GPU; elsewhere the same numbers by an ordinary product."""
    one = torch.ones((), device=left8.device)
    of_left, of_right = (one if scale is None else scale for scale in scales)
    if not left8.is_cuda:
        return (left8.float() @ right8.float().t()) * of_left * of_right
    return torch._scaled_mm(
        left8,
        right8.t(),
        scale_a=of_left,
        scale_b=of_right,
        out_dtype=torch.float32,
        use_fast_accum=fast,
    )


# --- to fp8, in rows and in columns
#
# In columns the batch is filled up with zeros to whole steps, which add nothing to a sum over it.
# fp32 is rounded to bf16 on the way, whose steps are small beside those of fp8.


def quantize_reference(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = x.bfloat16() if x.dtype == torch.float32 else x
    codes = _cut_off(x.float() / scale, dtype)
    return codes, _in_columns(codes)


def quantize_masked_reference(
    gradient_BN: Tensor, output_BN: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A 16-bit gradient where the ReLU's output is positive, in rows and in columns; and its sum
    over the batch."""
    masked = torch.where(output_BN > 0, gradient_BN.float(), 0.0)
    codes = _cut_off(masked / scale, GRADIENTS)
    return codes, _in_columns(codes), masked.sum(dim=0)


@dataclass(frozen=True)
class Flipped:
    """What `mask_codes` finds besides the masked codes."""

    codes_NB: Tensor
    output_NB: Tensor
    sums_N: Tensor
    """Of the numbers that the masked codes stand for, over the batch."""


def mask_codes_reference(codes_BN: Tensor, output_BN: Tensor, scale: Tensor) -> Flipped:
    """Set codes of a gradient to 0, in place, where the code of the ReLU's output is."""
    codes_BN.view(torch.uint8).masked_fill_(output_BN.view(torch.uint8) == 0, 0)
    sums_N = codes_BN.float().sum(dim=0) * scale
    return Flipped(_in_columns(codes_BN), _in_columns(output_BN), sums_N)


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """In rows and in columns."""
    if not x.is_cuda:
        return quantize_reference(x, scale, dtype)
    return _quantize(x, scale, dtype)


def quantize_masked(
    gradient_BN: Tensor, output_BN: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if not gradient_BN.is_cuda:
        return quantize_masked_reference(gradient_BN, output_BN, scale)
    return _quantize_masked(gradient_BN, output_BN, scale)


def mask_codes(codes_BN: Tensor, output_BN: Tensor, scale: Tensor) -> Flipped:
    if not codes_BN.is_cuda:
        return mask_codes_reference(codes_BN, output_BN, scale)
    return _mask_codes(codes_BN, output_BN, scale)


def _cut_off(x: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def _in_columns(codes_BN: Tensor) -> Tensor:
    flipped = codes_BN.new_zeros(codes_BN.shape[1], _whole_steps(len(codes_BN)))
    flipped[:, : len(codes_BN)] = codes_BN.t()
    return flipped


def _whole_steps(count: int) -> int:
    return -(-count // WIDTH_STEP) * WIDTH_STEP


# --- Triton
#
# Sums over the batch are taken by each program and added up afterwards, always in the same order.

TILE_ROWS, TILE_COLUMNS = 128, 64
ROW_PROGRAMS = 128  # with sums: each takes every so many-th tile of rows
WORD_ROWS, WORD_COLUMNS = 16, 64  # of 4 x 4 codes


def _quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    B, N = x.shape
    codes, flipped = x.new_empty(B, N, dtype=dtype), x.new_empty(N, _whole_steps(B), dtype=dtype)
    tiles = (-(-_whole_steps(B) // TILE_ROWS), -(-N // TILE_COLUMNS))
    _quantize_kernel[tiles](
        x, x, scale, codes, flipped, scale, B, N, flipped.shape[1],
        LARGEST=torch.finfo(dtype).max, MASKED=False,
        TILE_ROWS=TILE_ROWS, TILE_COLUMNS=TILE_COLUMNS, num_warps=8,
    )  # fmt: skip
    return codes, flipped


def _quantize_masked(
    gradient_BN: Tensor, output_BN: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    gradient_BN = gradient_BN.contiguous()
    B, N = gradient_BN.shape
    steps = _whole_steps(B)
    codes = gradient_BN.new_empty(B, N, dtype=GRADIENTS)
    flipped = gradient_BN.new_empty(N, steps, dtype=GRADIENTS)
    programs = min(-(-steps // TILE_ROWS), ROW_PROGRAMS)
    sums = gradient_BN.new_empty(programs, N, dtype=torch.float32)
    _quantize_kernel[(programs, -(-N // TILE_COLUMNS))](
        gradient_BN, output_BN, scale, codes, flipped, sums,
        B, N, steps, LARGEST=torch.finfo(GRADIENTS).max, MASKED=True,
        TILE_ROWS=TILE_ROWS, TILE_COLUMNS=TILE_COLUMNS, num_warps=8,
    )  # fmt: skip
    return codes, flipped, column_sums(sums)


def _mask_codes(codes_BN: Tensor, output_BN: Tensor, scale: Tensor) -> Flipped:
    B, N = codes_BN.shape
    steps = _whole_steps(B)
    flipped, flipped_output = codes_BN.new_empty(N, steps), output_BN.new_empty(N, steps)
    row_tiles = -(-steps // (4 * WORD_ROWS))
    sums = codes_BN.new_empty(row_tiles, N, dtype=torch.float32)
    words = (tensor.view(torch.int32) for tensor in (codes_BN, output_BN, flipped, flipped_output))
    _mask_codes_kernel[(row_tiles, -(-N // (4 * WORD_COLUMNS)))](
        *words, scale, sums, B, N // 4, steps // 4, ROWS=WORD_ROWS, COLUMNS=WORD_COLUMNS,
        num_warps=4,
    )  # fmt: skip
    return Flipped(flipped, flipped_output, column_sums(sums))


if triton is not None:

    @triton.jit
    def _quantize_kernel(
        values, relu_output, scale, codes, flipped, sums, B, N, steps,
        LARGEST: tl.constexpr, MASKED: tl.constexpr,
        TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    ):  # fmt: skip
        column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
        factor = tl.load(scale)
        dtype: tl.constexpr = codes.dtype.element_ty
        total = tl.zeros((TILE_ROWS, TILE_COLUMNS), tl.float32)
        for tile in range(tl.program_id(0), tl.cdiv(steps, TILE_ROWS), tl.num_programs(0)):
            row = tl.cast(tile, tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
            inside = (row[:, None] < B) & (column[None, :] < N)
            place = row[:, None] * N + column[None, :]
            value = tl.load(values + place, inside, other=0.0)
            if value.dtype == tl.float32:
                value = value.to(tl.bfloat16)
            if MASKED:
                is_open = tl.load(relu_output + place, inside, other=0.0) > 0
                value = tl.where(is_open, value, 0.0)
                total += value.to(tl.float32)
            tl.store(codes + place, _to_fp8(value, factor, LARGEST, dtype), inside)
            # Flipped in 16 bits: of codes that are stored in rows and flipped as well, ptxas 12.8
            # (that of Triton 3.6) reads some from a register that it never wrote.
            code_flipped = _to_fp8(tl.trans(value), factor, LARGEST, dtype)
            place_flipped = column[:, None].to(tl.int64) * steps + row[None, :]
            inside_flipped = (column[:, None] < N) & (row[None, :] < steps)
            tl.store(flipped + place_flipped, code_flipped, inside_flipped)
        if MASKED:
            place_of_sums = sums + tl.program_id(0) * N + column
            tl.store(place_of_sums, tl.sum(total, axis=0), column < N)

    @triton.jit
    def _to_fp8(value, scale, LARGEST: tl.constexpr, dtype: tl.constexpr):
        value = value.to(tl.float32) / scale
        return tl.minimum(tl.maximum(value, -LARGEST), LARGEST).to(dtype)

    # Four codes of neighbouring columns are a word. From the words of four rows come four words of
    # neighbouring rows, one for each column, and those are moved as a whole.

    @triton.jit
    def _mask_codes_kernel(
        codes, relu_output, flipped, flipped_output, scale, sums, B, N, steps,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        row_tile = tl.program_id(0).to(tl.int64)
        row = row_tile * ROWS + tl.arange(0, ROWS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        o0, c0 = _masked_words(codes, relu_output, row * 4, column, B, N)
        o1, c1 = _masked_words(codes, relu_output, row * 4 + 1, column, B, N)
        o2, c2 = _masked_words(codes, relu_output, row * 4 + 2, column, B, N)
        o3, c3 = _masked_words(codes, relu_output, row * 4 + 3, column, B, N)
        inside = (column[:, None] < N) & (row[None, :] < steps)
        factor = tl.load(scale)
        for byte in tl.static_range(4):
            place = (column[:, None].to(tl.int64) * 4 + byte) * steps + row[None, :]
            tl.store(flipped + place, tl.trans(_bytes_of(c0, c1, c2, c3, byte)), inside)
            tl.store(flipped_output + place, tl.trans(_bytes_of(o0, o1, o2, o3, byte)), inside)
            total = _number(c0, byte) + _number(c1, byte) + _number(c2, byte) + _number(c3, byte)
            place_of_sums = sums + (row_tile * N + column) * 4 + byte
            tl.store(place_of_sums, tl.sum(total, axis=0) * factor, column < N)

    @triton.jit
    def _masked_words(codes, relu_output, row, column, B, N):
        place = row[:, None] * N + column[None, :]
        inside = (row[:, None] < B) & (column[None, :] < N)
        output = tl.load(relu_output + place, inside, other=0)
        # 1 in the lowest bit of every byte that is not 0, then ones in all of its bits. Behind a
        # ReLU no number has a sign, so that the highest bit is free.
        is_open = ((output + 0x7F7F7F7F) >> 7) & 0x01010101
        word = tl.load(codes + place, inside, other=0) & (is_open * 0xFF)
        tl.store(codes + place, word, inside)
        return output, word

    @triton.jit
    def _bytes_of(w0, w1, w2, w3, BYTE: tl.constexpr):
        """The same byte of four words, as a word."""
        shift: tl.constexpr = 8 * BYTE
        low = ((w0 >> shift) & 0xFF) | (((w1 >> shift) & 0xFF) << 8)
        return low | (((w2 >> shift) & 0xFF) << 16) | (((w3 >> shift) & 0xFF) << 24)

    @triton.jit
    def _number(word, BYTE: tl.constexpr):
        """What an e5m2 code stands for: it is the upper half of an fp16 number."""
        half = (((word >> (8 * BYTE)) & 0xFF) << 8).to(tl.int16)
        return half.to(tl.float16, bitcast=True).to(tl.float32)
