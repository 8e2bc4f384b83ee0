"""Reading and updating rows all over a table on a CPU, compiled by numba (extra `fast`).

No cache holds a table, and a processor by itself asks for few rows at a time. So a thread first
lists what it is to do, and then does it without a decision, asking for rows `AHEAD` of their turn.
SGD goes through the gradients as they lie in memory, and touches a row once for each of them;
Adagrad, which needs the sum of a row's gradients first, once in all. Every row belongs to one of
`SHARES` shares, and a thread looks after some of them. Gradients of a row are always added in their
order, so the result is the same on any number of threads, bit for bit.

Shapes: N looked-up rows, duplicates included, D width of a row.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from trainmark.kernels.compiled import in_threads

SHARES = 64  # of the rows, by their number; more threads than that would have nothing to do
AHEAD = 16  # rows, or a little more: of bags, whole ones
BUCKET_BITS = 15  # so many rows of a table that what is kept for each stays in a core's cache
LINE = 16  # floats of a cache line
_ZERO, _ONE = np.float32(0), np.float32(1)

_options: Any = {"nogil": True, "cache": True, "error_model": "numpy"}
_compiled = numba.njit(**_options)
_inlined = numba.njit(**_options, forceinline=True)
_in_any_order = numba.njit(**_options, forceinline=True, fastmath={"reassoc", "nsz", "contract"})


def gather_rows(table: Tensor, ids_BF: Tensor, rows_BFD: Tensor) -> None:
    """Write table[ids[b, f]] to rows[b, f]; fastest if both lie in memory as [F, B].

    Column after column of ids, then, which are of one table each: it has fewer pages than all
    together, and finding their addresses is half of the time otherwise.
    """
    if not rows_BFD.is_contiguous():
        ids_BF, rows_BFD = ids_BF.t(), rows_BFD.transpose(0, 1)
    ids_N = ids_BF.flatten()
    in_threads(_gather, len(ids_N), table, ids_N, rows_BFD.view(-1, table.shape[1]))


def pool_rows(table: Tensor, ids_N: Tensor, blocks: Tensor, out_RD: Tensor) -> None:
    """Write the sums of bags of rows; `blocks` is the table of a `pool_rows.Bags`."""
    bags = int(blocks[:, 4].sum())
    in_threads(_pool, bags, table, ids_N, blocks, out_RD)


def add_rows(
    table: Tensor, ids_N: Tensor, rows_ND: Tensor, scale: float, places_N: Tensor | None = None
) -> None:
    """table[ids[n]] += scale rows[n], in the order of n; each product is rounded.

    With `places_N`, rows[places[n]], which several n may share.
    """
    arguments = (table, ids_N.contiguous(), rows_ND.contiguous(), places_N, np.float32(scale))
    in_threads(_add, SHARES, *arguments)


def adagrad(
    table: Tensor,
    sums: Tensor,
    ids_N: Tensor,
    grads_ND: Tensor,
    lr: float,
    eps: float,
    places_N: Tensor | None = None,
) -> None:
    """With g, the sum of a row's gradients: s += g^2, w -= lr g / (sqrt(s) + eps).

    Args:
        sums: as `table`; or one of each row, to which mean(g^2) is added.
        places_N: as of `add_rows`.
    """
    grads_ND, squares = grads_ND.contiguous(), None
    if places_N is not None and sums.dim() == 1:  # a gradient serves several rows
        squares = grads_ND.new_empty(len(grads_ND))
        in_threads(_mean_squares, len(grads_ND), grads_ND, squares)
    arguments = (table, sums, ids_N.contiguous(), grads_ND, places_N, squares)
    in_threads(_adagrad, SHARES, *arguments, np.float32(lr), np.float32(eps))


# --- kernels


@intrinsic
def _ask(_, array, index):
    """Bring the cache line of array.flat[index] near. The second-level cache waits for more lines
    at a time than the first, whose own misses are what this is to shorten."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kinds = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kinds)
        place = builder.bitcast(builder.gep(data, [arguments[1]]), pointer)
        builder.call(prefetch, [place, number(0), number(1), number(1)])  # to read; level; data
        return context.get_dummy_value()

    return types.void(array, index), generate


@_inlined
def ask_for(rows, row):
    if rows.ndim == 1:  # known to the compiler
        _ask(rows, row)
    else:
        for k in range(0, rows.shape[1], LINE):
            _ask(rows, row * rows.shape[1] + k)


@_compiled
def _gather(table, ids, rows_ND, begin, end):
    for n in range(begin, end):
        ask_for(table, ids[min(n + AHEAD, len(ids) - 1)])
        _copy(rows_ND[n], table[ids[n]])


@_compiled
def _pool(table, ids, blocks, out_RD, begin, end):
    """Bags `begin` to `end`, counted through all blocks."""
    before = 0
    for block in blocks:
        first_id, id_step, bag_step, hotness, bags, first_row, row_step, _ = block  # no offset
        ahead, there = AHEAD // max(hotness, 1) + 1, np.empty(hotness + 1, np.int64)
        for bag in range(max(begin - before, 0), min(end - before, bags)):
            if bag + ahead < bags:
                for i in range(hotness):
                    ask_for(table, max(ids[first_id + (bag + ahead) * bag_step + i * id_step], 0))
            count = 0
            for i in range(hotness):
                there[count] = ids[first_id + bag * bag_step + i * id_step]
                count += np.int64(there[count] >= 0)  # a branch would be a guess each time
            total = out_RD[first_row + bag * row_step]
            total[:] = _ZERO
            for row in there[:count]:
                _add_to(total, table[row], _ONE)
        before += bags


@_compiled
def _add(table, ids, rows_ND, places, scale, begin, end):
    listed = _of_shares(ids, begin, end)
    for i in range(len(listed)):
        ask_for(table, ids[listed[min(i + AHEAD, len(listed) - 1)]])
        _add_to(table[ids[listed[i]]], rows_ND[_place(places, listed[i])], scale)


@_inlined
def _place(places, n):
    if places is None:  # known to the compiler
        return n
    return places[n]


@_compiled
def _of_shares(ids, begin, end):
    """The places of the rows in some shares."""
    places, count = np.empty(len(ids) + 1, np.int32), 0
    for n in range(len(ids)):
        share = ids[n] % SHARES
        places[count] = n  # overwritten unless it counts: a branch would be a guess each time
        count += np.int64(share >= begin) & np.int64(share < end)
    return places[:count]


@_compiled
def _mean_squares(grads_ND, squares, begin, end):
    for n in range(begin, end):
        squares[n] = _mean_square(grads_ND[n])


@_compiled
def _adagrad(table, sums, ids, grads_ND, places, squares, lr, eps, begin, end):
    listed, starts = _by_bucket(ids, len(table), begin, end)
    first, last = np.full(1 << BUCKET_BITS, -1, np.int32), np.empty(1 << BUCKET_BITS, np.int32)
    g = np.empty(table.shape[1], np.float32)
    for bucket in range(len(starts) - 1):
        in_bucket = listed[starts[bucket] : starts[bucket + 1]]
        if len(in_bucket) == 0:
            continue
        ones, several, following = _chains(ids, in_bucket, first, last)
        for i in range(len(ones)):
            ahead = ones[min(i + AHEAD, len(ones) - 1)]
            _ask_for_update(table, sums, ids[ahead], grads_ND, _place(places, ahead))
            place = _place(places, ones[i])
            square = _mean_square(grads_ND[place]) if squares is None else squares[place]
            _update_row(table, sums, ids[ones[i]], grads_ND[place], square, lr, eps)
        for i in range(len(several)):
            ahead = several[min(i + AHEAD, len(several) - 1)]
            n = in_bucket[ahead]
            _ask_for_update(table, sums, ids[n], grads_ND, _place(places, n))
            ask_for(grads_ND, _place(places, in_bucket[following[ahead]]))
            n, other = in_bucket[several[i]], following[several[i]]
            _add_up(g, grads_ND[_place(places, n)], grads_ND[_place(places, in_bucket[other])])
            other = following[other]
            while other >= 0:
                _add_to(g, grads_ND[_place(places, in_bucket[other])], _ONE)
                other = following[other]
            _update_row(table, sums, ids[n], g, _mean_square(g), lr, eps)


@_inlined
def _ask_for_update(table, sums, row, grads_ND, place):
    ask_for(table, row)
    ask_for(sums, row)
    ask_for(grads_ND, place)


@_inlined
def _update_row(table, sums, row, g, square, lr, eps):
    if sums.ndim == 1:
        total = sums[row] + square
        sums[row] = total
        _add_to(table[row], g, -lr / (np.sqrt(total) + eps))
        return
    weights, totals = table[row], sums[row]
    for k in range(len(g)):
        total = totals[k] + g[k] * g[k]
        totals[k] = total
        weights[k] -= lr * (g[k] / (np.sqrt(total) + eps))


@_compiled
def _by_bucket(ids, rows, begin, end):
    """The places of the rows in some shares by bucket, in their order; and where each begins."""
    listed = _of_shares(ids, begin, end)
    starts = np.zeros((rows >> BUCKET_BITS) + 2, np.int32)
    for n in listed:
        starts[(ids[n] >> BUCKET_BITS) + 1] += 1
    starts = np.cumsum(starts)
    in_order, ends = np.empty(len(listed), np.int32), starts.copy()
    for n in listed:
        bucket = ids[n] >> BUCKET_BITS
        in_order[ends[bucket]] = n
        ends[bucket] += 1
    return in_order, starts


@_compiled
def _chains(ids, in_bucket, first, last):
    """Of a bucket: the places of rows that are there once; where in the bucket others come for the
    first time; and for each, where its row comes next, or -1.

    `first` and `last` are by the row's number in the bucket; `first` is -1, and so it is left.
    """
    size, within = len(in_bucket), (1 << BUCKET_BITS) - 1
    following, firsts, count = np.empty(size, np.int32), np.empty(size + 1, np.int32), 0
    for i in range(size):
        row = ids[in_bucket[i]] & within
        following[i] = -1
        firsts[count] = i
        if first[row] < 0:
            first[row] = i
            count += 1
        else:
            following[last[row]] = i
        last[row] = i
    ones, several = np.empty(count + 1, np.int32), np.empty(count + 1, np.int32)
    of_ones = of_several = 0
    for i in firsts[:count]:
        ones[of_ones], several[of_several] = in_bucket[i], i
        of_ones += np.int64(following[i] < 0)
        of_several += np.int64(following[i] >= 0)
        first[ids[in_bucket[i]] & within] = -1
    return ones[:of_ones], several[:of_several], following


@_inlined
def _copy(target, source):
    """Faster than an assignment of slices, which makes sure that they do not overlap."""
    for k in range(len(target)):
        target[k] = source[k]


@_inlined
def _add_up(target, first, second):
    for k in range(len(target)):
        target[k] = first[k] + second[k]


@_inlined
def _add_to(target, source, scale):
    for k in range(len(target)):
        target[k] += scale * source[k]


@_in_any_order
def _mean_square(values):
    total = _ZERO
    for k in range(len(values)):
        total += values[k] * values[k]
    return total / np.float32(len(values))
