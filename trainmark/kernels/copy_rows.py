"""Copying rows between a table in host memory, which the GPU has mapped, and a list on the device.

The GPU itself reads and writes the host's memory, row by row: no list on the host, no buffer in
between, and no host that waits. A few programs keep the link busy, and leave the rest of the GPU to
the step that goes on meanwhile. A table may as well be the device's.

A row number that the table does not have is left out: lists of unknown length are filled up so.

Shapes: R rows of a table, N rows of a list, D their width.
"""

from typing import Any

from torch import Tensor

from trainmark.kernels.table_formats import next_power_of_2
from trainmark.kernels.triton_here import tl, triton

PROGRAMS = 32  # each with a tile of TILE bytes under way: more than the link's latency takes
TILE = 16384


def read_rows_into(list_ND: Tensor, table_RD: Tensor, rows_N: Tensor) -> None:
    """list[i] = table[rows[i]], where the table has that row. All contiguous, of one type.

    One-dimensional tensors have rows of one number.
    """
    if _has_kernel(rows_N):
        return copy_rows_triton(table_RD, rows_N, list_ND, to_table=False)
    there = rows_N < len(table_RD)
    list_ND[there] = table_RD[rows_N[there]]


def write_rows_from(list_ND: Tensor, table_RD: Tensor, rows_N: Tensor) -> None:
    """table[rows[i]] = list[i], where the table has that row; which no other i may name."""
    if _has_kernel(rows_N):
        return copy_rows_triton(table_RD, rows_N, list_ND, to_table=True)
    there = rows_N < len(table_RD)
    table_RD[rows_N[there]] = list_ND[there]


def _has_kernel(rows_N: Tensor) -> bool:
    return rows_N.is_cuda and triton is not None


def copy_rows_triton(
    table_RD: Tensor,
    rows_N: Tensor,
    list_ND: Tensor,
    *,
    to_table: bool,
    programs: int | None = None,
) -> None:
    if rows_N.numel() == 0:
        return
    D = list_ND.numel() // len(list_ND)
    columns = next_power_of_2(D)
    per_turn = max(1, TILE // (columns * list_ND.element_size()))
    constants: dict[str, Any] = {"D": D, "ROWS": per_turn, "COLUMNS": columns}
    turns = -(-rows_N.numel() // per_turn)
    programs = programs or (turns if table_RD.is_cuda else PROGRAMS)
    _copy_kernel[(min(turns, programs),)](
        table_RD, rows_N, list_ND, len(table_RD), rows_N.numel(), TO_TABLE=to_table, **constants
    )


if triton is not None:

    @triton.jit
    def _copy_kernel(
        table, rows, listed, table_rows, count,
        TO_TABLE: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        column = tl.arange(0, COLUMNS)
        step = tl.num_programs(0) * ROWS
        for start in range(tl.program_id(0) * ROWS, count, step):
            place = start + tl.arange(0, ROWS).to(tl.int64)
            row = tl.load(rows + place, place < count, table_rows).to(tl.int64)
            wanted = (row < table_rows)[:, None] & (column < D)[None, :]
            in_table = table + row[:, None] * D + column[None, :]
            in_list = listed + place[:, None] * D + column[None, :]
            if TO_TABLE:
                tl.store(in_table, tl.load(in_list, wanted), wanted)
            else:
                tl.store(in_list, tl.load(in_table, wanted), wanted)
