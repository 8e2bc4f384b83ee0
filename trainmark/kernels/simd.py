"""Vectors of 16 floats for CPU kernels, compiled by numba (extra `fast`).

Written as loops over floats, the interaction takes three times as long: LLVM cannot keep a tile of
sums in registers, and adds up each of them by itself. So kernels here say what lies in a register:

    sums = fma(load(a, place), splat(factor), sums)

A place is an index into a flat array. Machines with narrower registers use several for a vector.

Numba's cache notices a change of a kernel's own file only: after one here, remove `__pycache__`.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

LANES = 16
ALIGNMENT = 4 * LANES
"""Bytes; also those of a cache line on most machines. PyTorch's tensors begin at a multiple."""

_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_INT32 = ir.IntType(32)


class _VectorType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="float32x16")


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)


vector = _VectorType()


def _address(context: Any, builder: Any, kind: Any, array_type: Any, array: Any, place: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [place]), kind.as_pointer())


@intrinsic
def load(typing_context: Any, array: Any, place: Any) -> Any:
    """The floats from `place` on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _address(context, builder, _VECTOR, signature.args[0], *arguments)
        return builder.load(address, align=4)

    return vector(array, types.int64), generate


@intrinsic
def store(typing_context: Any, array: Any, place: Any, value: Any) -> Any:
    """Write a vector to `place` and behind it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, at, stored = arguments
        address = _address(context, builder, _VECTOR, signature.args[0], target, at)
        builder.store(stored, address, align=4)
        return context.get_dummy_value()

    return types.void(array, types.int64, vector), generate


@intrinsic
def store_square(typing_context: Any, array: Any, place: Any, width: Any, value: Any) -> Any:
    """Write a vector as 4 rows of 4 floats: to `place`, to `place + width`, and so on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, at, step, stored = arguments
        side = 4
        for row in range(side):
            lanes = list(range(row * side, (row + 1) * side))
            mask = ir.Constant(ir.VectorType(_INT32, side), lanes)
            quarter = builder.shuffle_vector(stored, stored, mask)
            address = _address(context, builder, quarter.type, signature.args[0], target, at)
            builder.store(quarter, address, align=4)
            at = builder.add(at, step)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64, vector), generate


@intrinsic
def stream(typing_context: Any, array: Any, place: Any, value: Any) -> Any:
    """Write a vector past the caches: for what is not read again soon. `place` is aligned."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, at, stored = arguments
        address = _address(context, builder, _VECTOR, signature.args[0], target, at)
        written = builder.store(stored, address, align=ALIGNMENT)
        written.set_metadata("nontemporal", builder.module.add_metadata([_INT32(1)]))
        return context.get_dummy_value()

    return types.void(array, types.int64, vector), generate


@intrinsic
def get(typing_context: Any, array: Any, place: Any) -> Any:
    """One float. Numba's own indexing looks whether a place is negative, each time."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_address(context, builder, _FLOAT, signature.args[0], *arguments))

    return types.float32(array, types.int64), generate


@intrinsic
def put(typing_context: Any, array: Any, place: Any, value: Any) -> Any:
    """Write one float."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, at, stored = arguments
        builder.store(stored, _address(context, builder, _FLOAT, signature.args[0], target, at))
        return context.get_dummy_value()

    return types.void(array, types.int64, types.float32), generate


@intrinsic
def prefetch(typing_context: Any, array: Any, place: Any) -> Any:
    """Ask for the cache line of `place`, without waiting for it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte = ir.IntType(8)
        address = _address(context, builder, byte, signature.args[0], *arguments)
        kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), _INT32, _INT32, _INT32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        read, keep, data = _INT32(0), _INT32(3), _INT32(1)
        builder.call(function, [address, read, keep, data])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@intrinsic
def splat(typing_context: Any, value: Any) -> Any:
    """A vector of equal floats."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _splat(builder, arguments[0])

    return vector(types.float32), generate


def _splat(builder: Any, value: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, value, _INT32(0))
    everywhere = ir.Constant(ir.VectorType(_INT32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, undefined, everywhere)


@intrinsic
def fma(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c, rounded once where the machine can."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        name = f"llvm.fmuladd.v{LANES}f32"
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)

    return vector(vector, vector, vector), generate


@intrinsic
def multiply(typing_context: Any, a: Any, b: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fmul(*arguments)

    return vector(vector, vector), generate


@intrinsic
def add(typing_context: Any, a: Any, b: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fadd(*arguments)

    return vector(vector, vector), generate


@intrinsic
def where_positive(typing_context: Any, tested: Any, value: Any) -> Any:
    """The lanes of `value` where those of `tested` are positive, else 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        tested, value = arguments
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        return builder.select(builder.fcmp_ordered(">", tested, zero), value, zero)

    return vector(vector, vector), generate


@intrinsic
def sum_of_lanes(typing_context: Any, value: Any) -> Any:
    """Of one vector, pairwise."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_FLOAT, [_FLOAT, _VECTOR])
        name = f"llvm.vector.reduce.fadd.v{LANES}f32"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(function, [_FLOAT(0.0), *arguments], fastmath=("reassoc",))

    return types.float32(vector), generate


@intrinsic
def sums_of_lanes(typing_context: Any, vectors: Any) -> Any:
    """The sum over the lanes of each of 16 vectors, as one vector: a tree of pairwise sums."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vectors = cgutils.unpack_tuple(builder, arguments[0], LANES)
        while len(vectors) > 1:
            width = len(vectors)  # partial sums that of each one that a vector still holds
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [_halved(builder, a, b, width) for a, b in pairs]
        return vectors[0]

    return vector(types.UniTuple(vector, LANES)), generate


def _halved(builder: Any, a: Any, b: Any, width: int) -> Any:
    """Of each run of `width` lanes, those of a and then those of b: add up the two halves."""
    lanes = range(2 * LANES)
    halves = [[k for k in lanes if (k % width < width // 2) == low] for low in (True, False)]
    low, high = (
        builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_INT32, LANES), half))
        for half in halves
    )
    return builder.fadd(low, high)


# --- what kernels share


@numba.njit(nogil=True, cache=True, forceinline=True)
def copy(target, at, source, begin, count):
    """target[at + i] = source[begin + i] for `count` floats."""
    whole = count // LANES * LANES
    for k in range(0, whole, LANES):
        store(target, at + k, load(source, begin + k))
    for k in range(whole, count):
        put(target, at + k, get(source, begin + k))


@numba.njit(nogil=True, cache=True, forceinline=True)
def ask_for(array, begin, count):
    """`prefetch` of `count` floats; there may be fewer."""
    for k in range(0, count, LANES):
        prefetch(array, begin + k)


@numba.njit(nogil=True, cache=True)
def scratch(size):
    """Zeros that begin at a cache line: a vector that lies in two of them takes twice as long."""
    made = np.zeros(size + LANES, np.float32)
    first = -(made.ctypes.data // 4) % LANES
    return made[first : first + size]
