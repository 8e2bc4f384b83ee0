"""Lookup and dot interaction on a CPU, sample by sample, compiled by numba (extra `fast`).

A sample's vectors fit the first-level cache: they are brought there, and all products are computed
from there, only those below the diagonal. To read rows from all over a table takes several times as
long as to read them one behind the other, so in training they are looked up first, once, and the
backward pass leaves their gradients in their place.

Rows may lie in pieces, which are rows of a narrower table: Q pieces make up the F rows of a sample.

Shapes: B samples, F rows of a sample, Q pieces of them, D width of a row, U width of a piece,
V = F + 1 vectors, W width of the output.
"""

import numba
import numpy as np
import torch
from torch import Tensor

from trainmark.kernels.compiled import in_threads
from trainmark.kernels.cpu_rows import gather_rows
from trainmark.kernels.interaction import output_width
from trainmark.kernels.simd import (
    LANES,
    add,
    ask_for,
    copy,
    fma,
    get,
    load,
    put,
    scratch,
    splat,
    store,
    store_square,
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
        x_BD: float32, as all tensors of floats.
        places_BQ: int32 or int64; None: pieces are [B, Q, U].
        pieces: [., U], contiguous; or [B, Q, U], contiguous as they are or as [Q, B, U].
        kept_BQU: filled with the pieces, if given; contiguous in either order.
    """
    B, D = x_BD.shape
    if places_BQ is not None and kept_BQU is not None:
        gather_rows(pieces, places_BQ, kept_BQU)
        places_BQ, pieces = None, kept_BQU
    places = _places(places_BQ, pieces)
    W = output_width(places[0].shape[1] * pieces.shape[-1] // D, D)
    out_BW = x_BD.new_empty(B, W)
    arguments = (x_BD.contiguous(), *places, _flat(pieces), out_BW)
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
    grad_x_BD = x_BD.new_empty(B, D)
    inputs = (grad_BW.contiguous(), x_BD.contiguous(), *_places(places_BQ, pieces), _flat(pieces))
    finite = in_threads(_backward, B, *inputs, _flat(grads), grad_x_BD, D, U, W)
    return grad_x_BD, all(finite)


def _places(places_BQ: Tensor | None, pieces: Tensor) -> tuple[Tensor, int, int]:
    """For the kernels: places, and how far samples and pieces are apart where there are none.

    The number of pieces is known from the shape of the places, even where there are none.
    """
    if places_BQ is not None:
        return places_BQ.contiguous(), 0, 0
    return torch.empty(0, pieces.shape[1], dtype=torch.int64), pieces.stride(0), pieces.stride(1)


def _flat(pieces: Tensor) -> Tensor:
    """As the pieces lie in memory."""
    return (pieces if pieces.is_contiguous() else pieces.transpose(0, 1)).view(-1)


# --- kernels; arrays of floats are flat


@_compiled
def _forward(x, places_BQ, sample_step, piece_step, pieces, out, D, U, W, begin, end):
    Q = places_BQ.shape[1]
    V, width = Q * U // D + 1, _rounded_up(D, LANES)
    padded, pitch = _rounded_up(V, TILE), _rounded_up(V, LANES)
    vectors, dots, joined = scratch(padded * width), scratch(padded * pitch), scratch(W + pitch)
    for b in range(begin, end):
        _bring(vectors, width, x, places_BQ, sample_step, piece_step, pieces, D, U, b)
        for i in range(0, padded, TILE):
            _ask_for_next(sample_step, piece_step, pieces, U, b, i, min(i + TILE, Q))
            for j in range(0, i + 1, TILE):
                tile = _dots_of_tile(vectors, i * width, j * width, width)
                store_square(dots, i * pitch + j, pitch, tile)
        copy(joined, 0, x, b * D, D)
        place = D
        for i in range(1, V):
            for j in range(0, i, LANES):  # the next row overwrites what this one has not
                store(joined, place + j, load(dots, i * pitch + j))
            place += i
        for k in range(place, W):
            put(joined, k, _ZERO)
        copy(out, b * W, joined, 0, W)


@_compiled
def _backward(
    grad, x, places_BQ, sample_step, piece_step, pieces, grads, grad_x, D, U, W, begin, end
):
    Q = places_BQ.shape[1]
    V, width = Q * U // D + 1, _rounded_up(D, 2 * LANES)
    padded, pitch = _rounded_up(V, TILE), _rounded_up(V, LANES)
    vectors, found = scratch(padded * width), scratch(padded * width)
    pairs, given, zero = scratch(padded * pitch), scratch(W + width + pitch), splat(_ZERO)
    nothing = zero  # 0 as long as all is finite, for 0 times anything else is not a number
    for b in range(begin, end):
        _bring(vectors, width, x, places_BQ, sample_step, piece_step, pieces, D, U, b)
        copy(given, 0, grad, b * W, W)
        _arrange(pairs, pitch, given, D, V)
        for i in range(0, padded, TILE):
            _ask_for_next(sample_step, piece_step, pieces, U, b, i, min(i + TILE, Q))
            tile_end = min(i + TILE, V)
            for k in range(0, width, 2 * LANES):
                sums = (zero, zero, zero, zero, zero, zero, zero, zero)
                for j in range(tile_end):
                    sums = _add_products(sums, vectors, j * width + k, pairs, i * pitch + j, pitch)
                for j in range(tile_end, V):
                    sums = _add_products(sums, vectors, j * width + k, pairs, j * pitch + i, 1)
                _store_tile(found, i * width + k, width, sums)
        for k in range(0, width, LANES):  # the dense vector is also passed on as it is
            store(found, k, add(load(found, k), load(given, k)))
        for k in range(0, V * width, LANES):
            nothing = fma(zero, load(found, k), nothing)
        copy(grad_x, b * D, found, 0, D)
        for q in range(Q):
            row, column = q * U // D, q * U % D
            place = _begin_of(places_BQ, sample_step, piece_step, U, b, q)
            copy(grads, place, found, (row + 1) * width + column, U)
    return sum_of_lanes(nothing) == 0


@_inlined
def _arrange(pairs, pitch, given, place, V):
    """The gradients of products as a matrix, of which the lower triangle and the tiles on the
    diagonal are right: the others are read at their mirror image."""
    for i in range(V):
        for j in range(0, i, LANES):
            store(pairs, i * pitch + j, load(given, place + j))
        put(pairs, i * pitch + i, _ZERO)
        for j in range(i // TILE * TILE, i):
            put(pairs, j * pitch + i, get(given, place + j))
        place += i


@_inlined
def _add_products(sums, vectors, at, pairs, pair, step):
    """Two registers of a vector times four gradients, `step` apart, added to the tile's sums."""
    s00, s01, s10, s11, s20, s21, s30, s31 = sums
    a0, a1 = load(vectors, at), load(vectors, at + LANES)
    p0, p1 = splat(get(pairs, pair)), splat(get(pairs, pair + step))
    p2, p3 = splat(get(pairs, pair + 2 * step)), splat(get(pairs, pair + 3 * step))
    s00, s01, s10, s11 = fma(p0, a0, s00), fma(p0, a1, s01), fma(p1, a0, s10), fma(p1, a1, s11)
    s20, s21, s30, s31 = fma(p2, a0, s20), fma(p2, a1, s21), fma(p3, a0, s30), fma(p3, a1, s31)
    return s00, s01, s10, s11, s20, s21, s30, s31


@_inlined
def _store_tile(found, at, width, sums):
    s00, s01, s10, s11, s20, s21, s30, s31 = sums
    store(found, at, s00)
    store(found, at + LANES, s01)
    store(found, at + width, s10)
    store(found, at + width + LANES, s11)
    store(found, at + 2 * width, s20)
    store(found, at + 2 * width + LANES, s21)
    store(found, at + 3 * width, s30)
    store(found, at + 3 * width + LANES, s31)


@_inlined
def _bring(vectors, width, x, places_BQ, sample_step, piece_step, pieces, D, U, b):
    """The vectors of sample b, each in `width` floats; and ask for those of a later one."""
    Q = places_BQ.shape[1]
    if b + AHEAD < len(places_BQ):
        for q in range(Q):
            ask_for(pieces, places_BQ[b + AHEAD, q] * U, U)
    copy(vectors, 0, x, b * D, D)
    for q in range(Q):
        row, column = q * U // D, q * U % D
        place = _begin_of(places_BQ, sample_step, piece_step, U, b, q)
        copy(vectors, (row + 1) * width + column, pieces, place, U)


@_inlined
def _ask_for_next(sample_step, piece_step, pieces, U, b, begin, end):
    """Some pieces of the sample behind b, while this one is being computed.

    Not of those that lie anywhere: memory takes longer for each, and they are better asked for
    many at a time.
    """
    if sample_step:
        for q in range(begin, end):
            ask_for(pieces, (b + 1) * sample_step + q * piece_step, U)


@_inlined
def _begin_of(places_BQ, sample_step, piece_step, U, b, q):
    """Where piece q of sample b begins."""
    return places_BQ[b, q] * U if len(places_BQ) else b * sample_step + q * piece_step


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
def _rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
