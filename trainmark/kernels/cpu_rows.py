"""Updating the rows of tables that a batch looked up, on a CPU, compiled by numba (extra `fast`).

Rows lie anywhere in a table that no cache holds, so each one is asked for some time before it is
needed. An update goes through the gradients as they lie in memory, and touches a row once for each
of them (SGD) or once in all (row-wise Adagrad, which needs the sum of a row's gradients first).
Nothing is sorted: every row belongs to one of `SHARES` shares, and a thread looks after some of
them. Gradients of a row are always added in their order, so the result is the same on any number of
threads, bit for bit.

Shapes: N looked-up rows, duplicates included, D width of a row.
"""

import numba
import numpy as np
from torch import Tensor

from trainmark.kernels.compiled import in_threads
from trainmark.kernels.simd import (
    ALIGNMENT,
    LANES,
    add,
    ask_for,
    copy,
    fma,
    get,
    load,
    multiply,
    prefetch,
    put,
    scratch,
    splat,
    store,
    stream,
    sum_of_lanes,
)

SHARES = 64  # of the rows, by their number; more threads than that would have nothing to do
AHEAD = 32  # rows, about as many as memory delivers while one waits for the first of them
_ZERO, _ONE = np.float32(0), np.float32(1)

_compiled = numba.njit(nogil=True, cache=True)
_inlined = numba.njit(nogil=True, cache=True, forceinline=True)


def gather_rows(table: Tensor, ids_BF: Tensor, rows_BFD: Tensor) -> None:
    """Write table[ids[b, f]] to rows[b, f]; fastest if both lie in memory as [F, B].

    Column after column of ids, which are of one table each: it has fewer pages than all together,
    and finding their addresses is half of the time otherwise.
    """
    D = table.shape[1]
    streams = rows_BFD.data_ptr() % ALIGNMENT == 0 and D % LANES == 0
    flat = (rows_BFD if rows_BFD.is_contiguous() else rows_BFD.transpose(0, 1)).view(-1)
    steps = rows_BFD.stride(0), rows_BFD.stride(1)
    in_threads(_gather, ids_BF.shape[1], table, ids_BF.t().contiguous(), flat, *steps, D, streams)


def add_rows(table: Tensor, ids_N: Tensor, rows_ND: Tensor, scale: float) -> None:
    """table[ids[n]] += scale rows[n], in the order of n; each product is rounded."""
    arguments = (table, ids_N.contiguous(), rows_ND.contiguous(), table.shape[1], np.float32(scale))
    in_threads(_add, SHARES, *arguments)


def rowwise_adagrad(
    table: Tensor, sums: Tensor, ids_N: Tensor, grads_ND: Tensor, lr: float, eps: float
) -> None:
    """With g, the sum of a row's gradients: s += mean(g^2), w -= lr g / (sqrt(s) + eps)."""
    arguments = (table, sums, ids_N.contiguous(), grads_ND.contiguous(), table.shape[1])
    in_threads(_rowwise_adagrad, SHARES, *arguments, np.float32(lr), np.float32(eps))


# --- kernels; arrays of floats are flat


@_compiled
def _gather(table, ids_FB, rows, sample_step, row_step, D, streams, begin, end):
    B = ids_FB.shape[1]
    for f in range(begin, end):
        for b in range(B):
            if b + AHEAD < B:
                ask_for(table, ids_FB[f, b + AHEAD] * D, D)
            source, target = ids_FB[f, b] * D, b * sample_step + f * row_step
            if streams:
                for k in range(0, D, LANES):
                    stream(rows, target + k, load(table, source + k))
            else:
                copy(rows, target, table, source, D)


@_compiled
def _add(table, ids, rows, D, scale, begin, end):
    count = len(ids)
    for n in range(count):
        if n + AHEAD < count and begin <= ids[n + AHEAD] % SHARES < end:
            ask_for(table, ids[n + AHEAD] * D, D)
        if begin <= ids[n] % SHARES < end:
            _add_to(table, ids[n] * D, rows, n * D, scale, D)


@_compiled
def _rowwise_adagrad(table, sums, ids, grads, D, lr, eps, begin, end):
    count = len(ids)
    first, following = _chains(ids, begin, end)
    g = scratch(-(-D // LANES) * LANES)
    for n in range(count):
        if n + AHEAD < count and first[n + AHEAD]:
            ask_for(table, ids[n + AHEAD] * D, D)
            prefetch(sums, np.int64(ids[n + AHEAD]))
        if not first[n]:
            continue
        copy(g, 0, grads, n * D, D)
        other = following[n]
        while other >= 0:
            _add_to(g, 0, grads, other * D, _ONE, D)
            other = following[other]
        total = get(sums, np.int64(ids[n])) + _square_sum(g) / np.float32(D)
        put(sums, np.int64(ids[n]), total)
        _add_to(table, ids[n] * D, g, 0, -lr / (np.sqrt(total) + eps), D)


@_compiled
def _chains(ids, begin, end):
    """Of the rows in some shares: is this their first place, and which is the one after it, or -1.

    A hash table has the first place of each row; its slots are at least twice as many.
    """
    count = len(ids)
    slots = 4
    while slots < 2 * count:
        slots *= 2
    held = np.full(slots, -1, np.int32)
    first, following = np.zeros(count, np.bool_), np.full(count, -1, np.int32)
    last = np.empty(count, np.int32)
    for n in range(count):
        if not begin <= ids[n] % SHARES < end:
            continue
        # Fibonacci hashing: the upper half of the product depends on all bits.
        mixed = np.uint64(ids[n]) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)
        slot = np.int64(mixed) & (slots - 1)
        while held[slot] >= 0 and ids[held[slot]] != ids[n]:
            slot = (slot + 1) & (slots - 1)
        if held[slot] < 0:
            held[slot], first[n] = n, True
        else:
            following[last[held[slot]]] = n
        last[held[slot]] = n
    return first, following


@_inlined
def _add_to(target, at, source, begin, scale, D):
    """target += scale source, for D elements."""
    scales, whole = splat(scale), D // LANES * LANES
    for k in range(0, whole, LANES):
        scaled = multiply(scales, load(source, begin + k))
        store(target, at + k, add(load(target, at + k), scaled))
    for k in range(whole, D):
        put(target, at + k, get(target, at + k) + scale * get(source, begin + k))


@_inlined
def _square_sum(values):
    """Of an array of whole vectors."""
    sums = splat(_ZERO)
    for k in range(0, len(values), LANES):
        sums = fma(load(values, k), load(values, k), sums)
    return sum_of_lanes(sums)
