"""The inner loops, compiled by numba (extra `fast`). primitives.py has their twins in numpy.

A table is an array [slots, 2] of a column's number type: what belongs to a value (a count or an
id), and the value; in this order, so that two 32-bit numbers, taken for one of 64, sort by value.
Slots are a power of two; 0 is no value and marks an empty slot.

Numba makes a floating-point number of a sum of signed and unsigned 64-bit integers, hence the
casts.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

GOLDEN = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: the constant of Fibonacci hashing and of SplitMix64."""

AHEAD = 32
"""Of a value, how many places before its turn its slot is fetched: a large table lies in memory,
which takes as long to answer as the processor takes for so many values."""

_intrinsic: Any = intrinsic  # whose functions are called without their first argument
_compiled = numba.njit(nogil=True, cache=True)
_inlined = numba.njit(nogil=True, cache=True, inline="always")


def _address(context: Any, builder: Any, array: Any, kind: Any, place: Any) -> Any:
    """Of an item of an array that is one piece of memory."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [place]), ir.IntType(8).as_pointer())


@_intrinsic
def _fetch(typing_context: Any, table: Any, slot: Any) -> Any:
    """Have memory bring a slot of a table, without waiting for it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.shl(arguments[1], ir.Constant(ir.IntType(64), 1))
        to = _address(context, builder, arguments[0], signature.args[0], place)
        hints = [ir.Constant(ir.IntType(32), hint) for hint in (0, 3, 1)]  # read, keep, data
        kind = ir.FunctionType(ir.VoidType(), [to.type, *(hint.type for hint in hints)])
        builder.call(
            builder.module.declare_intrinsic("llvm.prefetch", [to.type], kind), [to, *hints]
        )
        return context.get_dummy_value()

    return types.void(table, types.uint64), generate


@_intrinsic
def _copy8(typing_context: Any, source: Any, start: Any, out: Any, place: Any) -> Any:
    """Copy 8 bytes of an array of bytes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64).as_pointer()
        ends = [
            builder.bitcast(
                _address(context, builder, arguments[n], signature.args[n], arguments[n + 1]), word
            )
            for n in (0, 2)
        ]
        builder.store(builder.load(ends[0], align=1), ends[1], align=1)
        return context.get_dummy_value()

    return types.void(source, types.int64, out, types.int64), generate


@_inlined
def _hash(value: Any, mask: Any) -> Any:
    # Fibonacci hashing: the upper half of the product depends on all bits of the value.
    return ((np.uint64(value) * np.uint64(GOLDEN)) >> np.uint64(32)) & mask


@_inlined
def _slot_of(table: Any, value: Any, mask: Any) -> Any:
    """The slot that holds `value`, or the empty one where it belongs."""
    slot = _hash(value, mask)
    while table[slot, 1] != value and table[slot, 1] != 0:
        slot = (slot + np.uint64(1)) & mask
    return slot


@_compiled
def count(table: Any, size: int, limit: int, values: Any, within: Any, one: Any, place: int) -> Any:
    """Count values, from `place` on, until the table is full.

    Args:
        table: counts.
        size: how many values it holds; `limit`: how many it may hold.
        within: the smallest and the largest value to count.
        one: 1, of the type of the values.

    Returns:
        The new size, and the place up to which `values` are counted.
    """
    low, high = within
    mask = np.uint64(len(table) - 1)
    last = len(values) - 1
    while place < len(values):
        _fetch(table, _hash(values[min(place + AHEAD, last)], mask))
        value = values[place]
        if low <= value <= high:
            slot = _slot_of(table, value, mask)
            if table[slot, 1] == 0:
                if size >= limit:
                    break
                table[slot, 1] = value
                size += 1
            table[slot, 0] += one
        place += 1
    return size, place


@_compiled
def count_known(
    table: Any, firsts: Any, size: int, limit: int, found: Any, within: Any, place: int
) -> Any:
    """Like `count`, for values that are already counted and have first appeared somewhere.

    Args:
        firsts: int64 [slots], the smallest key of each value; empty if not wanted.
        found: values, their counts (of the same type), their keys (int64; empty if not wanted).
    """
    values, counts, keys = found
    low, high = within
    mask = np.uint64(len(table) - 1)
    keyed = len(keys) > 0
    while place < len(values):
        value = values[place]
        if low <= value <= high:
            slot = _slot_of(table, value, mask)
            if table[slot, 1] == 0:
                if size >= limit:
                    break
                table[slot, 1] = value
                size += 1
                if keyed:
                    firsts[slot] = keys[place]
            elif keyed and keys[place] < firsts[slot]:
                firsts[slot] = keys[place]
            table[slot, 0] += counts[place]
        place += 1
    return size, place


@_compiled
def insert(table: Any, values: Any, seconds: Any) -> None:
    """Put pairs into the table; the values are distinct and not 0."""
    mask = np.uint64(len(table) - 1)
    last = len(values) - 1
    for place in range(len(values)):
        _fetch(table, _hash(values[min(place + AHEAD, last)], mask))
        slot = _slot_of(table, values[place], mask)
        table[slot, 1] = values[place]
        table[slot, 0] = seconds[place]


@_compiled
def move(table: Any, firsts: Any, new_table: Any, new_firsts: Any, low: Any, high: Any) -> int:
    """Put the entries from `low` to `high` into a new table; how many there are."""
    mask = np.uint64(len(new_table) - 1)
    size = 0
    last = len(table) - 1
    for old in range(len(table)):
        _fetch(new_table, _hash(table[min(old + AHEAD, last), 1], mask))
        value = table[old, 1]
        if value != 0 and low <= value <= high:
            slot = _slot_of(new_table, value, mask)
            new_table[slot, 1] = value
            new_table[slot, 0] = table[old, 0]
            if len(firsts):
                new_firsts[slot] = firsts[old]
            size += 1
    return size


@_compiled
def look_up(table: Any, values: Any, ids: Any, missing: int, unknown: int) -> None:
    """Set `ids`: to `missing` where the value is 0, to `unknown` where the table lacks it."""
    mask = np.uint64(len(table) - 1)
    last = len(values) - 1
    for place in range(len(values)):
        _fetch(table, _hash(values[min(place + AHEAD, last)], mask))
        value = values[place]
        slot = _slot_of(table, value, mask)
        found = np.int64(table[slot, 0]) if table[slot, 1] != 0 else unknown
        ids[place] = found if value != 0 else missing


@_compiled
def encode(values: Any, table: Any, codes: Any, dictionary: Any, counts: Any) -> Any:
    """Number the distinct values in order of appearance.

    Args:
        values: [rows], 0 included.
        table: uint32 [slots], zeros; at least twice as many slots as distinct values are wanted.
        codes: uint16 [rows], filled.
        dictionary, counts: filled; their length is the maximum number of distinct values.

    Returns:
        How many distinct values there are; or -1 if too many, or if so many are expected after an
        eighth of the rows: twice as many rows have never more than what they had more before.
    """
    mask = np.uint64(len(table) - 1)
    size = np.uint32(0)
    before = np.uint32(1)
    for place in range(len(values)):
        if place == len(values) // 16:
            before = max(size, before)
        elif place == len(values) // 8 and size * (size / before) ** 3 > len(dictionary):
            return -1
        value = values[place]
        slot = _hash(value, mask)
        code = table[slot]
        while code != 0 and dictionary[code - np.uint32(1)] != value:
            slot = (slot + np.uint64(1)) & mask
            code = table[slot]
        if code == 0:
            if size == len(dictionary):
                return -1
            dictionary[size] = value
            counts[size] = 0
            size += np.uint32(1)
            code = size
            table[slot] = code
        codes[place] = code - np.uint32(1)
        counts[code - np.uint32(1)] += 1
    return np.int64(size)


@_compiled
def take(source: Any, order: Any, out: Any) -> None:
    """out[i] = source[order[i]]."""
    for place in range(len(order)):
        out[place] = source[order[place]]


@_compiled
def take_rows(source: Any, order: Any, out: Any, row_bytes: int) -> None:
    """out[i, :] = source[order[i], :], of arrays as bytes, at least 8 in a row."""
    for place in range(len(order)):
        start, to = np.int64(order[place]) * row_bytes, place * row_bytes
        for byte in range(0, row_bytes - 8, 8):
            _copy8(source, start + byte, out, to + byte)
        rest = row_bytes - 8
        _copy8(source, start + rest, out, to + rest)


@_compiled
def put(source: Any, order: Any, out: Any) -> None:
    """out[order[i]] = source[i]."""
    for place in range(len(order)):
        out[order[place]] = source[place]


@_compiled
def number_in_turn(classes: Any, next_id: Any, ids: Any) -> None:
    """ids[i] = next_id[classes[i]]++."""
    for place in range(len(classes)):
        ids[place] = next_id[classes[place]]
        next_id[classes[place]] += 1


@_compiled
def join(source: Any, starts: Any, sizes: Any, out: Any) -> None:
    """Copy segments of `source` one behind the other."""
    place = 0
    for segment in range(len(starts)):
        size = sizes[segment]
        begin, to = source[starts[segment] :], out[place:]
        for row in range(size):
            to[row] = begin[row]
        place += size


@_compiled
def group(
    origin: Any, first_row: int, key_bits: int, bits: int, buckets: Any, order: Any, bounds: Any
) -> None:
    """The buckets of rows, and the rows in order of these; see shuffle.py."""
    shift = np.uint64(key_bits - bits)
    dropped = np.uint64(64 - key_bits)
    golden = np.uint64(GOLDEN)
    x = np.uint64(origin) + np.uint64(first_row) * golden
    for row in range(len(buckets)):
        x += golden
        y = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        y = (y ^ (y >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        y = (y ^ (y >> np.uint64(31))) >> dropped >> shift
        buckets[row] = y
        bounds[y + np.uint64(1)] += 1
    for bucket in range(len(bounds) - 1):
        bounds[bucket + 1] += bounds[bucket]
    ends = bounds[:-1].copy()
    for row in range(len(buckets)):
        bucket = buckets[row]
        order[ends[bucket]] = row
        ends[bucket] += 1


@_compiled
def keys_of(origin: Any, first_row: int, key_bits: int, rows: Any, keys: Any) -> None:
    """Keys of rows, which are counted from `first_row`; see shuffle.py."""
    dropped = np.uint64(64 - key_bits)
    golden = np.uint64(GOLDEN)
    start = np.uint64(origin) + (np.uint64(first_row) + np.uint64(1)) * golden
    for place in range(len(rows)):
        x = start + np.uint64(rows[place]) * golden
        y = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        y = (y ^ (y >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        keys[place] = (y ^ (y >> np.uint64(31))) >> dropped


@_compiled
def replace(values: Any, old: Any, new: Any) -> int:
    """Put `new` wherever `old` is; how often that was."""
    found = 0
    for place in range(len(values)):
        value = values[place]
        found += value == old
        values[place] = new if value == old else value
    return found


@_compiled
def count_equal(values: Any, value: int) -> int:
    """How many of `values` are `value`."""
    found = 0
    for place in range(len(values)):
        found += values[place] == value
    return found
