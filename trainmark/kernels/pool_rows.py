"""Reading the embedding rows of several ids per feature, and adding up those of each bag.

A bag is what a sample has of a feature: as many ids as the feature's hotness. An id of -1 stands
for none, so that a bag may have fewer, and an empty one is zeros. Sums are in fp32, in the order of
the ids; only the sum is written.

Shapes: N ids of all bags, F features, B samples, D width of a row, R rows of what is written.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import no_type_check

import torch
from torch import Tensor

from trainmark.kernels.compiled import has_compiled
from trainmark.kernels.table_formats import Tables, kernel_arguments, next_power_of_2, read_rows
from trainmark.kernels.triton_here import tl, triton


@dataclass(frozen=True)
class BagBlock:
    """Bags of one feature, those of one sample after those of another."""

    first_id: int
    """Where the first id of the first bag lies;"""
    id_step: int
    """how far behind it that bag's next one,"""
    bag_step: int
    """and the first id of the next bag."""
    hotness: int
    bags: int
    first_row: int
    """Where the sum of the first bag goes;"""
    row_step: int
    """and how far behind it that of the next."""
    offset: int = 0
    """To be taken off the ids, also off -1. A feature has one if it looks up the second store."""


class Bags:
    """Where the ids of all bags lie, and where the sums go: the same for every batch of a size."""

    def __init__(self, blocks: Sequence[BagBlock], device: torch.device) -> None:
        self.blocks = list(blocks)
        fields = [astuple(block) for block in self.blocks]
        self.table = torch.tensor(fields, dtype=torch.int64, device=device).view(-1, 8)
        """[blocks, fields of a block]"""
        self.num_rows = sum(block.bags for block in self.blocks)
        self.most_bags = max((block.bags for block in self.blocks), default=0)

    @cached_property
    def row_of_id(self) -> Tensor:
        """Of each id, the row that its bag's sum goes to; on a GPU in 32 bits, if they will do."""
        device = self.table.device
        rows = torch.empty(self._num_ids, dtype=torch.int64, device=device)
        for block in self.blocks:
            of_bags = torch.arange(block.bags, device=device) * block.row_step + block.first_row
            ids_of(block, rows)[:] = of_bags[:, None]
        return rows.int() if device.type == "cuda" and self._fit_int32 else rows

    def rows_of(self, places_N: Tensor) -> Tensor:
        """`row_of_id` of the ids at these places of the list, where blocks lie one after another.

        On a GPU they are computed: those of sorted ids lie all over a list that no cache holds.
        """
        if places_N.is_cuda and triton is not None and self._fit_int32:
            return rows_of_triton(places_N, self)
        return self.row_of_id[places_N]

    @property
    def _num_ids(self) -> int:
        return sum(block.bags * block.hotness for block in self.blocks)

    @property
    def _fit_int32(self) -> bool:
        last = max((b.first_row + b.bags * b.row_step for b in self.blocks), default=0)
        return max(last, self._num_ids) < 2**31


def ids_of(block: BagBlock, listed: Tensor) -> Tensor:
    """[bags, hotness] what a list has for the ids of a block."""
    steps = (block.bag_step, block.id_step)
    first = listed.storage_offset() + block.first_id  # the list may be part of a longer one
    return listed.as_strided((block.bags, block.hotness), steps, first)


# --- plain torch


def pool_rows_reference(ids_N: Tensor, bags: Bags, tables: Tables, out_RD: Tensor) -> None:
    """See `pool_rows`."""
    for block in bags.blocks:
        if not block.bags:
            continue
        store = tables.second if block.offset and tables.second else tables.first
        ids_BH = ids_of(block, ids_N) - block.offset
        sums = torch.zeros(block.bags, out_RD.shape[1], device=ids_N.device)
        for ids_B in ids_BH.unbind(1):
            sums += read_rows(store, ids_B.clamp(min=0)) * (ids_B >= 0)[:, None]
        last = block.first_row + (block.bags - 1) * block.row_step
        out_RD[block.first_row : last + 1 : block.row_step] = sums.to(out_RD.dtype)


# --- Triton

TILE = 1024  # numbers of a program that are added up: 8 registers of each thread
AT_A_TIME = 4  # rows of a bag that are on their way together
WARPS = 4


def pool_rows_triton(ids_N: Tensor, bags: Bags, tables: Tables, out_RD: Tensor) -> None:
    D = out_RD.shape[1]
    columns = next_power_of_2(D)
    per_program = max(1, TILE // columns)
    if not bags.most_bags:
        return
    arguments = kernel_arguments(tables)
    del arguments["in_second"]
    grid = (-(-bags.most_bags // per_program), len(bags.blocks))
    _pool_kernel[grid](
        ids_N,
        bags.table,
        **arguments,
        out=out_RD,
        D=D,
        BAGS=per_program,
        COLUMNS=columns,
        AT_A_TIME=AT_A_TIME,
        num_warps=WARPS,
    )


def rows_of_triton(places_N: Tensor, bags: Bags) -> Tensor:
    """See `Bags.rows_of`."""
    rows_N = torch.empty_like(places_N, dtype=torch.int32)
    count, blocks = rows_N.numel(), len(bags.blocks)
    if count:
        _rows_of_kernel[(-(-count // TILE),)](
            places_N, bags.table, rows_N, count, BLOCKS=blocks, TILE=TILE, num_warps=WARPS
        )
    return rows_N


if triton is not None:
    from trainmark.kernels.table_formats import load_rows

    @triton.jit
    def _rows_of_kernel(places, blocks, rows, count, BLOCKS: tl.constexpr, TILE: tl.constexpr):
        at = tl.program_id(0) * TILE + tl.arange(0, TILE)
        place = tl.load(places + at, at < count, 0).to(tl.int32)
        block = tl.zeros([TILE], tl.int32)
        for i in tl.static_range(1, BLOCKS):
            block += (place >= tl.load(blocks + i * 8)).to(tl.int32)
        field = blocks + block * 8
        place -= tl.load(field).to(tl.int32)
        bag_step, bags = tl.load(field + 2).to(tl.int32), tl.load(field + 4).to(tl.int32)
        bag = place // bag_step % bags
        row = tl.load(field + 5).to(tl.int32) + bag * tl.load(field + 6).to(tl.int32)
        tl.store(rows + at, row, at < count)

    @triton.jit
    @no_type_check  # tuples grow
    def _pooled(
        codes, scales, ids, id_step, offset, hotness, wanted, column,
        SCALED: tl.constexpr, D: tl.constexpr, BAGS: tl.constexpr, COLUMNS: tl.constexpr,
        AT_A_TIME: tl.constexpr,
    ):  # fmt: skip
        """[BAGS, COLUMNS] in fp32. `ids` are pointers to the first id of each bag."""
        total = tl.zeros([BAGS, COLUMNS], tl.float32)
        for first in range(0, hotness, AT_A_TIME):
            row, values = (), ()
            for i in tl.static_range(AT_A_TIME):
                inside = wanted & (first + i < hotness)
                place = ids + (first + i) * id_step
                row += (tl.load(place, inside, -1).to(tl.int64) - offset,)
            for i in tl.static_range(AT_A_TIME):
                values += (load_rows(codes, scales, row[i], row[i] >= 0, column, D, SCALED),)
            for i in tl.static_range(AT_A_TIME):
                total += values[i]
        return total

    @triton.jit
    def _pool_kernel(
        ids, blocks, first_codes, first_scales, second_codes, second_scales, out,
        FIRST_SCALED: tl.constexpr, TWO: tl.constexpr, SECOND_SCALED: tl.constexpr,
        D: tl.constexpr, BAGS: tl.constexpr, COLUMNS: tl.constexpr, AT_A_TIME: tl.constexpr,
    ):  # fmt: skip
        block = blocks + tl.program_id(1) * 8
        id_step = tl.load(block + 1)
        hotness = tl.load(block + 3).to(tl.int32)
        bag = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
        wanted = bag < tl.load(block + 4)
        begin = ids + tl.load(block) + bag * tl.load(block + 2)
        column = tl.arange(0, COLUMNS)
        offset = tl.load(block + 7)
        in_first = hotness
        total = tl.zeros([BAGS, COLUMNS], tl.float32)
        if TWO:  # all bags of a block are of one store: for the other, the loop has no turns
            in_first = tl.where(offset > 0, 0, hotness)
            total = _pooled(
                second_codes, second_scales, begin, id_step, offset, hotness - in_first, wanted,
                column,
                SECOND_SCALED, D, BAGS, COLUMNS, AT_A_TIME,
            )  # fmt: skip
        total += _pooled(
            first_codes, first_scales, begin, id_step, offset, in_first, wanted, column,
            FIRST_SCALED, D, BAGS, COLUMNS, AT_A_TIME,
        )  # fmt: skip
        row = tl.load(block + 5) + bag * tl.load(block + 6)
        inside = wanted[:, None] & (column < D)[None, :]
        place = out + row[:, None] * D + column[None, :]
        tl.store(place, total.to(out.dtype.element_ty), inside)


# --- dispatch


def pool_rows(ids_N: Tensor, bags: Bags, tables: Tables, out_RD: Tensor) -> None:
    """Write the sum of each bag's rows to its place in `out_RD`, in its type.

    Args:
        ids_N: contiguous, of 32 or 64 bits; rows of the store that the feature is in, or -1.
        bags: how they make up bags.
        tables: what they are rows of.
        out_RD: contiguous.
    """
    if ids_N.is_cuda and triton is not None:
        pool_rows_triton(ids_N, bags, tables, out_RD)
    elif tables.second is None and has_compiled(tables.first.codes, out_RD):
        from trainmark.kernels import cpu_rows

        cpu_rows.pool_rows(tables.first.codes, ids_N, bags.table, out_RD)
    else:
        pool_rows_reference(ids_N, bags, tables, out_RD)
