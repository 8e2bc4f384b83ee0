"""Updating the embedding rows that a batch looked up: one read and one write per distinct row.

`sort_rows` sorts the looked-up rows ahead of the step. Then the sorted list is cut into chunks of
equal length, whatever rows they hold, so that a row that every sample looks up is no harder than
any other:

1. A program adds up the gradients in its chunk, equal rows together, and updates the rows that
   lie wholly within it. What belongs to a row that goes on in another chunk is set aside: one sum
   at most for the row that comes from the left, and one for the row that goes on to the right.
2. Where a whole group of chunks holds one row, its sums are added up.
3. The chunk in which such a row begins collects the row's sums, by groups where it can, and
   updates it.

Every sum has a fixed order: the result is the same, bit for bit, in every run on the same device.
Bytes: each gradient row is read once, with 12 bytes of plan; each distinct row, its scale and its
state are read and written once; the sums are 2 fp32 rows per chunk at most.

Shapes: N looked-up rows, duplicates included, D width of a row.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from trainmark.kernels.table_formats import (
    LARGEST_CODE,
    SMALLEST_ROW,
    Rows,
    next_power_of_2,
    read_rows,
    write_rows,
)

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without a GPU
    triton = None

RuleName = Literal["sgd", "rowwise_adagrad", "adagrad"]


@dataclass(frozen=True)
class Rule:
    """How a row w changes by its summed gradient g; s is its state.

    sgd: w -= lr g. rowwise_adagrad: s += mean(g^2), w -= lr g / (sqrt(s) + eps), one s per row.
    adagrad: the same with a sum of squares for every weight.
    """

    name: RuleName
    eps: float = 1e-8


@dataclass(frozen=True)
class SortedRows:
    """Looked-up rows in order, and where each one's gradient is."""

    rows_N: Tensor
    """Ascending, with duplicates."""
    places_N: Tensor
    """int64: the row of the gradients, ascending among equal rows."""


def sort_rows(ids_BF: Tensor, features: Tensor | None = None) -> SortedRows:
    """What an update needs to know about a batch. Shapes are static and the host never waits.

    Args:
        ids_BF: int32 where the rows permit it: a sort of int64 takes twice as long.
        features: [K] int64, the columns to update, if not all. The gradients have all F still.
    """
    F = ids_BF.shape[1]
    chosen_BK = ids_BF if features is None else ids_BF.index_select(1, features)
    rows_N, places_N = chosen_BK.reshape(-1).sort(stable=True)
    if features is not None:
        K = features.numel()
        places_N = places_N // K * F + features[places_N % K]
    return SortedRows(rows_N, places_N)


# --- plain torch


def update_rows_reference(
    rows: Rows,
    state: Tensor | None,
    batch: SortedRows,
    grads_ND: Tensor,
    rule: Rule,
    scalars: Tensor,
    key: Tensor | None,
) -> None:
    """See `update_rows`."""
    lr, factor, gate = scalars.unbind()
    if gate == 0:
        return
    distinct, group_N = batch.rows_N.unique_consecutive(return_inverse=True)
    sums = grads_ND.new_zeros(distinct.numel(), grads_ND.shape[1], dtype=torch.float32)
    sums.index_add_(0, group_N, grads_ND[batch.places_N].float())
    sums *= factor
    step = sums * lr
    if state is not None:
        squares = sums.square()
        state[distinct] += squares if rule.name == "adagrad" else squares.mean(1)
        divisor = state[distinct].sqrt() + rule.eps
        step /= divisor if rule.name == "adagrad" else divisor[:, None]
    write_rows(rows, distinct, read_rows(rows, distinct) - step, key)


# --- Triton


@dataclass(frozen=True)
class Launch:
    """How the work is cut. Sums are grouped by it: another one changes the last bits."""

    chunk: int
    """Sorted rows per program; a power of 2, at least 16 for the matrix units."""
    warps: int
    group: int = 32
    """Chunks whose sums are added up at a time where they hold one row; a power of 2."""


def default_launch(dim: int) -> Launch:
    """A tile of at most 4096 numbers for each four warps."""
    columns = next_power_of_2(dim)
    return Launch(chunk=32, warps=4) if columns <= 128 else Launch(chunk=16, warps=columns // 64)


def update_rows_triton(
    rows: Rows,
    state: Tensor | None,
    batch: SortedRows,
    grads_ND: Tensor,
    rule: Rule,
    scalars: Tensor,
    key: Tensor | None,
    launch: Launch | None = None,
) -> None:
    """See `update_rows`."""
    count, D = batch.rows_N.numel(), grads_ND.shape[1]
    if count == 0:
        return
    launch = launch or default_launch(D)
    chunks = -(-count // launch.chunk)
    whole_groups = chunks // launch.group
    sums = torch.empty(chunks, 2, D, device=grads_ND.device)
    group_sums = torch.empty(whole_groups, D, device=grads_ND.device)
    shared: dict[str, Any] = {
        "D": D,
        "CHUNK": launch.chunk,
        "COLUMNS": next_power_of_2(D),
        "num_warps": launch.warps,
    }
    update: dict[str, Any] = {
        "codes": rows.codes,
        "scales": rows.codes if rows.scales is None else rows.scales,
        "state": rows.codes if state is None else state,
        "key": rows.codes if key is None else key,
        "BY_CHANCE": key is not None,
        "eps": rule.eps,
        "RULE": rule.name,
        "LARGEST_CODE": LARGEST_CODE.get(rows.codes.dtype, 0.0),
        "SMALLEST_ROW": SMALLEST_ROW,
    }
    sorted_rows, places = batch.rows_N, batch.places_N
    _chunk_kernel[(chunks,)](
        sorted_rows, places, grads_ND, sums, scalars, count, **update, **shared
    )
    if whole_groups:
        _group_kernel[(whole_groups,)](
            sorted_rows, sums, group_sums, scalars, GROUP=launch.group, **shared
        )
    _finish_kernel[(chunks,)](
        sorted_rows, sums, group_sums, scalars, count, **update, GROUP=launch.group, **shared
    )


if triton is not None:
    from trainmark.kernels.table_formats import load_rows, store_rows

    @triton.jit
    def _update_tile(
        codes, scales, state, key, row, wanted, column, old, sums, lr, eps,
        RULE: tl.constexpr, D: tl.constexpr,
        LARGEST_CODE: tl.constexpr, SMALLEST_ROW: tl.constexpr, BY_CHANCE: tl.constexpr,
    ):  # fmt: skip
        """Apply the rule to the rows that are wanted; `old` are their weights."""
        if RULE == "sgd":
            step = sums * lr
        elif RULE == "rowwise_adagrad":
            total = tl.load(state + row, wanted, 0.0) + tl.sum(sums * sums, 1) / D
            tl.store(state + row, total, wanted)
            step = sums * tl.div_rn(lr + tl.zeros_like(total), tl.sqrt_rn(total) + eps)[:, None]
        else:
            place = row[:, None] * D + column[None, :]
            inside = wanted[:, None] & (column < D)[None, :]
            total = tl.load(state + place, inside, 0.0) + sums * sums
            tl.store(state + place, total, inside)
            step = tl.div_rn(sums * lr, tl.sqrt_rn(total) + eps)
        store_rows(
            codes, scales, row, wanted, column, old - step, key,
            D, LARGEST_CODE, SMALLEST_ROW, BY_CHANCE,
        )  # fmt: skip

    @triton.jit
    def _chunk_kernel(
        rows, places, grads, sums, scalars, count, codes, scales, state, key, eps,
        RULE: tl.constexpr, LARGEST_CODE: tl.constexpr, SMALLEST_ROW: tl.constexpr,
        BY_CHANCE: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        lr, factor, gate = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2)
        chunk = tl.program_id(0).to(tl.int64)
        first = chunk * CHUNK
        if gate != 0:
            place = first + tl.arange(0, CHUNK)
            inside = place < count
            row = tl.load(rows + place, inside, -1).to(tl.int64)
            before = tl.load(rows + place - 1, inside & (place > 0), -1)
            on_the_left = tl.load(rows + first - 1, first > 0, -1)
            on_the_right = tl.load(rows + first + CHUNK, first + CHUNK < count, -1)
            # A row's sum takes the place of its first entry in the chunk.
            is_first = inside & ((row != before) | (place == first))
            goes_on = is_first & ((row == on_the_left) | (row == on_the_right))
            ends_here = is_first & ((row != on_the_left) & (row != on_the_right))

            column = tl.arange(0, COLUMNS)
            in_row = column < D
            source = tl.load(places + place, inside, 0).to(tl.int64)
            grad = tl.load(
                grads + source[:, None] * D + column[None, :],
                inside[:, None] & in_row[None, :],
                0.0,
            )
            old = load_rows(codes, scales, row, ends_here, column, D, LARGEST_CODE > 0)
            # Sums of equal rows as a product with ones and zeros: exact in the matrix units.
            equal = (row[:, None] == row[None, :]) & is_first[:, None]
            total = tl.dot(equal.to(grad.dtype), grad, input_precision="ieee") * factor

            slot = chunk * 2 + tl.where(row == on_the_left, 0, 1)
            tl.store(
                sums + slot[:, None] * D + column[None, :],
                total,
                goes_on[:, None] & in_row[None, :],
            )
            _update_tile(
                codes, scales, state, key, row, ends_here, column, old, total, lr, eps,
                RULE, D, LARGEST_CODE, SMALLEST_ROW, BY_CHANCE,
            )  # fmt: skip

    @triton.jit
    def _group_kernel(
        rows, sums, group_sums, scalars,
        D: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    ):  # fmt: skip
        group = tl.program_id(0).to(tl.int64)
        first, last = group * GROUP, group * GROUP + GROUP - 1
        on_the_left = tl.load(rows + first * CHUNK - 1, group > 0, -1)
        if (tl.load(scalars + 2) != 0) & (on_the_left == tl.load(rows + last * CHUNK)):
            column = tl.arange(0, COLUMNS)
            chunk = first + tl.arange(0, GROUP)
            tile = tl.load(
                sums + chunk[:, None] * 2 * D + column[None, :], (column < D)[None, :], 0.0
            )
            tl.store(group_sums + group * D + column, tl.sum(tile, 0), column < D)

    @triton.jit
    def _finish_kernel(
        rows, sums, group_sums, scalars, count, codes, scales, state, key, eps,
        RULE: tl.constexpr, LARGEST_CODE: tl.constexpr, SMALLEST_ROW: tl.constexpr,
        BY_CHANCE: tl.constexpr,
        D: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    ):  # fmt: skip
        chunk = tl.program_id(0).to(tl.int64)
        chunks = tl.num_programs(0)
        after = (chunk + 1) * CHUNK
        has_next = after < count
        row = tl.load(rows + after - 1, has_next, -1)
        on_the_left = tl.load(rows + chunk * CHUNK - 1, chunk > 0, -1)
        on_the_right = tl.load(rows + after, has_next, -1)
        begins_here = has_next & (row != on_the_left) & (row == on_the_right)
        if (tl.load(scalars + 2) != 0) & begins_here:
            column = tl.arange(0, COLUMNS)
            in_row = (column < D)[None, :]
            one = tl.zeros([1], tl.int64)
            old = load_rows(codes, scales, row + one, one == 0, column, D, LARGEST_CODE > 0)
            own = tl.load(sums + (chunk * 2 + 1) * D + column[None, :], in_row, 0.0)

            # The rest of the own group of chunks; then groups that hold nothing else; then the
            # group in which the row ends.
            step = tl.arange(0, GROUP)
            other = chunk // GROUP * GROUP + step
            holds = (other > chunk) & (other < chunks)
            holds = holds & (tl.load(rows + other * CHUNK, holds, -1) == row)
            tile = tl.load(
                sums + other[:, None] * 2 * D + column[None, :], holds[:, None] & in_row, 0.0
            )
            group = chunk // GROUP + 1
            found = GROUP
            while found == GROUP:
                last = (group + step) * GROUP + GROUP - 1
                holds = last < chunks
                holds = holds & (tl.load(rows + last * CHUNK, holds, -1) == row)
                tile += tl.load(
                    group_sums + (group + step)[:, None] * D + column[None, :],
                    holds[:, None] & in_row,
                    0.0,
                )
                found = tl.sum(holds.to(tl.int32), 0)
                group += found
            other = group * GROUP + step
            holds = other < chunks
            holds = holds & (tl.load(rows + other * CHUNK, holds, -1) == row)
            tile += tl.load(
                sums + other[:, None] * 2 * D + column[None, :], holds[:, None] & in_row, 0.0
            )

            total = own + tl.sum(tile, 0)[None, :]
            _update_tile(
                codes, scales, state, key, row + one, one == 0, column, old, total,
                tl.load(scalars), eps, RULE, D, LARGEST_CODE, SMALLEST_ROW, BY_CHANCE,
            )  # fmt: skip


# --- dispatch


def update_rows(
    rows: Rows,
    state: Tensor | None,
    batch: SortedRows,
    grads_ND: Tensor,
    rule: Rule,
    scalars: Tensor,
    key: Tensor | None,
) -> None:
    """Change the rows of a batch, and their state, in place.

    Args:
        rows: the store; what is not fp32 is rounded by chance.
        state: fp32, [R] for row-wise Adagrad, [R, D] for Adagrad, None for SGD.
        grads_ND: gradients of all looked-up rows, in any float type; duplicates are added up in
            fp32. Contiguous.
        scalars: [3] fp32 on the device: learning rate, factor of the gradients (1 / loss scale),
            and gate: 0 changes nothing, whatever the gradients are. A value that is not finite
            spoils its neighbours in the sorted list, too: close the gate for it.
        key: int32 scalar on the device, different for every step and store (see `rounding`); None
            rounds to nearest, which loses small updates.
    """
    has_kernel = grads_ND.is_cuda and triton is not None
    update = update_rows_triton if has_kernel else update_rows_reference
    update(rows, state, batch, grads_ND, rule, scalars, key)
