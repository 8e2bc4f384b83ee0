"""Updating the embedding rows that a batch looked up: one read and one write per distinct row.

`sort_rows` sorts the looked-up rows ahead of the step. Then the sorted list is cut into pieces of
equal length, whatever rows they hold, so that a row that every sample looks up is no harder than
any other. A program adds up the gradients in its piece, equal rows together, and updates the rows
that lie wholly within it. What belongs to a row that goes on in another piece is set aside: one
sum at most for the row that comes from the left, and one for the row that goes on to the right.
These sums are again a sorted list of rows, a fraction as long: the same kernel takes it, and so on
until a single program sees all that is left.

A thread has the same columns of every row, so that nothing passes between threads, and a program
loads all gradients and weights that it will need before it waits for the first.

Every sum has a fixed order: the result is the same, bit for bit, in every run on the same device.
Bytes: each gradient row is read once, with 12 bytes of plan; each distinct row, its scale and its
state are read and written once; the sums are 2 fp32 rows per program at most.

Shapes: N looked-up rows, duplicates included, D width of a row.
"""

from dataclasses import dataclass
from typing import Any, Literal, no_type_check

import torch
from torch import Tensor

from trainmark.kernels.rounding import other_bits, random_bits
from trainmark.kernels.table_formats import (
    LARGEST_CODE,
    SMALLEST_ROW,
    Rows,
    next_power_of_2,
    read_rows,
    write_rows,
)
from trainmark.kernels.triton_here import tl, triton

RuleName = Literal["sgd", "rowwise_adagrad", "adagrad"]


@dataclass(frozen=True)
class Rule:
    """How a row w changes by its summed gradient g; s is its state.

    sgd: w -= lr g. rowwise_adagrad: s += mean(g^2), w -= lr g / (sqrt(s) + eps), one s per row.
    adagrad: the same with a sum of squares for every weight. Before that, w *= 1 - lr weight_decay.
    """

    name: RuleName
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True)
class SortedRows:
    """Looked-up rows in order, and where each one's gradient is."""

    rows_N: Tensor
    """Ascending, with duplicates; first come those of ids that are none, which are -1."""
    places_N: Tensor
    """The row of the gradients, ascending among equal rows; of 64 bits, or of bags perhaps 32."""
    of_bags: bool = False
    """Whether several rows share a gradient, and some may be -1."""


def sort_rows(ids_BF: Tensor) -> SortedRows:
    """What an update needs to know about a batch. Shapes are static and the host never waits.

    Args:
        ids_BF: int32 where the rows permit it: a sort of int64 takes twice as long.
    """
    return SortedRows(*ids_BF.reshape(-1).sort(stable=True))


def sort_rows_of_two(
    ids_BF: Tensor, starts_F: Tensor, first_features: int, first_rows: int
) -> list[SortedRows]:
    """The same for two stores, in one sort: as many entries as one store would have.

    Args:
        starts_F: 0 for the features of the first store, `first_rows` for those of the second.
        first_features: how many features look up the first store.
        first_rows: rows of the first store; with the second's they must fit the type of the ids.
    """
    both = sort_rows(ids_BF + starts_F)
    border = ids_BF.shape[0] * first_features
    first = SortedRows(both.rows_N[:border], both.places_N[:border])
    return [first, SortedRows(both.rows_N[border:] - first_rows, both.places_N[border:])]


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
    there_N = batch.rows_N >= 0
    distinct, group_N = batch.rows_N[there_N].unique_consecutive(return_inverse=True)
    sums = grads_ND.new_zeros(distinct.numel(), grads_ND.shape[1], dtype=torch.float32)
    sums.index_add_(0, group_N, grads_ND[batch.places_N[there_N]].float())
    sums *= factor
    step = sums * lr
    bits = None if key is None else random_bits(key, distinct, sums.shape[1])
    if state is not None:
        squares = sums.square() if rule.name == "adagrad" else sums.square().mean(1, keepdim=True)
        of_rows = Rows(state.view(len(state), -1))
        total = read_rows(of_rows, distinct) + squares
        write_rows(of_rows, distinct, total, None if bits is None else other_bits(bits))
        step /= total.sqrt() + rule.eps
    kept = read_rows(rows, distinct) * (1 - lr * rule.weight_decay)
    write_rows(rows, distinct, kept - step, bits)


# --- Triton


@dataclass(frozen=True)
class Launch:
    """How the work is cut. Sums are grouped by it: another one changes the last bits."""

    block: int
    """Entries of the list whose loads are in flight at a time; a power of 2."""
    blocks: int = 1
    """That a program goes through, one after another, of the sorted list,"""
    blocks_of_sums: int = 4
    """and of the sums that were set aside."""
    warps: int = 1


def default_launch(dim: int, rule: RuleName, *, of_bags: bool = False) -> Launch:
    """Four numbers of a row for each thread: a block's gradients, weights and state, where every
    weight has one, fill its registers. Lists of bags are long enough for longer pieces."""
    block = 4 if rule == "adagrad" else 8
    entries = 64 if of_bags else 16
    return Launch(block=block, blocks=entries // block, warps=max(1, next_power_of_2(dim) // 128))


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
    launch = launch or default_launch(D, rule.name, of_bags=batch.of_bags)
    update: dict[str, Any] = {
        "scalars": scalars,
        "codes": rows.codes,
        "scales": rows.codes if rows.scales is None else rows.scales,
        "state": rows.codes if state is None else state,
        "key": rows.codes if key is None else key,
        "eps": rule.eps,
        "weight_decay": rule.weight_decay,
        "RULE": rule.name,
        "DECAYS": rule.weight_decay > 0,
        "LARGEST_CODE": LARGEST_CODE.get(rows.codes.dtype, 0.0),
        "SMALLEST_ROW": SMALLEST_ROW,
        "BY_CHANCE": key is not None,
        "QUICK": not triton.knobs.runtime.interpret,
        "STAYS": "evict_last" if batch.of_bags else "",
        "PASSES": "evict_first" if batch.of_bags else "",
        "D": D,
        "COLUMNS": next_power_of_2(D),
        "BLOCK": launch.block,
        "num_warps": launch.warps,
    }
    listed, values, blocks = batch.rows_N, grads_ND, launch.blocks
    while count:
        programs = -(-count // (launch.block * blocks))
        sums = torch.empty(programs, 2, D, device=grads_ND.device)
        rows_of_sums = torch.empty(programs, 2, dtype=listed.dtype, device=listed.device)
        _update_kernel[(programs,)](
            listed, batch.places_N, values, count, rows_of_sums, sums, **update,
            BLOCKS=blocks, SUMS=values is not grads_ND,
        )  # fmt: skip
        listed, values, blocks = rows_of_sums, sums, launch.blocks_of_sums
        count = 0 if programs == 1 else 2 * programs


if triton is not None:
    from triton.language.extra import libdevice

    from trainmark.kernels.rounding import (
        bits_of_rows,
        mixed,
        other_16_bits,
        rounded_stochastically,
    )
    from trainmark.kernels.table_formats import store_rows

    @triton.jit
    def _load_state(
        state, row, wanted, column, RULE: tl.constexpr, D: tl.constexpr, PASSES: tl.constexpr
    ):
        if RULE == "adagrad":
            place = state + row * D + column[None, :]
            inside = wanted & (column < D)[None, :]
            return tl.load(place, inside, 0.0, eviction_policy=PASSES).to(tl.float32)
        elif RULE == "rowwise_adagrad":
            return tl.load(state + row, wanted, 0.0)
        else:
            return row  # there is none

    @triton.jit
    def _quotient(x, y, QUICK: tl.constexpr):
        if QUICK:  # two instructions, where Triton's has seven for divisors near the largest number
            return libdevice.fast_dividef(x, y)
        else:  # Triton's interpreter
            return x / y

    @triton.jit
    def _update_row(
        codes, scales, state, stream, row, column, old, old_state, sums, lr, eps, kept,
        RULE: tl.constexpr, DECAYS: tl.constexpr, D: tl.constexpr,
        LARGEST_CODE: tl.constexpr, SMALLEST_ROW: tl.constexpr, BY_CHANCE: tl.constexpr,
        QUICK: tl.constexpr, PASSES: tl.constexpr,
    ):  # fmt: skip
        """Apply the rule to a row whose weights and state are `old` and `old_state`."""
        one = tl.zeros([1], tl.int64)
        bits = tl.zeros([1, 1], tl.uint32)
        if BY_CHANCE:  # one hash for weights and state: this kernel has little time to compute
            bits = bits_of_rows(stream, row + one, column)
        # Square roots and quotients are quick ones, off by an ulp or two.
        if RULE == "sgd":
            step = sums * lr
        elif RULE == "rowwise_adagrad":
            total = old_state + tl.sum(tl.sum(sums * sums, 1), 0) / D
            tl.store(state + row, total)
            step = sums * (lr / (tl.sqrt(total) + eps))
        else:
            total = old_state + sums * sums
            kept_total = total
            if BY_CHANCE and state.dtype.element_ty != tl.float32:
                others = other_16_bits(bits)
                kept_total = rounded_stochastically(total, others, state.dtype.element_ty)
            kept_total = kept_total.to(state.dtype.element_ty)
            place = state + row * D + column[None, :]
            tl.store(place, kept_total, (column < D)[None, :], eviction_policy=PASSES)
            step = _quotient(sums * lr, tl.sqrt(total) + eps, QUICK)
        if DECAYS:  # known to the compiler: without it, not a bit is another
            old = old * kept
        store_rows(
            codes, scales, row + one, one == 0, column, old - step, bits,
            D, LARGEST_CODE, SMALLEST_ROW, BY_CHANCE, PASSES,
        )  # fmt: skip

    @triton.jit
    def _noted(row, has_sum):
        """A row number that also says whether a sum was set aside for it."""
        return tl.where(has_sum, row, -2 - row)

    @triton.jit
    def _row_of(noted, SUMS: tl.constexpr):
        if SUMS:
            return tl.where(noted >= 0, noted, -2 - noted)
        else:
            return noted

    @triton.jit(do_not_specialize=["count"])  # every list has another length
    @no_type_check  # tuples grow
    def _update_kernel(
        listed, places, values, count, rows_of_sums, sums,
        scalars, codes, scales, state, key, eps, weight_decay,
        RULE: tl.constexpr, DECAYS: tl.constexpr,
        LARGEST_CODE: tl.constexpr, SMALLEST_ROW: tl.constexpr, BY_CHANCE: tl.constexpr,
        QUICK: tl.constexpr, STAYS: tl.constexpr, PASSES: tl.constexpr,
        D: tl.constexpr, COLUMNS: tl.constexpr,
        BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SUMS: tl.constexpr,
    ):  # fmt: skip
        """One piece of the sorted list or, with `SUMS`, of the sums that were set aside.

        Entries that only note a row, and those behind the end, row -1, have no value. A bag's
        gradient is read again for each of its ids and shall stay in the cache, which rows that
        come once would fill.
        """
        factor, is_open = tl.load(scalars + 1), tl.load(scalars + 2) != 0
        lr = tl.load(scalars) * (factor if RULE == "sgd" else 1.0)
        kept = 1.0 - tl.load(scalars) * weight_decay
        stream = tl.zeros([], tl.uint32)
        if BY_CHANCE:
            stream = mixed(tl.load(key).to(tl.uint32))
        program = tl.program_id(0).to(tl.int64)
        begin = program * (BLOCK * BLOCKS)
        on_the_left = _row_of(tl.load(listed + begin - 1, begin > 0, -1), SUMS)
        column = tl.arange(0, COLUMNS)
        in_row = (column < D)[None, :]

        total = tl.zeros([1, COLUMNS], tl.float32)
        keep = 0.0  # of the total so far
        has_value = begin < 0
        left_has_value = begin < 0
        last_goes_on = begin < 0
        first_row = on_the_left
        last_row = on_the_left
        for block in range(BLOCKS):
            start = begin + block * BLOCK
            inside = tl.minimum(count - start, BLOCK + 1).to(tl.int32)
            noted, sources = (), ()
            for i in tl.static_range(BLOCK + 1):
                noted += (tl.load(listed + start + i, i < inside, -1),)
            for i in tl.static_range(BLOCK):
                source = start + i
                if not SUMS:
                    source = tl.load(places + start + i, i < inside, 0).to(tl.int64)
                sources += (source,)
            entries, old, old_scales, old_state = (), (), (), ()
            keeps, sets_aside, updates = (), (), ()
            for i in tl.static_range(BLOCK):
                row = _row_of(noted[i], SUMS)
                last_goes_on = row == _row_of(noted[i + 1], SUMS)
                from_the_left = row == on_the_left
                keeps += (keep,)
                if SUMS:
                    has_value = ((keep != 0) & has_value) | (noted[i] >= 0)
                    left_has_value = left_has_value | (from_the_left & has_value)
                else:
                    has_value = noted[i] >= 0
                if i == BLOCK - 1:
                    is_last = block == BLOCKS - 1
                    ends = (last_goes_on == 0) | is_last
                    aside = from_the_left | (is_last & last_goes_on)
                else:
                    ends = last_goes_on == 0
                    aside = from_the_left
                keep = tl.where(ends, 0.0, 1.0)
                sets_aside += (ends & aside & has_value,)
                wanted = ends & (aside == 0) & has_value & is_open
                updates += (wanted,)
                if block == 0 and i == 0:
                    first_row = row
                last_row = row
                # Behind the end of the list the first gradient is read, and not used.
                has_sum = (noted[i] >= 0) if SUMS else True
                place = values + sources[i] * D + column[None, :]
                entries += (tl.load(place, in_row & has_sum, 0.0, eviction_policy=STAYS),)
                row = row.to(tl.int64)
                place = codes + row * D + column[None, :]
                old += (tl.load(place, in_row & wanted, eviction_policy=PASSES),)
                if LARGEST_CODE > 0:
                    old_scales += (tl.load(scales + row, wanted, 0.0),)
                old_state += (_load_state(state, row, wanted, column, RULE, D, PASSES),)
            for i in tl.static_range(BLOCK):
                total = total * keeps[i] + entries[i].to(tl.float32)
                row = _row_of(noted[i], SUMS).to(tl.int64)
                if updates[i]:
                    weights = old[i].to(tl.float32)
                    if LARGEST_CODE > 0:
                        weights = weights * old_scales[i]
                    _update_row(
                        codes, scales, state, stream, row, column, weights, old_state[i],
                        total if RULE == "sgd" else total * factor, lr, eps, kept,
                        RULE, DECAYS, D, LARGEST_CODE, SMALLEST_ROW, BY_CHANCE, QUICK, PASSES,
                    )  # fmt: skip
                if sets_aside[i]:
                    slot = program * 2
                    if i == BLOCK - 1:
                        slot += (row != on_the_left).to(tl.int64)
                    tl.store(sums + slot * D + column[None, :], total, in_row)
        if not SUMS:
            left_has_value = first_row == on_the_left
        tl.store(rows_of_sums + program * 2, _noted(first_row, left_has_value))
        last_has_value = last_goes_on & has_value & (last_row != on_the_left)
        tl.store(rows_of_sums + program * 2 + 1, _noted(last_row, last_has_value))


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
        rows: the store; what is not fp32 is rounded as `key` says.
        state: [R] fp32 for row-wise Adagrad, [R, D] fp32 or bf16, rounded as `key` says, for
            Adagrad; None for SGD.
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
