"""Reading embedding rows, of any stored format, into one tensor of the computing type.

Shapes: B samples, F features, D width of a row, N = B F rows.
"""

import torch
from torch import Tensor

from trainmark.kernels.compiled import has_compiled
from trainmark.kernels.table_formats import Tables, kernel_arguments, next_power_of_2, read_rows
from trainmark.kernels.triton_here import tl, triton

# --- plain torch


def gather_rows_reference(ids_BF: Tensor, tables: Tables, dtype: torch.dtype) -> Tensor:
    """[B, F, D]."""
    shape = (*ids_BF.shape, tables.first.codes.shape[1])
    if tables.second is None or tables.in_second_F is None:
        return read_rows(tables.first, ids_BF.reshape(-1)).view(shape).to(dtype)
    rows_BFD = torch.empty(shape, dtype=dtype, device=ids_BF.device)
    in_second_BF = tables.in_second_F.expand_as(ids_BF)
    for store, chosen_BF in ((tables.first, ~in_second_BF), (tables.second, in_second_BF)):
        rows_BFD[chosen_BF] = read_rows(store, ids_BF[chosen_BF]).to(dtype)
    return rows_BFD


# --- Triton

TILE = 4096  # numbers per program: 32 registers of each thread


def gather_rows_triton(
    ids_BF: Tensor,
    tables: Tables,
    dtype: torch.dtype,
    rows_at_a_time: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    B, F = ids_BF.shape
    D = tables.first.codes.shape[1]
    rows_BFD = torch.empty(B, F, D, dtype=dtype, device=ids_BF.device) if out is None else out
    columns = next_power_of_2(D)
    per_program = rows_at_a_time or max(1, TILE // columns)
    if B * F:
        _gather_kernel[(-(-B * F // per_program),)](
            ids_BF.contiguous(),
            **kernel_arguments(tables),
            out=rows_BFD,
            count=B * F,
            F=F,
            D=D,
            ROWS=per_program,
            COLUMNS=columns,
        )
    return rows_BFD


if triton is not None:
    from trainmark.kernels.table_formats import load_table_rows

    @triton.jit
    def _gather_kernel(
        ids, first_codes, first_scales, second_codes, second_scales, in_second, out, count,
        FIRST_SCALED: tl.constexpr, TWO: tl.constexpr, SECOND_SCALED: tl.constexpr,
        F: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        wanted = place < count
        row = tl.load(ids + place, wanted, 0).to(tl.int64)
        is_second = tl.zeros([ROWS], tl.int32)
        if TWO:
            is_second = tl.load(in_second + place % F, wanted, 0).to(tl.int32)
        column = tl.arange(0, COLUMNS)
        rows = load_table_rows(
            first_codes, first_scales, second_codes, second_scales, row, wanted, is_second, column,
            out.dtype.element_ty, D, FIRST_SCALED, TWO, SECOND_SCALED,
        )  # fmt: skip
        inside = wanted[:, None] & (column < D)[None, :]
        tl.store(out + place[:, None] * D + column[None, :], rows, inside)


# --- dispatch


def gather_rows(ids_BF: Tensor, tables: Tables, dtype: torch.dtype) -> Tensor:
    """[B, F] ids, of 32 or 64 bits -> [B, F, D] rows."""
    gather = gather_rows_triton if _has_kernel(ids_BF) else gather_rows_reference
    return gather(ids_BF, tables, dtype)


def gather_rows_into(out_ND: Tensor, ids_N: Tensor, tables: Tables) -> None:
    """The same for a list of ids, into a contiguous tensor, in its type."""
    if _has_kernel(ids_N):
        gather_rows_triton(ids_N[:, None], tables, out_ND.dtype, out=out_ND)
    elif tables.second is None and has_compiled(tables.first.codes, out_ND):
        from trainmark.kernels import cpu_rows

        cpu_rows.gather_rows(tables.first.codes, ids_N[:, None], out_ND[:, None])
    else:
        out_ND.copy_(gather_rows_reference(ids_N[:, None], tables, out_ND.dtype)[:, 0])


def _has_kernel(ids: Tensor) -> bool:
    return ids.is_cuda and triton is not None
