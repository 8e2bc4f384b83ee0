"""All of a recommender's prediction on a CPU in one pass over the samples, by numba (extra `fast`).

Dense layers, lookup, dot products and dense layers again, a block of samples after the other:
nothing but the scores is written to memory, a single sample costs one call, and threads need not
wait for each other between layers. Only a few samples through wide layers, which are one thread's
tile and much work, are shared layer by layer.

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
import torch
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from trainmark.kernels.compiled import in_threads, offer


def _has_avx512() -> bool:
    try:
        return bool(get_host_cpu_features().get("avx512f"))
    except RuntimeError:  # LLVM does not know this processor
        return False


PANEL, TILE = (32, 8) if _has_avx512() else (16, 4)
"""Outputs of a panel, two registers of them, and most samples of a tile: so that there are as many
sums as a processor adds to at a time, and registers for them."""
BLOCK = 64
"""Samples that go through all layers together, at most."""
ALONE = 1 << 22
"""Products, and weights that are read for them, which one thread has done sooner than two share
them: a tenth of a millisecond of work."""
SHARE = 2 * BLOCK
"""Samples that a thread takes at a time, so that one which is held up does fewer; of fewer samples
all threads have an equal share."""
TAKEN, DONE, LEFT, COUNTS = 0, 8, 16, 24
"""Places of counts, and of all: each has a cache line, which threads would take from each other."""
_ZERO, _NO_FLOOR = np.float32(0), np.float32(-np.inf)

_options: Any = {
    "nogil": True,
    "cache": True,
    "fastmath": {"reassoc", "nsz", "contract"},
    "error_model": "numpy",
}
_compiled = numba.njit(**_options)
_inlined = numba.njit(**_options, forceinline=True)

_sched_yield = types.ExternalFunction("sched_yield", types.int32())

Layer = tuple[Tensor, Tensor]
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
        both[0, :N], both[1:, :N] = bias.detach().numpy(), weight.detach().numpy()[:, :M].T
        numbers.append(both.reshape(1 + M, -1, PANEL).transpose(1, 0, 2).ravel())
        widths.append(N)
    products = sum(a * b for a, b in itertools.pairwise(widths))
    scratch = -(-max(widths) // PANEL) * PANEL + 16
    return Layers(np.array(widths), np.concatenate(numbers), products, scratch)


@dataclass(frozen=True)
class TablePlaces:
    """Where tables of fp32 rows lie. They are not copied, and must stay where they are."""

    tables: Sequence[Tensor]
    addresses: NDArray[np.int64]
    rows: NDArray[np.int64]


def find_tables(tables: Sequence[Tensor]) -> TablePlaces:
    if not all(t.is_contiguous() and t.dtype == torch.float32 and t.is_cpu for t in tables):
        raise ValueError("expected contiguous fp32 tables in host memory")
    addresses = np.array([table.data_ptr() for table in tables], np.int64)
    return TablePlaces(tables, addresses, np.array([len(t) for t in tables], np.int64))


def scores(
    numbers_BN: NDArray[np.float32],
    ids_BF: NDArray[np.int64],
    tables: TablePlaces,
    dim: int,
    before: Layers,
    after: Layers,
    *,
    with_inputs: bool = False,
) -> NDArray[np.float32]:
    """[B]: what the layers behind the interaction give, the last of which has one output.

    Args:
        with_inputs: those layers also read the rows and the numbers, behind the products.

    Raises:
        IndexError: an id that its table has no row for.
    """
    B, F = ids_BF.shape
    out_B = np.empty(B, np.float32)
    given = np.ascontiguousarray(numbers_BN, np.float32), np.ascontiguousarray(ids_BF, np.int64)
    layers = (before.widths, before.numbers, after.widths, after.numbers)
    width = max(before.scratch, after.scratch)
    arguments = (*given, tables.addresses, dim, *layers, with_inputs, out_B)
    weights = before.products + after.products
    work = weights + B * (weights + F * (F + 1) // 2 * dim)
    tiles = -(-B // TILE)
    if work <= ALONE:
        bad = [_scores(*arguments, tables.rows, width, 0, tiles)]
    elif tiles > 1:
        bad = in_threads(_scores, tiles, *arguments, tables.rows, width, ranges=B // SHARE)
    else:
        bad = [_bad_id(given[1], tables.rows, 0, B)]
        if bad[0] == B * F:
            _together(*arguments, np.empty((2, TILE, width), np.float32), helpers=work // ALONE)
    if (first := min(bad)) < B * F:
        row, feature = divmod(int(first), F)
        raise IndexError(f"row {row}: table {feature} has no row {ids_BF[row, feature]}")
    return out_B


def _together(*arguments: Any, helpers: int) -> None:
    """A tile of samples by several threads, which share the outputs of each layer."""
    counts = np.zeros(COUNTS, np.int64)
    offered = offer(_block, *arguments, counts, False, helpers=helpers)
    _block(*arguments, counts, True)
    counts[LEFT] = 1
    for call in offered:
        call.cancel()


# --- kernels


@_compiled
def _scores(
    numbers_BN, ids_BF, addresses, dim, widths, layers, widths_after, layers_after, with_inputs,
    out_B, rows, width, begin, end,
):  # fmt: skip
    """Of tiles of samples: the place of the first id without a row; behind the last if all have."""
    last = min(end * TILE, len(out_B))
    bad = _bad_id(ids_BF, rows, begin * TILE, last)
    if bad < ids_BF.size:
        return bad
    scratch = np.empty((2, min(BLOCK, (end - begin) * TILE), width), np.float32)
    counts = np.empty(COUNTS, np.int64)
    for block in range(begin * TILE, last, BLOCK):
        some = slice(block, min(block + BLOCK, last))
        counts[:] = 0
        _block(
            numbers_BN[some], ids_BF[some], addresses, dim, widths, layers, widths_after,
            layers_after, with_inputs, out_B[some], scratch, counts, True,
        )  # fmt: skip
    return bad


@_compiled
def _bad_id(ids_BF, rows, begin, end):
    F = len(rows)
    for b in range(begin, end):
        for f in range(F):
            if ids_BF[b, f] < 0 or ids_BF[b, f] >= rows[f]:
                return b * F + f
    return ids_BF.size


@_compiled
def _block(
    numbers_BN, ids_BF, addresses, dim, widths, layers, widths_after, layers_after, with_inputs,
    out_B, scratch, counts, is_caller,
):  # fmt: skip
    """A block of samples, by any number of threads at a time; it is done when the caller's returns.

    Work is in tasks, numbered through all layers: a panel, or what a sample's rows make. A thread
    takes the next number, waits until the tasks of earlier layers are done, and does its own. So
    one that comes late, or never, holds up nobody; and whoever does a task, its sums are the same.
    """
    B, F = ids_BF.shape
    task = _add(counts, TAKEN)
    if task == 0:
        for b in range(B):
            _copy(scratch[0, b, : widths[0]], numbers_BN[b])
        task = _next(counts)
    task, first, x = _through(scratch, 0, B, widths, layers, True, counts, task, 1)
    if task < first + B:
        _wait(counts, first)
        vectors = np.empty((F + 1, dim), np.float32)
        while task < first + B:
            b = task - first
            used = _join(scratch[x, b], vectors, numbers_BN[b], ids_BF[b], addresses, with_inputs)
            scratch[x, b, used : widths_after[0]] = _ZERO
            task = _next(counts)
    first += B
    _, first, x = _through(scratch, x, B, widths_after, layers_after, False, counts, task, first)
    if is_caller:
        _wait(counts, first)
        for b in range(B):
            out_B[b] = scratch[x, b, 0]
    else:
        # The caller goes first: it would wait for Python's lock, which this thread asks for, too.
        patience = 30_000
        while patience > 0 and _read(counts, LEFT) == 0:
            patience -= 1


@_inlined
def _join(row, vectors, numbers, ids, addresses, with_inputs):
    """Append to a sample's vector what the layers after it read; returns how long it is then."""
    F, dim = len(ids), vectors.shape[1]
    _copy(vectors[0], row)
    for f in range(F):
        at = addresses[f] + ids[f] * dim * 4
        _copy(vectors[f + 1], numba.carray(_pointer(at), (dim,), np.float32))
    _interact(row[dim:], vectors)
    used = dim + F * (F + 1) // 2
    if with_inputs:
        for f in range(F):
            _copy(row[used : used + dim], vectors[f + 1])
            used += dim
        _copy(row[used : used + len(numbers)], numbers)
        used += len(numbers)
    return used


@_inlined
def _interact(dots, vectors):
    for i in range(1, len(vectors)):
        row = dots[i * (i - 1) // 2 :]
        for j in range(i):
            row[j] = _dot(vectors[i], vectors[j])


@_compiled
def _through(scratch, x, samples, widths, layers, last_relu, counts, task, first):
    """Do a thread's tasks of layers: `task` is its next, `first` the first of all.

    Returns what these are behind the layers, and where in `scratch` [2, samples, numbers], 0 or 1,
    lies what the layers make of `scratch[x]`. It has room for whole tiles of samples.
    """
    at = 0
    last = len(widths) - 2
    for layer in range(last + 1):
        M, N = widths[layer], widths[layer + 1]
        panels, size = (N + PANEL - 1) // PANEL, (1 + M) * PANEL
        if task < first + panels:
            _wait(counts, first)
            floor = _ZERO if last_relu or layer < last else _NO_FLOOR
            while task < first + panels:
                begin = at + (task - first) * size
                y = scratch[1 - x, :, (task - first) * PANEL :]
                _panel(scratch[x], y, samples, layers[begin : begin + size], M, floor)
                task = _next(counts)
        x, at, first = 1 - x, at + panels * size, first + panels
    return task, first, x


@_inlined
def _panel(x, y, samples, panel, M, floor):
    stride = x.strides[0]
    from_panel = panel.ctypes.data
    sample = 0
    while sample < samples:  # the last ones may be fewer than the tile they are in
        left = samples - sample
        from_x, to_y = x.ctypes.data + sample * stride, y.ctypes.data + sample * stride
        if left > 4 and TILE == 8:
            sample += _tile(8, from_x, stride, from_panel, M, to_y, floor)
        elif left > 2:
            sample += _tile(4, from_x, stride, from_panel, M, to_y, floor)
        elif left > 1:
            sample += _tile(2, from_x, stride, from_panel, M, to_y, floor)
        else:
            sample += _tile(1, from_x, stride, from_panel, M, to_y, floor)


@_inlined
def _next(counts):
    """Say that a task is done, and take another."""
    _add(counts, DONE)
    return _add(counts, TAKEN)


@_inlined
def _wait(counts, tasks):
    """Until so many are done: microseconds, unless who does them has lost its core."""
    tries = 0
    while _read(counts, DONE) < tasks:
        tries += 1
        if tries > 1000:
            _sched_yield()


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


@intrinsic
def _add(typing_context: Any, counts: Any, place: Any) -> Any:
    """Count one more; returns how many were before. Who reads it sees all that was written then."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at = _address(context, builder, signature, arguments)
        return builder.atomic_rmw("add", at, ir.IntType(64)(1), "acq_rel")

    return types.int64(counts, types.int64), build


@intrinsic
def _read(typing_context: Any, counts: Any, place: Any) -> Any:
    """A count that other threads add to."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at = _address(context, builder, signature, arguments)
        return builder.load_atomic(at, "acquire", 8)

    return types.int64(counts, types.int64), build


def _address(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.gep(array.data, [arguments[1]])


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
