"""Updating the rows of tables that a batch looked up, on a CPU, compiled by numba (extra `fast`).

Rows lie anywhere in a table that no cache holds. A processor asks for several of them at a time, as
long as it can tell what comes next: so a thread first lists what it is to do, and then does it
without a decision. An update goes through the gradients as they lie in memory, and touches a row
once for each of them (SGD) or once in all (row-wise Adagrad, which needs the sum of a row's
gradients first). Nothing is sorted: every row belongs to one of `SHARES` shares, and a thread looks
after some of them. Gradients of a row are always added in their order, so the result is the same on
any number of threads, bit for bit.

Shapes: N looked-up rows, duplicates included, D width of a row.
"""

import numba
import numpy as np
import torch
from torch import Tensor

from trainmark.kernels.compiled import in_threads

SHARES = 64  # of the rows, by their number; more threads than that would have nothing to do
_ZERO, _ONE = np.float32(0), np.float32(1)

_compiled = numba.njit(nogil=True, cache=True)
_inlined = numba.njit(nogil=True, cache=True, forceinline=True)
_in_any_order = numba.njit(
    nogil=True, cache=True, forceinline=True, fastmath={"reassoc", "nsz", "contract"}
)


def gather_rows(table: Tensor, ids_BF: Tensor, rows_BFD: Tensor) -> None:
    """Write table[ids[b, f]] to rows[b, f]; fastest if both lie in memory as [F, B].

    Column after column of ids, then, which are of one table each: it has fewer pages than all
    together, and finding their addresses is half of the time otherwise.
    """
    if not rows_BFD.is_contiguous():
        ids_BF, rows_BFD = ids_BF.t(), rows_BFD.transpose(0, 1)
    torch.index_select(table, 0, ids_BF.flatten(), out=rows_BFD.view(-1, table.shape[1]))


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


def rowwise_adagrad(
    table: Tensor,
    sums: Tensor,
    ids_N: Tensor,
    grads_ND: Tensor,
    lr: float,
    eps: float,
    places_N: Tensor | None = None,
) -> None:
    """With g, the sum of a row's gradients: s += mean(g^2), w -= lr g / (sqrt(s) + eps).

    `places_N`: as of `add_rows`.
    """
    grads_ND, squares = grads_ND.contiguous(), None
    if places_N is not None:  # a gradient serves several rows
        squares = grads_ND.new_empty(len(grads_ND))
        in_threads(_mean_squares, len(grads_ND), grads_ND, squares)
    arguments = (table, sums, ids_N.contiguous(), grads_ND, places_N, squares)
    in_threads(_rowwise_adagrad, SHARES, *arguments, np.float32(lr), np.float32(eps))


# --- kernels


@_compiled
def _pool(table, ids, blocks, out_RD, begin, end):
    """Bags `begin` to `end`, counted through all blocks."""
    before = 0
    for block in blocks:
        first_id, id_step, bag_step, hotness, bags, first_row, row_step, _ = block  # no offset
        for bag in range(max(begin - before, 0), min(end - before, bags)):
            total = out_RD[first_row + bag * row_step]
            total[:] = _ZERO
            for i in range(hotness):
                row = ids[first_id + bag * bag_step + i * id_step]
                if row >= 0:
                    _add_to(total, table[row], _ONE)
        before += bags


@_compiled
def _add(table, ids, rows_ND, places, scale, begin, end):
    for n in _of_shares(ids, begin, end):
        _add_to(table[ids[n]], rows_ND[_place(places, n)], scale)


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
def _rowwise_adagrad(table, sums, ids, grads_ND, places, squares, lr, eps, begin, end):
    first, following = _chains(ids, begin, end)
    g = np.empty(table.shape[1], np.float32)
    for n in first:
        other, place = following[n], _place(places, n)
        if other < 0:  # of most rows, whose gradient needs no copy
            square = _mean_square(grads_ND[place]) if squares is None else squares[place]
            _update_row(table, sums, ids[n], grads_ND[place], square, lr, eps)
            continue
        g[:] = grads_ND[place]
        while other >= 0:
            _add_to(g, grads_ND[_place(places, other)], _ONE)
            other = following[other]
        _update_row(table, sums, ids[n], g, _mean_square(g), lr, eps)


@_inlined
def _update_row(table, sums, row, g, square, lr, eps):
    total = sums[row] + square
    sums[row] = total
    _add_to(table[row], g, -lr / (np.sqrt(total) + eps))


@_compiled
def _chains(ids, begin, end):
    """Of the rows in some shares: their first places, and for each place the one after it, or -1.

    A hash table has the first place of each row; its slots are at least twice as many.
    """
    places = _of_shares(ids, begin, end)
    slots = 4
    while slots < 2 * len(places):
        slots *= 2
    held = np.full(slots, -1, np.int32)
    first, count = np.empty(len(places), np.int32), 0
    following, last = np.full(len(ids), -1, np.int32), np.empty(len(ids), np.int32)
    for n in places:
        # Fibonacci hashing: the upper half of the product depends on all bits.
        mixed = np.uint64(ids[n]) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)
        slot = np.int64(mixed) & (slots - 1)
        while held[slot] >= 0 and ids[held[slot]] != ids[n]:
            slot = (slot + 1) & (slots - 1)
        if held[slot] < 0:
            held[slot] = first[count] = n
            count += 1
        else:
            following[last[held[slot]]] = n
        last[held[slot]] = n
    return first[:count], following


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
