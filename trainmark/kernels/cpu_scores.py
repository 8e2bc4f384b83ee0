"""All of a recommender's prediction on a CPU in one pass over the samples, by numba (extra `fast`).

Dense layers, lookup, dot products and dense layers again, a block of samples after the other:
nothing but the scores is written to memory, a single sample costs one call, and threads need not
wait for each other between layers.

Weights are packed once, in panels: a few outputs of a layer side by side, their biases first. A
tile, a panel's outputs of a few samples, is summed up in registers while the panel is read once.

All that is compiled lies in this file: numba's cache looks for changes in no other.

Shapes: B samples, N numbers, F tables; M inputs and N outputs of a layer.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from trainmark.kernels.compiled import in_threads


def _has_avx512() -> bool:
    try:
        return bool(get_host_cpu_features().get("avx512f"))
    except RuntimeError:  # LLVM does not know this processor
        return False


PANEL, TILE = (32, 8) if _has_avx512() else (16, 4)
"""Outputs of a panel, two registers of them, and most samples of a tile: so that there are as many
sums as a processor adds to at a time, and registers for them."""
LINE = 64
"""Bytes of a cache line. Panels begin with one, so that no register's load takes two."""
BLOCK = 64
"""Samples that go through all layers together, at most."""
ALONE = 1 << 22
"""Products that one thread has done sooner than several share them."""
SHARE = 2 * BLOCK
"""Samples that a thread takes at a time, so that one which is held up does fewer; of fewer samples
all threads have an equal share."""
_ZERO, _NO_FLOOR = np.float32(0), np.float32(-np.inf)

_options: Any = {
    "nogil": True,
    "cache": True,
    "fastmath": {"reassoc", "nsz", "contract"},
    "error_model": "numpy",
}
_compiled = numba.njit(**_options)
_inlined = numba.njit(**_options, forceinline=True)

Layer = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Weight [outputs, inputs] and bias."""


@dataclass(frozen=True)
class Layers:
    """Dense layers, one behind the other in one array."""

    widths: NDArray[np.int64]
    """Inputs of the first, then the outputs of each."""
    numbers: NDArray[np.float32]
    """Of each, panels [N / PANEL, 1 + M, PANEL], the bias first; zeros fill the last one up."""
    products: int
    """Of a sample."""
    scratch: int
    """Numbers in a row that `_through` works in: the widest layer, and a cache line more. Without
    it the rows of a tile, powers of 2 apart, would drive each other out of the cache."""


def pack_layers(layers: Sequence[Layer], inputs: int) -> Layers:
    """Layers as the kernel reads them. The first may be wider than its inputs: zeros fill up."""
    widths, numbers = [inputs], [np.empty(0, np.float32)]
    for weight, bias in layers:
        M, N = widths[-1], len(bias)
        both = np.zeros((1 + M, -(-N // PANEL) * PANEL), np.float32)
        both[0, :N], both[1:, :N] = bias, weight[:, :M].T
        numbers.append(both.reshape(1 + M, -1, PANEL).transpose(1, 0, 2).ravel())
        widths.append(N)
    products = sum(a * b for a, b in itertools.pairwise(widths))
    scratch = -(-max(widths) // PANEL) * PANEL + 16
    return Layers(np.array(widths), _aligned(np.concatenate(numbers)), products, scratch)


def _aligned(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """A copy that begins with a cache line."""
    room = np.empty(numbers.nbytes + LINE, np.uint8)
    begin = -room.ctypes.data % LINE
    copied: NDArray[np.float32] = room[begin : begin + numbers.nbytes].view(np.float32)
    copied[:] = numbers
    return copied


@dataclass(frozen=True)
class TablePlaces:
    """Where tables of fp32 rows lie. They are not copied, and must stay where they are."""

    tables: Sequence[NDArray[np.float32]]
    addresses: NDArray[np.int64]
    rows: NDArray[np.int64]


def find_tables(tables: Sequence[NDArray[np.float32]]) -> TablePlaces:
    if not all(t.flags.c_contiguous and t.dtype == np.float32 for t in tables):
        raise ValueError("expected contiguous fp32 tables")
    addresses = np.array([table.ctypes.data for table in tables], np.int64)
    return TablePlaces(tables, addresses, np.array([len(t) for t in tables], np.int64))


def scores(
    numbers_BN: NDArray[np.float32],
    ids_BF: NDArray[np.int64],
    tables: TablePlaces,
    dim: int,
    before: Layers,
    after: Layers,
    *,
    relu_before: bool = True,
    with_inputs: bool = False,
) -> NDArray[np.float32]:
    """[B]: what the layers behind the interaction give, the last of which has one output.

    Args:
        relu_before: the layers before the interaction end with a ReLU.
        with_inputs: those layers also read the rows and the numbers, behind the products.

    Raises:
        IndexError: an id that its table has no row for.
    """
    B, F = ids_BF.shape
    if len(tables.tables) != F:
        raise ValueError(f"ids of {F} features for {len(tables.tables)} tables")
    out_B = np.empty(B, np.float32)
    given = np.ascontiguousarray(numbers_BN, np.float32), np.ascontiguousarray(ids_BF, np.int64)
    layers = (before.widths, before.numbers, relu_before, after.widths, after.numbers)
    width = max(before.scratch, after.scratch)
    arguments = (*given, tables.addresses, tables.rows, dim, *layers, width, with_inputs, out_B)
    products = B * (before.products + F * (F + 1) // 2 * dim + after.products)
    tiles = -(-B // TILE)
    if products <= ALONE:
        bad = [_scores(*arguments, 0, tiles)]
    else:
        bad = in_threads(_scores, tiles, *arguments, ranges=B // SHARE)
    if (first := min(bad)) < B * F:
        row, feature = divmod(int(first), F)
        raise IndexError(f"row {row}: table {feature} has no row {ids_BF[row, feature]}")
    return out_B


# --- kernels


@_compiled
def _scores(
    numbers_BN, ids_BF, addresses, rows, dim, widths, layers, relu_before, widths_after,
    layers_after, width, with_inputs, out_B, begin, end,
):  # fmt: skip
    """Of tiles of samples: the place of the first id without a row; behind the last if all have."""
    F = ids_BF.shape[1]
    joined = dim + F * (F + 1) // 2
    vectors = np.zeros((F + 1, dim), np.float32)
    scratch = np.empty((2, min(BLOCK, (end - begin) * TILE), width), np.float32)
    last = min(end * TILE, len(out_B))
    for block in range(begin * TILE, last, BLOCK):
        samples = min(BLOCK, last - block)
        for b in range(samples):
            _copy(scratch[0, b, : widths[0]], numbers_BN[block + b])
        x = _through(scratch, 0, samples, widths, layers, relu_before)
        for b in range(samples):
            row = scratch[x, b]
            _copy(vectors[0], row)
            for f in range(F):
                place = ids_BF[block + b, f]
                if place < 0 or place >= rows[f]:
                    return (block + b) * F + f
                at = addresses[f] + place * dim * 4
                _copy(vectors[f + 1], numba.carray(_pointer(at), (dim,), np.float32))
            _interact(row[dim:], vectors)
            used = joined
            if with_inputs:
                for f in range(F):
                    _copy(row[used : used + dim], vectors[f + 1])
                    used += dim
                _copy(row[used : used + numbers_BN.shape[1]], numbers_BN[block + b])
                used += numbers_BN.shape[1]
            row[used : widths_after[0]] = _ZERO
        x = _through(scratch, x, samples, widths_after, layers_after, False)
        for b in range(samples):
            out_B[block + b] = scratch[x, b, 0]
    return ids_BF.size


@_inlined
def _interact(dots, vectors):
    for i in range(1, len(vectors)):
        row = dots[i * (i - 1) // 2 :]
        for j in range(i):
            row[j] = _dot(vectors[i], vectors[j])


@_compiled
def _through(scratch, x, samples, widths, layers, last_relu):
    """Where in `scratch` [2, samples, numbers], 0 or 1, lies what layers make of `scratch[x]`.

    It has room for whole tiles of samples.
    """
    at = 0
    last = len(widths) - 2
    for layer in range(last + 1):
        M, N = widths[layer], widths[layer + 1]
        end = at + (N + PANEL - 1) // PANEL * (1 + M) * PANEL
        floor = _ZERO if last_relu or layer < last else _NO_FLOOR
        _layer(scratch[x], scratch[1 - x], samples, layers[at:end], M, floor)
        x, at = 1 - x, end
    return x


@_compiled
def _layer(x, y, samples, panels, M, floor):
    stride = x.strides[0]
    from_panel, to = panels.ctypes.data, y.ctypes.data
    for _ in range(panels.size // ((1 + M) * PANEL)):
        sample = 0
        while sample < samples:  # the last ones may be fewer than the tile they are in
            left = samples - sample
            from_x, to_y = x.ctypes.data + sample * stride, to + sample * stride
            if left > 4 and TILE == 8:
                sample += _tile(8, from_x, stride, from_panel, M, to_y, floor)
            elif left > 2:
                sample += _tile(4, from_x, stride, from_panel, M, to_y, floor)
            elif left > 1:
                sample += _tile(2, from_x, stride, from_panel, M, to_y, floor)
            else:
                sample += _tile(1, from_x, stride, from_panel, M, to_y, floor)
        from_panel += (1 + M) * PANEL * 4
        to += PANEL * 4


@_inlined
def _dot(a, b):
    total = _ZERO
    for k in range(len(a)):
        total += a[k] * b[k]
    return total


@_inlined
def _copy(target, source):
    for k in range(len(target)):
        target[k] = source[k]


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    """An address as a pointer."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), build


@intrinsic(prefer_literal=True)
def _tile(
    typing_context: Any, rows: Any, x: Any, stride: Any, panel: Any, M: Any, y: Any, floor: Any
) -> Any:
    """A panel of as many samples, and no number below `floor`; returns how many samples these were.

    `x`, `panel` and `y` are addresses, `stride` the bytes from a sample to the next.
    """
    signature = types.int64(rows, *(types.int64,) * 5, types.float32)
    return signature, partial(_build_tile, rows.literal_value)


def _build_tile(rows: int, context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """In LLVM's words, for a compiler keeps sums in registers only if they are variables."""
    _, x, stride, panel, M, y, floor = arguments
    vector, integer = ir.VectorType(ir.FloatType(), PANEL), ir.IntType(64)
    fused = {"flags": ["contract"]}

    def place(base: Any, steps: Any, size: Any) -> Any:
        return builder.add(base, builder.mul(steps, size))

    def load(address: Any, kind: Any) -> Any:
        return builder.load(builder.inttoptr(address, kind.as_pointer()), align=4)

    def in_all(value: Any) -> Any:
        """A vector of one number."""
        empty = ir.Constant(vector, ir.Undefined)
        first = builder.insert_element(empty, value, integer(0))
        places = ir.Constant(ir.VectorType(ir.IntType(32), PANEL), [0] * PANEL)
        return builder.shuffle_vector(first, empty, places)

    x_rows = [place(x, integer(r), stride) for r in range(rows)]
    bias = load(panel, vector)
    before, loop, after = builder.block, *(builder.append_basic_block() for _ in range(2))
    builder.cbranch(builder.icmp_signed(">", M, integer(0)), loop, after)

    builder.position_at_end(loop)
    m, sums = builder.phi(integer), [builder.phi(vector) for _ in x_rows]
    next_m = builder.add(m, integer(1))
    weights = load(place(panel, next_m, integer(PANEL * 4)), vector)
    inputs = [in_all(load(place(row, m, integer(4)), ir.FloatType())) for row in x_rows]
    next_sums = [
        builder.fadd(total, builder.fmul(value, weights, **fused), **fused)
        for total, value in zip(sums, inputs, strict=True)
    ]
    builder.cbranch(builder.icmp_signed("<", next_m, M), loop, after)

    builder.position_at_end(after)
    found = [builder.phi(vector) for _ in x_rows]
    begun, gone_on = [integer(0), *[bias] * 2 * rows], [next_m, *next_sums, *next_sums]
    for phi, first, later in zip([m, *sums, *found], begun, gone_on, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(later, loop)
    floors = in_all(floor)
    for r, total in enumerate(found):
        is_below = builder.fcmp_ordered("<", total, floors)  # which a NaN is not
        to = builder.inttoptr(place(y, integer(r), stride), vector.as_pointer())
        builder.store(builder.select(is_below, floors, total), to, align=4)
    return integer(rows)
