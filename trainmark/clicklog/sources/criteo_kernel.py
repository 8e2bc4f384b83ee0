"""The compiled parser of Criteo's text (extra `fast`): about a byte of text per processor cycle.

It accepts exactly what criteo_format.py describes. A line that breaks a rule is not explained here:
its place is noted, and the slow parser looks at it again.
"""

from typing import Any

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from trainmark.clicklog.sources.criteo_format import NUM_CATEGORICAL, NUM_NUMERICAL

TAB, NEWLINE, RETURN, MINUS, ZERO = 9, 10, 13, 45, 48
ABSENT = -(1 << 63)  # instead of an integer, of which none here has so many digits
AT_A_TIME = 256  # lines whose integers are counted together
_EACH_BYTE = 0x0101010101010101


@intrinsic
def _load8(typing_context: Any, text: Any, place: Any) -> Any:
    """The 8 bytes from `place` on as one number, the first byte lowest."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = builder.gep(array.data, [arguments[1]])
        kind = context.get_value_type(types.uint64)
        wide = builder.bitcast(pointer, kind.as_pointer())
        return builder.load(wide, align=1)

    return types.uint64(text, types.int64), generate


@numba.njit(nogil=True, cache=True, inline="always")
def _hex8(eight: np.uint64) -> Any:
    """Eight hexadecimal digits as a number, or -1."""
    each = np.uint64(_EACH_BYTE)
    letter = (eight >> np.uint64(6)) & each  # per byte: 1 for a letter, 0 for a digit
    nibble = (eight & (each * np.uint64(15))) + letter * np.uint64(9)
    lower = eight | (letter << np.uint64(5))
    spelled = nibble + each * np.uint64(ZERO) + letter * np.uint64(0x27)
    above_nine = ((nibble + each * np.uint64(6)) >> np.uint64(4)) & each
    if spelled != lower or above_nine != letter or (nibble & (each * np.uint64(16))) != 0:
        return np.int64(-1)
    pairs = ((nibble << np.uint64(4)) | (nibble >> np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    quads = ((pairs << np.uint64(8)) | (pairs >> np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    return np.int64(((quads << np.uint64(16)) | (quads >> np.uint64(32))) & np.uint64(0xFFFFFFFF))


@numba.njit(nogil=True, cache=True, inline="always")
def _hex_digit(byte: int) -> int:
    if 48 <= byte <= 57:
        return byte - 48
    byte |= 32
    if 97 <= byte <= 102:
        return byte - 87
    return -1


@numba.njit(nogil=True, cache=True)
def _count(numbers: Any, lines: int, smallest: int, facts: Any) -> None:
    """Add the numbers of some lines to the facts of their columns.

    Without a decision: ABSENT is less than every number and so no maximum; less 1, it is the
    largest of all.
    """
    for column in range(NUM_NUMERICAL):
        absent = small = 0
        low, high = facts[1, column] - 1, facts[2, column]
        for place in range(lines):
            number = numbers[column, place]
            absent += number == ABSENT
            low = min(low, number - 1)
            high = max(high, number)
            small += number < smallest
        facts[0, column] += absent
        facts[1, column], facts[2, column] = low + 1, high
        facts[3, column] += small


@numba.njit(nogil=True, cache=True)
def parse(text: Any, length: int, integers: Any, out: Any, odd: Any) -> Any:
    """Parse lines.

    Args:
        text: uint8, `length` bytes and at least 8 zeros; every line but the last is ended.
        integers: the float16 bits of transformed integers, the first of them, the bits of
            a missing one, and the smallest integer that is not taken for a larger one.
        out: labels uint8 [lines], numerical uint16 [lines, 13], categorical uint32 [26, lines]; and
            int64 [4, 13] to count in: missing, the smallest, the largest, missing or too small.
        odd: three lists to fill as far as they reach: bad lines [., 4] as first byte, end, line
            index, row before which it came; large integers [., 3] as row, column, number; rows
            [., 2] as column, row where a categorical value is the number 0.

    Returns:
        Rows written, and how many entries each list of `odd` needs.
    """
    table, table_start, missing, smallest = integers
    labels, numerical, categorical, facts = out
    numbers = np.empty((NUM_NUMERICAL, AT_A_TIME), np.int64)
    waiting = 0  # lines whose numbers are yet to be counted
    bad, large, zeros = odd
    num_bad = num_large = num_zeros = 0
    row = line = place = 0
    while place < length:
        start = place
        good = True
        large_before, zeros_before = num_large, num_zeros
        # The label.
        label = text[place] - ZERO
        if (label != 0 and label != 1) or text[place + 1] != TAB:
            good = False
        else:
            labels[row] = label
            place += 2
        # Integers: each ends with a tab.
        if good:
            for column in range(NUM_NUMERICAL):
                byte = text[place]
                if byte == TAB:
                    numerical[row, column] = missing
                    numbers[column, waiting] = ABSENT
                    place += 1
                    continue
                negative = byte == MINUS
                if negative:
                    place += 1
                first = place
                number = np.int64(0)
                digit = np.int64(text[place]) - ZERO
                while 0 <= digit <= 9:
                    number = number * 10 + digit
                    place += 1
                    digit = np.int64(text[place]) - ZERO
                digits = place - first
                # 19 digits may exceed 63 bits; the slow parser knows. So does it for 64 bits.
                if digits == 0 or digits > 18 or text[place] != TAB:
                    good = False
                    break
                place += 1
                if negative:
                    number = -number
                numbers[column, waiting] = number
                index = number - table_start
                if 0 <= index < len(table):
                    numerical[row, column] = table[index]
                else:
                    if num_large < len(large):
                        large[num_large, 0] = row
                        large[num_large, 1] = column
                        large[num_large, 2] = number
                    num_large += 1
        # Categorical values: each ends with a tab, the last one with the line.
        if good:
            for column in range(NUM_CATEGORICAL):
                number = _hex8(_load8(text, place))  # type: ignore[call-arg]
                end = place + 8
                if number < 0:
                    end = place
                    number = np.int64(0)
                    digit = _hex_digit(np.int64(text[end]))
                    while digit >= 0 and end < place + 8:
                        number = number * 16 + digit
                        end += 1
                        digit = _hex_digit(np.int64(text[end]))
                categorical[column, row] = number
                if number == 0 and end > place:
                    if num_zeros < len(zeros):
                        zeros[num_zeros, 0] = column
                        zeros[num_zeros, 1] = row
                    num_zeros += 1
                if column < NUM_CATEGORICAL - 1:
                    if text[end] != TAB:
                        good = False
                        break
                    place = end + 1
                elif end >= length:
                    place = length
                elif text[end] == NEWLINE:
                    place = end + 1
                elif text[end] == RETURN and (end + 1 >= length or text[end + 1] == NEWLINE):
                    place = end + 2
                else:
                    good = False
        if good:
            row += 1
            waiting += 1
            if waiting == AT_A_TIME:
                _count(numbers, waiting, smallest, facts)
                waiting = 0
        else:
            num_large, num_zeros = large_before, zeros_before
            place = start
            while place < length and text[place] != NEWLINE:
                place += 1
            if num_bad < len(bad):
                bad[num_bad, 0] = start
                bad[num_bad, 1] = place
                bad[num_bad, 2] = line
                bad[num_bad, 3] = row
            num_bad += 1
            place += 1
        line += 1
    _count(numbers, waiting, smallest, facts)
    return row, num_bad, num_large, num_zeros
