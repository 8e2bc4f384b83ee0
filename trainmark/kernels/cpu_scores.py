"""All of a recommender's prediction on a CPU in one pass over the samples, by numba (extra `fast`).

Dense layers, lookup, dot products and dense layers again, sample by sample: nothing but the scores
is written to memory, and a single sample costs one call. Matrices of large layers are worth reading
for many samples at a time; that is what GEMMs are for, between which the kernel then only looks up
and interacts.

Shapes: B samples, N numbers, F tables, D width of a row, V = F + 1 vectors, W width of what the
last layers read, I of the inputs that they read beside the dot products.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from trainmark.kernels.compiled import in_threads

ALONE = 1 << 22
"""Products that one thread has done sooner than several share them."""
_ZERO = np.float32(0)
_options: Any = {
    "nogil": True,
    "cache": True,
    "fastmath": {"reassoc", "nsz", "contract"},
    "error_model": "numpy",
}
_compiled = numba.njit(**_options)
_inlined = numba.njit(**_options, forceinline=True)

Layer = tuple[Tensor, Tensor]
"""Weight [outputs, inputs] and bias."""


@dataclass(frozen=True)
class Layers:
    """Dense layers, one behind the other in one array: of each, weight [inputs, outputs], bias."""

    widths: NDArray[np.int64]
    """Inputs of the first, then the outputs of each."""
    numbers: NDArray[np.float32]
    products: int
    """Of a sample."""


def pack_layers(layers: Sequence[Layer], inputs: int) -> Layers:
    """Layers as the kernel reads them. The first may be wider than its inputs: zeros fill up."""
    widths, numbers = [inputs], [np.empty(0, np.float32)]
    for weight, bias in layers:
        used = weight.detach()[:, : widths[-1]]
        numbers += [used.t().contiguous().numpy().ravel(), bias.detach().numpy()]
        widths.append(len(bias))
    products = sum(a * b for a, b in itertools.pairwise(widths))
    return Layers(np.array(widths), np.concatenate(numbers).astype(np.float32), products)


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
    beside_BI: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """[B, W]: what the layers behind the interaction give; what they would read, if there are none.

    Args:
        beside_BI: numbers that the layers behind the interaction read, and before them the rows.

    Raises:
        IndexError: an id that its table has no row for.
    """
    B, F = ids_BF.shape
    width = int(after.widths[-1])
    out_BW = np.empty((B, width), np.float32)
    given = np.ascontiguousarray(numbers_BN, np.float32), np.ascontiguousarray(ids_BF, np.int64)
    layers = (before.widths, before.numbers, after.widths, after.numbers)
    nothing = np.empty((0, 0), np.float32)
    beside = nothing if beside_BI is None else np.ascontiguousarray(beside_BI, np.float32)
    arguments = (*given, tables.addresses, tables.rows, dim, *layers, beside, out_BW)
    products = B * (before.products + F * (F + 1) // 2 * dim + after.products)
    bad = [_scores(*arguments, 0, B)] if products <= ALONE else in_threads(_scores, B, *arguments)
    if (first := min(bad)) < B * F:
        row, feature = divmod(int(first), F)
        raise IndexError(f"row {row}: table {feature} has no row {ids_BF[row, feature]}")
    return out_BW


# --- kernels


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    """An address as a pointer."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), build


@_compiled
def _scores(
    numbers_BN, ids_BF, addresses, rows, dim, widths, layers, widths_after, layers_after, beside_BI,
    out_BW, begin, end,
):  # fmt: skip
    """The place of the first id without a row; that behind the last id if there is none."""
    F = ids_BF.shape[1]
    V = F + 1
    read = widths_after[0]
    vectors = np.zeros((V, dim), np.float32)
    joined = np.zeros(read, np.float32)
    most = max(widths.max(), widths_after.max())
    first, second = np.zeros(most, np.float32), np.zeros(most, np.float32)
    for b in range(begin, end):
        _copy(vectors[0], _through(numbers_BN[b], widths, layers, first, second, True))
        for f in range(F):
            row = ids_BF[b, f]
            if row < 0 or row >= rows[f]:
                return b * F + f
            at = addresses[f] + row * dim * 4
            _copy(vectors[f + 1], numba.carray(_pointer(at), (dim,), np.float32))
        _copy(joined[:dim], vectors[0])
        _interact(joined[dim:], vectors)
        if len(beside_BI):
            at_row = dim + V * F // 2
            for f in range(F):
                _copy(joined[at_row + f * dim : at_row + (f + 1) * dim], vectors[f + 1])
            at_number = at_row + F * dim
            _copy(joined[at_number : at_number + beside_BI.shape[1]], beside_BI[b])
        _copy(out_BW[b], _through(joined, widths_after, layers_after, first, second, False))
    return ids_BF.size


@_inlined
def _interact(dots, vectors):
    for i in range(1, len(vectors)):
        row = dots[i * (i - 1) // 2 :]
        for j in range(i):
            row[j] = _dot(vectors[i], vectors[j])


@_compiled
def _through(x, widths, layers, first, second, last_relu):
    """What layers make of a vector: it lies in `first`, `second` or where it was."""
    at = 0
    for layer in range(len(widths) - 1):
        M, N = widths[layer], widths[layer + 1]
        y = first[:N] if layer % 2 == 0 else second[:N]
        bias = layers[at + M * N : at + M * N + N]
        if N == 1:
            y[0] = bias[0] + _dot(layers[at : at + M], x)
        else:
            _copy(y, bias)
            for m in range(M):
                _add(y, layers[at + m * N : at + (m + 1) * N], x[m])
        if last_relu or layer < len(widths) - 2:
            for n in range(N):
                y[n] = max(y[n], _ZERO)
        x = y
        at += M * N + N
    return x


@_inlined
def _dot(a, b):
    total = _ZERO
    for k in range(len(a)):
        total += a[k] * b[k]
    return total


@_inlined
def _add(target, source, scale):
    for k in range(len(target)):
        target[k] += scale * source[k]


@_inlined
def _copy(target, source):
    for k in range(len(target)):
        target[k] = source[k]
