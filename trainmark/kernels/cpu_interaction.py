"""Lookup and dot interaction on a CPU, sample by sample, compiled by numba (extra `fast`).

A sample's vectors fit the first-level cache: they are brought there, and all products are computed
from there, only those below the diagonal. To read rows from all over a table takes four times as
long as to read them one behind the other, so in training the forward pass keeps them, in the place
where the backward pass then leaves their gradients.

Rows may lie in pieces, which are rows of a narrower table: Q pieces make up the F rows of a sample.

Shapes: B samples, F rows of a sample, Q pieces of them, D width of a row, U width of a piece,
V = F + 1 vectors, W width of the output.
"""

import numba
import numpy as np
import torch
from torch import Tensor

from trainmark.kernels.compiled import in_threads
from trainmark.kernels.interaction import output_width
from trainmark.kernels.simd import (
    ALIGNMENT,
    LANES,
    copy,
    fma,
    get,
    load,
    prefetch,
    put,
    scratch,
    splat,
    store,
    store_square,
    stream,
    sum_of_lanes,
    sums_of_lanes,
)

TILE = 4  # vectors by vectors whose products are summed up in registers at a time
AHEAD = 2  # samples: rows are asked for before they are needed, as memory takes its time
_ZERO = np.float32(0)

_compiled = numba.njit(nogil=True, cache=True)
_inlined = numba.njit(nogil=True, cache=True, forceinline=True)


def forward(
    x_BD: Tensor, places_BQ: Tensor | None, pieces: Tensor, kept_BQU: Tensor | None = None
) -> Tensor:
    """[B, W]. Piece q of sample b is `pieces[places_BQ[b, q]]`.

    Args:
        x_BD: float32, as all tensors of floats, which are contiguous but for x and gradients.
        places_BQ: int32 or int64; None: pieces are [B, Q, U], those of one sample after another.
        pieces: [., U]
        kept_BQU: filled with the pieces, if given.
    """
    B, D = x_BD.shape
    places_BQ, in_order = _places(places_BQ, pieces)
    W = output_width(places_BQ.shape[1] * pieces.shape[-1] // D, D)
    out_BW = x_BD.new_empty(B, W)
    keeps = kept_BQU is not None
    kept = x_BD.new_empty(0) if kept_BQU is None else kept_BQU
    streams = kept.data_ptr() % ALIGNMENT == 0 and D % LANES == 0
    arguments = (x_BD.contiguous(), places_BQ, in_order, pieces, kept, keeps, streams, out_BW)
    in_threads(_forward, B, *arguments, D, pieces.shape[-1], W)
    return out_BW


def backward(
    grad_BW: Tensor, x_BD: Tensor, places_BQ: Tensor | None, pieces: Tensor, grads: Tensor
) -> tuple[Tensor, bool]:
    """The gradient of x, and whether all gradients are finite.

    Args:
        places_BQ, pieces: as in the forward pass, or None and what it kept.
        grads: gets the gradients at the places of the pieces; may be the same memory if no piece
            belongs to two samples.
    """
    B, D = x_BD.shape
    W, U = grad_BW.shape[1], pieces.shape[-1]
    places_BQ, in_order = _places(places_BQ, pieces)
    grad_x_BD = x_BD.new_empty(B, D)
    arguments = (grad_BW.contiguous(), x_BD.contiguous(), places_BQ, in_order, pieces, grads)
    return grad_x_BD, all(in_threads(_backward, B, *arguments, grad_x_BD, D, U, W))


def _places(places_BQ: Tensor | None, pieces: Tensor) -> tuple[Tensor, bool]:
    """For the kernels, which learn the number of pieces from the shape, even where all is empty."""
    if places_BQ is not None:
        return places_BQ.contiguous(), False
    return torch.empty(0, pieces.shape[1], dtype=torch.int64), True


# --- kernels; arrays of floats are flat


@_compiled
def _forward(x, places_BQ, in_order, pieces, kept, keeps, streams, out, D, U, W, begin, end):
    V, width = places_BQ.shape[1] * U // D + 1, _rounded_up(D, LANES)
    padded = _rounded_up(V, TILE)
    vectors, dots = scratch(padded * width), scratch(padded * padded)
    for b in range(begin, end):
        _bring(vectors, width, x, places_BQ, in_order, pieces, D, U, b)
        if keeps:
            for row in range(1, V):
                _keep(kept, (b * (V - 1) + row - 1) * D, vectors, row * width, D, streams)
        for i in range(0, padded, TILE):
            for j in range(0, i + 1, TILE):
                tile = _dots_of_tile(vectors, i * width, j * width, width)
                store_square(dots, i * padded + j, padded, tile)
        place = b * W
        copy(out, place, x, b * D, D)
        place += D
        for i in range(1, V):
            copy(out, place, dots, i * padded, i)
            place += i
        while place < (b + 1) * W:
            put(out, place, _ZERO)
            place += 1


@_compiled
def _backward(grad, x, places_BQ, in_order, pieces, grads, grad_x, D, U, W, begin, end):
    Q = places_BQ.shape[1]
    V, width = Q * U // D + 1, _rounded_up(D, 2 * LANES)
    padded = _rounded_up(V, TILE)
    vectors, found = scratch(padded * width), scratch(padded * width)
    pairs, zero = scratch(padded * padded), splat(_ZERO)
    nothing = zero  # 0 as long as all is finite, for 0 times anything else is not a number
    for b in range(begin, end):
        _bring(vectors, width, x, places_BQ, in_order, pieces, D, U, b)
        place = b * W + D
        for i in range(1, V):
            for j in range(i):
                put(pairs, i * padded + j, get(grad, place + j))
                put(pairs, j * padded + i, get(grad, place + j))
            place += i
        for i in range(0, padded, TILE):
            for k in range(0, width, 2 * LANES):
                s00 = s01 = s10 = s11 = s20 = s21 = s30 = s31 = zero
                row = i * padded
                for j in range(V):
                    a0, a1 = load(vectors, j * width + k), load(vectors, j * width + k + LANES)
                    p0, p1 = splat(get(pairs, row + j)), splat(get(pairs, row + padded + j))
                    p2 = splat(get(pairs, row + 2 * padded + j))
                    p3 = splat(get(pairs, row + 3 * padded + j))
                    s00, s01 = fma(p0, a0, s00), fma(p0, a1, s01)
                    s10, s11 = fma(p1, a0, s10), fma(p1, a1, s11)
                    s20, s21 = fma(p2, a0, s20), fma(p2, a1, s21)
                    s30, s31 = fma(p3, a0, s30), fma(p3, a1, s31)
                at = i * width + k
                store(found, at, s00)
                store(found, at + LANES, s01)
                store(found, at + width, s10)
                store(found, at + width + LANES, s11)
                store(found, at + 2 * width, s20)
                store(found, at + 2 * width + LANES, s21)
                store(found, at + 3 * width, s30)
                store(found, at + 3 * width + LANES, s31)
        for d in range(D):  # the dense vector is also passed on as it is
            put(found, d, get(found, d) + get(grad, b * W + d))
        for k in range(0, V * width, LANES):
            nothing = fma(zero, load(found, k), nothing)
        copy(grad_x, b * D, found, 0, D)
        for q in range(Q):
            row, column = q * U // D, q * U % D
            place = b * Q + q if in_order else places_BQ[b, q]
            copy(grads, place * U, found, (row + 1) * width + column, U)
    return sum_of_lanes(nothing) == 0


@_inlined
def _bring(vectors, width, x, places_BQ, in_order, pieces, D, U, b):
    """The vectors of sample b, each in `width` floats; and ask for those of a later one."""
    Q = places_BQ.shape[1]
    if not in_order and b + AHEAD < len(places_BQ):
        for q in range(Q):
            begin = places_BQ[b + AHEAD, q] * U
            for k in range(0, U, LANES):
                prefetch(pieces, begin + k)
    copy(vectors, 0, x, b * D, D)
    for q in range(Q):
        row, column = q * U // D, q * U % D
        place = b * Q + q if in_order else places_BQ[b, q]
        copy(vectors, (row + 1) * width + column, pieces, place * U, U)


@_inlined
def _dots_of_tile(vectors, i, j, width):
    """The products of four vectors from `i` on with four from `j` on, in a vector."""
    s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = splat(_ZERO)
    s20 = s21 = s22 = s23 = s30 = s31 = s32 = s33 = splat(_ZERO)
    for k in range(0, width, LANES):
        a0, a1 = load(vectors, i + k), load(vectors, i + width + k)
        a2, a3 = load(vectors, i + 2 * width + k), load(vectors, i + 3 * width + k)
        b0, b1 = load(vectors, j + k), load(vectors, j + width + k)
        b2, b3 = load(vectors, j + 2 * width + k), load(vectors, j + 3 * width + k)
        s00, s01, s02, s03 = fma(a0, b0, s00), fma(a0, b1, s01), fma(a0, b2, s02), fma(a0, b3, s03)
        s10, s11, s12, s13 = fma(a1, b0, s10), fma(a1, b1, s11), fma(a1, b2, s12), fma(a1, b3, s13)
        s20, s21, s22, s23 = fma(a2, b0, s20), fma(a2, b1, s21), fma(a2, b2, s22), fma(a2, b3, s23)
        s30, s31, s32, s33 = fma(a3, b0, s30), fma(a3, b1, s31), fma(a3, b2, s32), fma(a3, b3, s33)
    return sums_of_lanes(
        (s00, s01, s02, s03, s10, s11, s12, s13, s20, s21, s22, s23, s30, s31, s32, s33)
    )


@_inlined
def _keep(kept, at, vectors, begin, count, streams):
    if streams:
        for k in range(0, count, LANES):
            stream(kept, at + k, load(vectors, begin + k))
    else:
        copy(kept, at, vectors, begin, count)


@_inlined
def _rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
