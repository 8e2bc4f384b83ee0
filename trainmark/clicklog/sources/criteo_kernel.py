"""The compiled parser of Criteo's text (extra `fast`).

It accepts exactly what criteo_format.py describes. A line that breaks a rule is not explained here:
its place is noted, and the slow parser looks at it again.

Lines are split into fields one by one, which is all that has to be done so; what each field says is
found for 64 lines at a time, in loops without a decision, of which the compiler makes instructions
for several fields at once.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from trainmark.clicklog.sources.criteo_format import NUM_CATEGORICAL, NUM_NUMERICAL

TAB, NEWLINE, RETURN, MINUS, ZERO = 9, 10, 13, 45, 48
ABSENT = -(1 << 63)  # instead of an integer, of which none here has so many digits
LARGEST = (1 << 63) - 1
AT_A_TIME = 64  # lines: the processor's first cache holds their fields
_EACH_BYTE = 0x0101010101010101
_ZEROS = ZERO * _EACH_BYTE
_PAIRS, _FOURS = 0x00FF00FF00FF00FF, 0x0000FFFF0000FFFF

_intrinsic: Any = intrinsic  # whose functions are called without their first argument
_compiled = numba.njit(nogil=True, cache=True)
_inlined = numba.njit(nogil=True, cache=True, inline="always")


# --- eight bytes at a time, as one number, the first byte lowest


@_intrinsic
def _load8(typing_context: Any, text: Any, place: Any) -> Any:
    """The 8 bytes from `place` on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = builder.gep(array.data, [arguments[1]])
        kind = context.get_value_type(types.uint64)
        wide = builder.bitcast(pointer, kind.as_pointer())
        return builder.load(wide, align=1)

    return types.uint64(text, types.int64), generate


@_intrinsic
def _first_byte(typing_context: Any, marks: Any) -> Any:
    """Which byte is the first that is not 0; there has to be one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))
        return builder.lshr(bits, ir.Constant(bits.type, 3))

    return types.int64(types.uint64), generate


@_inlined
def _marks(eight: np.uint64, byte: int) -> Any:
    """A number whose first byte that is not 0 is where the first `byte` is; 0: there is none."""
    others = eight ^ np.uint64(byte * _EACH_BYTE)
    return (others - np.uint64(_EACH_BYTE)) & ~others & np.uint64(0x80 * _EACH_BYTE)


@_inlined
def _with_zeros(eight: np.uint64, width: int) -> Any:
    """The first bytes, 7 at most, behind as many digits 0 as make them eight."""
    bits = np.uint64(width) << np.uint64(3)
    return ((eight << np.uint64(8)) << (np.uint64(56) - bits)) | (np.uint64(_ZEROS) >> bits)


@_inlined
def _short(eight: np.uint64, width: int) -> Any:
    """Likewise, the first one a tab if there are no bytes."""
    return _with_zeros(eight, width) ^ np.uint64(ZERO ^ TAB if width == 0 else 0)


# --- fields: eight digits each; where the first one is a tab, there is no value


@_compiled
def _read_integers(fields: Any, lines: int, wrong: Any) -> None:
    """Decimal digits become numbers, or ABSENT; the first of the eight may be a minus sign.

    Digits are joined to pairs, pairs to fours, and these to the number.
    """
    for column in range(NUM_NUMERICAL):
        for line in range(lines):
            eight = np.uint64(fields[column, line])
            first = eight & np.uint64(0xFF)
            text = (eight ^ first) | np.uint64(ZERO)
            digits = text ^ np.uint64(_ZEROS)
            above_nine = (text + np.uint64(6 * _EACH_BYTE)) ^ np.uint64(_ZEROS)
            wrong[line] |= (digits | above_nine) & np.uint64(0xF0 * _EACH_BYTE)
            tens = (digits << np.uint64(3)) + (digits << np.uint64(1))
            pairs = (tens + (digits >> np.uint64(8))) & np.uint64(_PAIRS)
            hundreds = (pairs << np.uint64(6)) + (pairs << np.uint64(5)) + (pairs << np.uint64(2))
            fours = (hundreds + (pairs >> np.uint64(16))) & np.uint64(_FOURS)
            upper = (fours & np.uint64(0xFFFFFFFF)) * np.uint64(10000)
            number = np.int64(upper + (fours >> np.uint64(32)))
            number = -number if first == MINUS else number
            fields[column, line] = ABSENT if first == TAB else number


@_compiled
def _read_values(fields: Any, lines: int, wrong: Any) -> None:
    """Hexadecimal digits become numbers, or -1."""
    each = np.uint64(_EACH_BYTE)
    for column in range(NUM_CATEGORICAL):
        for line in range(lines):
            eight = np.uint64(fields[column, line])
            absent = (eight & np.uint64(0xFF)) == TAB
            letter = (eight >> np.uint64(6)) & each  # per byte: 1 for a letter, 0 for a digit
            low = eight & np.uint64(0x0F * _EACH_BYTE)
            nibble = low + (letter << np.uint64(3)) + letter
            upper = letter << np.uint64(5)
            spelled = low + np.uint64(_ZEROS) + upper + (letter << np.uint64(4))
            above_nine = ((nibble + np.uint64(6 * _EACH_BYTE)) >> np.uint64(4)) & each
            bad = (spelled ^ (eight | upper)) | (above_nine ^ letter)
            bad |= nibble & np.uint64(0x10 * _EACH_BYTE)
            wrong[line] |= np.uint64(0) if absent else bad
            pairs = ((nibble << np.uint64(4)) | (nibble >> np.uint64(8))) & np.uint64(_PAIRS)
            fours = ((pairs << np.uint64(8)) | (pairs >> np.uint64(16))) & np.uint64(_FOURS)
            number = ((fours << np.uint64(16)) | (fours >> np.uint64(32))) & np.uint64(0xFFFFFFFF)
            fields[column, line] = np.int64(-1) if absent else np.int64(number)


@_compiled
def _long_integer(text: Any, place: int) -> Any:
    """An integer of more than 7 characters, and the place behind it, or -1 if it breaks a rule."""
    negative = text[place] == MINUS
    first = end = place + negative
    number = np.int64(0)
    digit = np.int64(text[end]) - ZERO
    while 0 <= digit <= 9:
        number = number * 10 + digit
        end += 1
        digit = np.int64(text[end]) - ZERO
    # 19 digits may exceed 63 bits; the slow parser knows. So does it for 64 bits.
    if end == first or end - first > 18 or text[end] != TAB:
        end = -1
    return (-number if negative else number), end


# --- from lines to fields


@_compiled
def _split(text: Any, place: int, length: int, fields: Any, starts: Any, long_ones: Any) -> Any:
    """Divide lines into fields: all, as many as there is room for, or up to the first bad one.

    Args:
        fields: labels [lines], integers [13, lines] and values [26, lines] to fill.
        starts: [lines], to fill with their places.
        long_ones: [., 3], to fill with integers of more than 7 characters as column, line, number.

    Returns:
        How many lines were taken, the last one included if it is bad; whether it is good; the place
        behind it; and how many long integers there are.
    """
    labels, numbers, values = fields
    lines = num_long = 0
    while place < length and lines < AT_A_TIME:
        starts[lines] = place
        label = text[place] - ZERO
        labels[lines] = label
        if label not in (0, 1) or text[place + 1] != TAB:
            return lines + 1, False, place, num_long
        place += 2
        # Integers: each ends with a tab. (A loop of a known length would be unrolled: slower.)
        for column in range(len(numbers)):
            eight = _load8(text, place)
            tabs = _marks(eight, TAB)
            if tabs == 0:
                number, end = _long_integer(text, place)
                if end < 0:
                    return lines + 1, False, place, num_long
                long_ones[num_long, 0] = column
                long_ones[num_long, 1] = lines
                long_ones[num_long, 2] = number
                num_long += 1
                numbers[column, lines] = np.int64(_ZEROS)
                place = end + 1
                continue
            first = eight & np.uint64(0xFF)
            negative = np.int64(first == MINUS)
            width = _first_byte(tabs)
            digits = _with_zeros(eight >> np.uint64(8 * negative), width - negative)
            numbers[column, lines] = np.int64(digits ^ np.uint64(ZERO) ^ first)
            place += width + 1
            if (eight & np.uint64(0xFFFF)) == MINUS + (TAB << 8):
                return lines + 1, False, place, num_long
        # Categorical values: each ends with a tab, the last one with the line.
        for column in range(len(values) - 1):
            eight = _load8(text, place)
            tabs = _marks(eight, TAB)
            if tabs == 0:
                if text[place + 8] != TAB:
                    return lines + 1, False, place, num_long
                place += 9
            else:
                width = _first_byte(tabs)
                eight = _short(eight, width)
                place += width + 1
            values[column, lines] = np.int64(eight)
        eight = _load8(text, place)
        end = place + 8
        is_empty = text[place] == TAB  # and another field follows, which is one too many
        if is_empty or end >= length or text[end] != NEWLINE or _marks(eight, NEWLINE) != 0:
            end = place
            while end < min(place + 8, length) and text[end] not in (TAB, NEWLINE, RETURN):
                end += 1
            if end < place + 8:
                eight = _short(eight, end - place)
        values[NUM_CATEGORICAL - 1, lines] = np.int64(eight)
        if end < length and text[end] == RETURN:
            end += 1
        lines += 1
        if end < length and text[end] != NEWLINE:
            return lines, False, place, num_long
        place = end + 1
    return lines, True, place, num_long


# --- lines


@_compiled
def _count(numbers: Any, lines: int, smallest: int, facts: Any) -> None:
    """Add the numbers of some lines to the facts of their columns. ABSENT, the least number there
    is, is no maximum anyway."""
    for column in range(NUM_NUMERICAL):
        absent = small = 0
        low, high = facts[1, column], facts[2, column]
        for line in range(lines):
            number = numbers[column, line]
            absent += number == ABSENT
            low = min(low, LARGEST if number == ABSENT else number)
            high = max(high, number)
            small += number < smallest
        facts[0, column] += absent
        facts[1, column], facts[2, column] = low, high
        facts[3, column] += small


@_compiled
def _write_integers(
    numbers: Any, lines: int, integers: Any, numerical: Any, row: int, large: Any, num_large: int
) -> int:
    table, start, _ = integers
    missing = len(table) - 1
    out = numerical[row : row + lines]
    places = np.empty(AT_A_TIME, np.uint64)
    for column in range(NUM_NUMERICAL):
        beyond = 0
        for line in range(lines):
            number = numbers[column, line]
            known = start <= number < start + missing
            beyond += not known and number != ABSENT
            places[line] = np.uint64(number - start if known else missing)
        for line in range(lines):
            out[line, column] = table[places[line]]
        if beyond == 0:
            continue
        for line in range(lines):
            number = numbers[column, line]
            if number == ABSENT or start <= number < start + missing:
                continue
            if num_large < len(large):
                large[num_large, 0] = row + line
                large[num_large, 1] = column
                large[num_large, 2] = number
            num_large += 1
    return num_large


@_compiled
def _write_values(
    values: Any, lines: int, categorical: Any, row: int, zeros: Any, num_zeros: int
) -> int:
    for column in range(NUM_CATEGORICAL):
        out = categorical[column, row : row + lines]
        found = 0
        for line in range(lines):
            number = values[column, line]
            out[line] = np.uint32(max(number, 0))
            found += number == 0
        if found == 0:
            continue
        for line in range(lines):
            if values[column, line] == 0:
                if num_zeros < len(zeros):
                    zeros[num_zeros, 0] = column
                    zeros[num_zeros, 1] = row + line
                num_zeros += 1
    return num_zeros


@_compiled
def parse(text: Any, length: int, integers: Any, out: Any, odd: Any, row: int) -> Any:
    """Parse lines.

    Args:
        text: uint8, `length` bytes; every line but the last is ended. Others may follow, then at
            least 16 zeros.
        integers: the float16 bits of transformed integers, at the end those of a missing one; the
            first of these integers; and the smallest that is not taken for a larger one.
        out: labels uint8 [rows], numerical uint16 [rows, 13], categorical uint32 [26, rows]; and
            int64 [4, 13] to count in: missing, the smallest, the largest, missing or too small.
        odd: three lists to fill as far as they reach: bad lines [., 4] as first byte, end, line
            index, row before which it came; large integers [., 3] as row, column, number; rows
            [., 2] as column, row where a categorical value is the number 0.
        row: the first one to write.

    Returns:
        The row behind the last one, the lines, and how many entries each list of `odd` needs.
    """
    labels, numerical, categorical, facts = out
    bad, large, zeros = odd
    num_bad = num_large = num_zeros = 0
    numbers = np.empty((NUM_NUMERICAL, AT_A_TIME), np.int64)
    values = np.empty((NUM_CATEGORICAL, AT_A_TIME), np.int64)
    starts = np.empty(AT_A_TIME, np.int64)
    wrong = np.empty(AT_A_TIME, np.uint64)
    long_ones = np.empty((AT_A_TIME * NUM_NUMERICAL, 3), np.int64)
    first_line = place = 0
    while place < length:
        fields = (labels[row:], numbers, values)
        lines, good, place, num_long = _split(text, place, length, fields, starts, long_ones)
        wrong[:] = 0
        wrong[lines - 1] = not good
        _read_integers(numbers, lines, wrong)
        for entry in range(num_long):
            numbers[long_ones[entry, 0], long_ones[entry, 1]] = long_ones[entry, 2]
        _read_values(values, lines, wrong)
        kept = 0
        while kept < lines and wrong[kept] == 0:
            kept += 1
        _count(numbers, kept, integers[2], facts)
        num_large = _write_integers(numbers, kept, integers, numerical, row, large, num_large)
        num_zeros = _write_values(values, kept, categorical, row, zeros, num_zeros)
        row += kept
        first_line += kept
        if kept < lines:  # a bad line: what was taken for fields may belong to the next ones
            place = starts[kept]
            while place < length and text[place] != NEWLINE:
                place += 1
            if num_bad < len(bad):
                bad[num_bad, 0] = starts[kept]
                bad[num_bad, 1] = place
                bad[num_bad, 2] = first_line
                bad[num_bad, 3] = row
            num_bad += 1
            first_line += 1
            place += 1
    return row, first_line, num_bad, num_large, num_zeros
