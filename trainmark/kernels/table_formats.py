"""How embedding rows are stored: fp32, bf16, fp16, or 8 bits with one fp32 scale per row.

The scale of an 8-bit row makes its largest weight the largest code, and is computed anew whenever
the row is written. Codes are rounded stochastically, given that scale, so a row's expectation is
what was written. Nor does the moving grid add much noise: between two writes it moves by no more
than the largest weight did, so weights that lay on it still lie next to it.

Row numbers are taken times the width in 64 bits: large models have more than 2^31 weights.

Shapes: R rows of a store, N rows read or written, B samples, F features, D width of a row.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainmark.kernels import rounding
from trainmark.kernels.triton_here import tl, triton

FORMATS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Of the types that need a scale. int8's -128 is not used: the range is symmetric."""
SMALLEST_ROW = 1e-30
"""A row without a larger weight is stored as zeros: its inverse scale might be infinite."""


@dataclass(frozen=True)
class Rows:
    """The rows of one or more tables in one format, one after another."""

    codes: Tensor
    """[R, D], contiguous, of a type in FORMATS."""
    scales: Tensor | None = None
    """[R] fp32 for 8-bit codes: weight = code x scale."""


@dataclass(frozen=True)
class Tables:
    """What the features of a model look up: one store, or two of different formats.

    An id is a row of the store that its feature is in.
    """

    first: Rows
    second: Rows | None = None
    in_second_F: Tensor | None = None
    """[F] bool: which features look up the second store."""


# --- plain torch


def new_rows(num_rows: int, dim: int, dtype: torch.dtype, device: torch.device | str) -> Rows:
    """Uninitialised rows, with scales if the type needs them."""
    codes = torch.empty(num_rows, dim, dtype=dtype, device=device)
    return Rows(codes, torch.empty(num_rows, device=device) if dtype in LARGEST_CODE else None)


def encode(values_ND: Tensor, dtype: torch.dtype, bits_ND: Tensor | None = None) -> Rows:
    """fp32 rows in another format, rounded stochastically with `bits_ND`, else to nearest."""
    scales_N = None
    if dtype in LARGEST_CODE:
        values_ND, scales_N = _scaled(values_ND, LARGEST_CODE[dtype])
    if bits_ND is not None:
        return Rows(rounding.round_stochastically(values_ND, bits_ND, dtype), scales_N)
    return Rows((values_ND.round() if dtype == torch.int8 else values_ND).to(dtype), scales_N)


def _scaled(values_ND: Tensor, largest_code: float) -> tuple[Tensor, Tensor]:
    """Values within +-largest_code, and the scales that turn them back."""
    largest_N = values_ND.abs().amax(1)
    usable_N = largest_N > SMALLEST_ROW
    scales_N = torch.where(usable_N, largest_N / largest_code, 0.0)
    inverse_N = torch.where(usable_N, largest_code / largest_N, 0.0)
    # Rounding may lift the largest a little above the largest code.
    scaled_ND = (values_ND * inverse_N[:, None]).clamp(-largest_code, largest_code)
    return scaled_ND, scales_N


def decode(rows: Rows) -> Tensor:
    """The weights, in fp32."""
    values = rows.codes.float()
    return values if rows.scales is None else values * rows.scales[:, None]


def read_rows(rows: Rows, ids_N: Tensor) -> Tensor:
    """[N, D] weights, in fp32."""
    scales = None if rows.scales is None else rows.scales[ids_N]
    return decode(Rows(_plain(rows.codes)[ids_N].view(rows.codes.dtype), scales))


def write_rows(rows: Rows, ids_N: Tensor, values_ND: Tensor, bits_ND: Tensor | None = None) -> None:
    """Store fp32 values in distinct rows: rounded stochastically with bits, else to nearest."""
    new = encode(values_ND, rows.codes.dtype, bits_ND)
    _plain(rows.codes)[ids_N] = _plain(new.codes)
    if rows.scales is not None and new.scales is not None:
        rows.scales[ids_N] = new.scales


def _plain(codes: Tensor) -> Tensor:
    """fp8 numbers as bytes, which torch can index on every device."""
    return codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes


# --- Triton


def next_power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def kernel_arguments(tables: Tables) -> dict[str, Any]:
    """What `load_table_rows` needs. A pointer that is not read points anywhere."""
    first, second = tables.first, tables.second or tables.first
    in_second = first.codes if tables.in_second_F is None else tables.in_second_F.view(torch.uint8)
    return {
        "first_codes": first.codes,
        "first_scales": first.codes if first.scales is None else first.scales,
        "second_codes": second.codes,
        "second_scales": second.codes if second.scales is None else second.scales,
        "in_second": in_second,
        "FIRST_SCALED": first.scales is not None,
        "TWO": tables.second is not None,
        "SECOND_SCALED": second.scales is not None,
    }


if triton is not None:
    from trainmark.kernels.rounding import rounded_stochastically

    @triton.jit
    def load_rows(codes, scales, row, wanted, column, D: tl.constexpr, SCALED: tl.constexpr):
        """[rows, columns] fp32 from int64 row numbers; zeros where a row is not wanted."""
        inside = wanted[:, None] & (column < D)[None, :]
        values = tl.load(codes + row[:, None] * D + column[None, :], inside, 0.0).to(tl.float32)
        if SCALED:
            values = values * tl.load(scales + row, wanted, 0.0)[:, None]
        return values

    @triton.jit
    def load_table_rows(
        first_codes, first_scales, second_codes, second_scales, row, wanted, is_second, column,
        dtype: tl.constexpr, D: tl.constexpr,
        FIRST_SCALED: tl.constexpr, TWO: tl.constexpr, SECOND_SCALED: tl.constexpr,
    ):  # fmt: skip
        """The same in `dtype`, from one store or two. A load that is masked out moves no bytes."""
        if TWO:
            in_first = load_rows(
                first_codes, first_scales, row, wanted & (is_second == 0), column, D, FIRST_SCALED
            )
            in_second = load_rows(
                second_codes, second_scales, row, wanted & (is_second != 0), column, D,
                SECOND_SCALED,
            )  # fmt: skip
            # Rounded first: the two are laid out differently, and bringing them together costs.
            return in_first.to(dtype) + in_second.to(dtype)
        else:
            rows = load_rows(first_codes, first_scales, row, wanted, column, D, FIRST_SCALED)
            return rows.to(dtype)

    @triton.jit
    def store_rows(
        codes, scales, row, wanted, column, values, bits,
        D: tl.constexpr, LARGEST_CODE: tl.constexpr, SMALLEST_ROW: tl.constexpr,
        BY_CHANCE: tl.constexpr, POLICY: tl.constexpr = "",
    ):  # fmt: skip
        """Store whole fp32 rows, rounded. `LARGEST_CODE` 0: a type without scales. `POLICY`: what
        the cache shall evict, as `tl.store` has it."""
        dtype: tl.constexpr = codes.dtype.element_ty
        inside = wanted[:, None] & (column < D)[None, :]
        if LARGEST_CODE > 0:
            largest = tl.max(tl.abs(values), 1)  # columns beyond D hold zeros
            usable = largest > SMALLEST_ROW
            code = tl.full(largest.shape, LARGEST_CODE, tl.float32)
            # Triton's `/` is not IEEE's, torch's is.
            scale = tl.where(usable, tl.div_rn(largest, code), 0.0)
            inverse = tl.where(usable, tl.div_rn(code, tl.where(usable, largest, 1.0)), 0.0)
            tl.store(scales + row, scale, wanted)
            values = tl.clamp(values * inverse[:, None], -LARGEST_CODE, LARGEST_CODE)
        if dtype != tl.float32 and BY_CHANCE:
            values = rounded_stochastically(values, bits, dtype)
        elif dtype == tl.int8:
            values = tl.floor(values + 0.5)  # a half goes up; in torch, to the even number
        place = codes + row[:, None] * D + column[None, :]
        tl.store(place, values.to(dtype), inside, eviction_policy=POLICY)
