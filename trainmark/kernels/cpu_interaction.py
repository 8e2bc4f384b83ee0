"""Lookup and dot interaction on a CPU, sample by sample, compiled by numba (extra `fast`).

A sample's vectors fit the first-level cache: they are brought there, and all products are computed
from there, only those below the diagonal. To read rows from all over a table takes several times as
long as to read them one behind the other, so in training they are looked up first, once, and the
backward pass leaves their gradients in their place.

Rows may lie in pieces, which are rows of a narrower table: Q pieces make up the F rows of a sample.

Shapes: B samples, F rows of a sample, Q pieces of them, D width of a row, U width of a piece,
V = F + 1 vectors, W width of the output.
"""

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from trainmark.kernels.compiled import in_threads
from trainmark.kernels.cpu_rows import ask_for, gather_rows
from trainmark.kernels.interaction_layout import output_width

GROUP = 14  # vectors whose products are added at a time in the backward pass
AHEAD = 1  # samples whose rows are asked for before their turn
PITCH = 64
"""Columns that are taken at a time there, and how far apart the vectors lie: a number that the
compiler knows, or it would make sure each time that none of them overlaps with the sums."""
_ZERO = np.float32(0)

# Sums may be taken in any order, or a register could not hold several of their terms.
_FASTMATH = {"reassoc", "nsz", "contract"}
_options: Any = {"nogil": True, "cache": True, "fastmath": _FASTMATH, "error_model": "numpy"}
_compiled = numba.njit(**_options)
_inlined = numba.njit(**_options, forceinline=True)


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
    in_threads(_forward, B, x_BD.contiguous(), *places, _flat(pieces), out_BW)
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
    grad_x_BD = x_BD.new_empty(B, D)
    inputs = (grad_BW.contiguous(), x_BD.contiguous(), *_places(places_BQ, pieces), _flat(pieces))
    finite = in_threads(_backward, B, *inputs, _flat(grads), grad_x_BD)
    return grad_x_BD, all(finite)


def _places(places_BQ: Tensor | None, pieces: Tensor) -> tuple[Tensor, int, int]:
    """For the kernels: places, and how far samples and pieces are apart where there are none.

    The number of pieces is known from the shape of the places, even where there are none.
    """
    if places_BQ is not None:
        return places_BQ.contiguous(), 0, 0
    _, Q, U = pieces.shape
    return torch.empty(0, Q, dtype=torch.int64), pieces.stride(0) // U, pieces.stride(1) // U


def _flat(pieces: Tensor) -> Tensor:
    """[., U], as the pieces lie in memory."""
    return (pieces if pieces.is_contiguous() else pieces.transpose(0, 1)).view(-1, pieces.shape[-1])


# --- kernels


@_compiled
def _forward(x_BD, places_BQ, sample_step, piece_step, pieces, out_BW, begin, end):
    D = x_BD.shape[1]
    V = places_BQ.shape[1] * pieces.shape[1] // D + 1
    brought = _scratch(V * D)
    vectors = brought.reshape(V, D)
    for b in range(begin, end):
        _ask_for_sample(places_BQ, sample_step, piece_step, pieces, min(b + AHEAD, end - 1))
        _bring(brought, D, x_BD, places_BQ, sample_step, piece_step, pieces, b, 0, D)
        _copy(out_BW[b, :D], vectors[0])
        dots = out_BW[b, D:]
        for i in range(1, V):
            row = dots[i * (i - 1) // 2 :]
            for j in range(i):
                row[j] = _dot(vectors[i], vectors[j])
        dots[V * (V - 1) // 2 :] = _ZERO


@_inlined
def _dot(a, b):
    total = _ZERO
    for k in range(len(a)):
        total += a[k] * b[k]
    return total


@_compiled
def _backward(
    grad_BW, x_BD, places_BQ, sample_step, piece_step, pieces, grads, grad_x_BD, begin, end
):
    D = x_BD.shape[1]
    V = places_BQ.shape[1] * pieces.shape[1] // D + 1
    padded = -(-V // GROUP) * GROUP
    vectors, sums = _scratch(padded * PITCH), _scratch(padded * PITCH)
    pairs = np.zeros((padded, padded), np.float32)
    nothing = _ZERO  # stays so as long as all is finite, for 0 times anything else is not a number
    for b in range(begin, end):
        _ask_for_sample(places_BQ, sample_step, piece_step, pieces, min(b + AHEAD, end - 1))
        _arrange(pairs, grad_BW[b, D:], V)
        for start in range(0, D, PITCH):
            stop = min(start + PITCH, D)
            _bring(vectors, PITCH, x_BD, places_BQ, sample_step, piece_step, pieces, b, start, stop)
            _multiply(sums, pairs, vectors, V, stop - start)
            _add(sums, grad_BW[b, start:stop])  # the dense vector is also passed on as it is
            nothing += _copied_times_0(grad_x_BD[b, start:stop], sums)
            nothing += _leave(sums, places_BQ, sample_step, piece_step, grads, b, D, start, stop)
    return nothing == 0


@_inlined
def _arrange(pairs, given, V):
    """The gradients of products as a symmetric matrix."""
    for i in range(1, V):
        row = given[i * (i - 1) // 2 :]
        for j in range(i):
            pairs[i, j] = pairs[j, i] = row[j]


@_compiled
def _multiply(sums, pairs, vectors, V, count):
    """sums = pairs vectors."""
    sums[:] = _ZERO
    for i in range(V):
        for j in range(0, len(pairs), GROUP):
            group = vectors[j * PITCH : (j + GROUP) * PITCH]
            _add_products(sums[i * PITCH : (i + 1) * PITCH], pairs[i, j : j + GROUP], group, count)


@_inlined
def _add_products(sums, pairs, vectors, count):
    """Written out, as only so a sum stays in a register."""
    p0, p1, p2, p3, p4, p5, p6 = _seven(pairs, 0, 1)
    p7, p8, p9, p10, p11, p12, p13 = _seven(pairs, 7, 1)
    for k in range(count):
        v0, v1, v2, v3, v4, v5, v6 = _seven(vectors, k, PITCH)
        v7, v8, v9, v10, v11, v12, v13 = _seven(vectors, 7 * PITCH + k, PITCH)
        low = p0 * v0 + p1 * v1 + p2 * v2 + p3 * v3 + p4 * v4 + p5 * v5 + p6 * v6
        high = p7 * v7 + p8 * v8 + p9 * v9 + p10 * v10 + p11 * v11 + p12 * v12 + p13 * v13
        sums[k] += low + high


@_inlined
def _seven(values, at, step):
    a, b, c = values[at], values[at + step], values[at + 2 * step]
    d, e, f = values[at + 3 * step], values[at + 4 * step], values[at + 5 * step]
    return a, b, c, d, e, f, values[at + 6 * step]


@_inlined
def _bring(vectors, pitch, x_BD, places_BQ, sample_step, piece_step, pieces, b, start, stop):
    """Columns of the vectors of sample b, which then lie `pitch` floats apart."""
    D, U = x_BD.shape[1], pieces.shape[1]
    _copy(vectors[: stop - start], x_BD[b, start:stop])
    row, column = 1, 0
    for q in range(places_BQ.shape[1]):
        first, last = max(start, column), min(stop, column + U)
        if first < last:
            place = _place_of(places_BQ, sample_step, piece_step, b, q)
            at = row * pitch + first - start
            _copy(vectors[at : at + last - first], pieces[place, first - column : last - column])
        row, column = _next_piece(row, column, U, D)


@_inlined
def _ask_for_sample(places_BQ, sample_step, piece_step, pieces, b):
    for q in range(places_BQ.shape[1]):
        ask_for(pieces, _place_of(places_BQ, sample_step, piece_step, b, q))


@_inlined
def _leave(sums, places_BQ, sample_step, piece_step, grads, b, D, start, stop):
    """Write columns of the gradients of sample b to their places; 0 if all are finite."""
    U, nothing = grads.shape[1], _ZERO
    row, column = 1, 0
    for q in range(places_BQ.shape[1]):
        first, last = max(start, column), min(stop, column + U)
        if first < last:
            place = _place_of(places_BQ, sample_step, piece_step, b, q)
            target = grads[place, first - column : last - column]
            nothing += _copied_times_0(target, sums[row * PITCH + first - start :])
        row, column = _next_piece(row, column, U, D)
    return nothing


@_inlined
def _next_piece(row, column, U, D):
    """Where the piece behind this one belongs."""
    column += U
    return (row + 1, 0) if column == D else (row, column)


@_inlined
def _copy(target, source):
    for k in range(len(target)):
        target[k] = source[k]


@_inlined
def _copied_times_0(target, source):
    """Copy, and return the sum of 0 times each: 0 if all is finite."""
    total = _ZERO
    for k in range(len(target)):
        target[k] = source[k]
        total += _ZERO * source[k]
    return total


@_inlined
def _add(target, source):
    for k in range(len(source)):
        target[k] += source[k]


@_inlined
def _place_of(places_BQ, sample_step, piece_step, b, q):
    """Which piece is piece q of sample b."""
    return places_BQ[b, q] if len(places_BQ) else b * sample_step + q * piece_step


@_compiled
def _scratch(size):
    """Zeros that begin at a cache line: registers that lie in two of them take twice as long."""
    line = 16
    made = np.zeros(size + line, np.float32)
    first = -(made.ctypes.data // 4) % line
    return made[first : first + size]
