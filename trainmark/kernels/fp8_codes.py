"""fp8 codes in rows and in columns, and the mask of a ReLU between two GEMMs of them.

Tensor cores multiply fp8 rows by rows; the gradient of a weight sums over the batch, so by columns.

In columns the batch is filled up with zeros to whole steps, which add nothing to a sum over it.
fp32 is rounded to bf16 on the way, whose steps are small beside those of fp8.

Shapes: B samples, N outputs of a layer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainmark.kernels.relu_mlp import column_sums
from trainmark.kernels.triton_here import tl, triton

CODES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
WIDTH_STEP = 16  # bytes that tensor cores load together

# --- plain torch


def quantize_reference(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = x.bfloat16() if x.dtype == torch.float32 else x
    codes = cut_off(x.float() / scale, dtype)
    return codes, _in_columns(codes)


def quantize_masked_reference(
    gradient_BN: Tensor, output_BN: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A 16-bit gradient where the ReLU's output is positive, in rows and in columns; and its sum
    over the batch."""
    masked = torch.where(output_BN > 0, gradient_BN.float(), 0.0)
    codes = cut_off(masked / scale, GRADIENTS)
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


def cut_off(x: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def _in_columns(codes_BN: Tensor) -> Tensor:
    flipped = codes_BN.new_zeros(codes_BN.shape[1], _whole_steps(len(codes_BN)))
    flipped[:, : len(codes_BN)] = codes_BN.t()
    return flipped


def _whole_steps(count: int) -> int:
    return -(-count // WIDTH_STEP) * WIDTH_STEP


# --- dispatch


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """In rows and in columns."""
    if not x.is_cuda:
        return quantize_reference(x, scale, dtype)
    return _quantize(x, scale, dtype)


@dataclass(frozen=True)
class Codes:
    """fp8 numbers in rows alone."""

    codes: Tensor
    scale: Tensor
    """What to multiply them by."""

    def fill(self, x: Tensor) -> None:
        if self.codes.is_cuda:
            _quantize_rows(x, self.scale, self.codes)
        else:
            self.codes.copy_(cut_off(x.float() / self.scale, self.codes.dtype))


def quantize_masked(
    gradient_BN: Tensor, output_BN: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if not gradient_BN.is_cuda:
        return quantize_masked_reference(gradient_BN, output_BN, scale)
    return _quantize_masked(gradient_BN, output_BN, scale)


def mask_codes(codes_BN: Tensor, output_BN: Tensor, scale: Tensor) -> Flipped:
    if not (codes_BN.is_cuda and codes_BN.numel()):  # no codes are no words
        return mask_codes_reference(codes_BN, output_BN, scale)
    return _mask_codes(codes_BN, output_BN, scale)


# --- Triton
#
# Sums over the batch are taken by each program and added up afterwards, always in the same order.

TILE, TILE_ROWS, TILE_COLUMNS = 8192, 128, 64
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


def _quantize_rows(x: Tensor, scale: Tensor, codes: Tensor) -> None:
    x, count = x.contiguous(), x.numel()
    _quantize_rows_kernel[(-(-count // TILE),)](
        x, scale, codes, count, LARGEST=torch.finfo(codes.dtype).max, TILE=TILE, num_warps=8
    )


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
            tl.store(codes + place, to_fp8(value, factor, LARGEST, dtype), inside)
            # Flipped in 16 bits: of codes that are stored in rows and flipped as well, ptxas 12.8
            # (that of Triton 3.6) reads some from a register that it never wrote.
            code_flipped = to_fp8(tl.trans(value), factor, LARGEST, dtype)
            place_flipped = column[:, None].to(tl.int64) * steps + row[None, :]
            inside_flipped = (column[:, None] < N) & (row[None, :] < steps)
            tl.store(flipped + place_flipped, code_flipped, inside_flipped)
        if MASKED:
            place_of_sums = sums + tl.program_id(0) * N + column
            tl.store(place_of_sums, tl.sum(total, axis=0), column < N)

    @triton.jit
    def _quantize_rows_kernel(
        values, scale, codes, count, LARGEST: tl.constexpr, TILE: tl.constexpr
    ):
        place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        inside = place < count
        value = tl.load(values + place, inside)
        code = to_fp8(value, tl.load(scale), LARGEST, codes.dtype.element_ty)
        tl.store(codes + place, code, inside)

    @triton.jit
    def to_fp8(value, scale, LARGEST: tl.constexpr, dtype: tl.constexpr):
        value = value.to(tl.float32) / scale
        return tl.clamp(value, -LARGEST, LARGEST, tl.PropagateNan.ALL).to(dtype)

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
