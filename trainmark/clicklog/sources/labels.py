"""Labels: 0 and 1, a comparison (label=rating>=4), or one of two values (--positive)."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainmark.clicklog.sources.arrow_columns import Mask, cast, floats, nulls
from trainmark.clicklog.sources.column_spec import IS, NUMBER, ColumnUse

MAX_OTHERS = 6
"""Values of a label that are kept to tell of, where one is expected."""


@dataclass(frozen=True)
class Labels:
    """Of a batch of rows."""

    clicks: Mask
    bad: Mask
    """Where there is no label, or none that can be one."""
    others: tuple[str, ...] = ()
    """Values that are no clicks, where a label has to have one such; not all, if there are many."""


def read(column: pa.Array, use: ColumnUse) -> Labels:
    """The labels of a column."""
    if use.comparison is None:
        return _zeros_and_ones(column)
    operator, wanted = use.comparison
    if operator == IS:
        return _one_of_two(column, str(wanted))
    if isinstance(wanted, str):
        texts, bad = cast(column, pa.string())
        equal = pc.fill_null(pc.equal(texts, wanted), False).to_numpy(zero_copy_only=False)
        return Labels(equal, nulls(texts) | bad)
    values, missing, bad = floats(column)
    compare = {
        ">=": np.greater_equal, "<=": np.less_equal, ">": np.greater, "<": np.less,
        "=": np.equal, "==": np.equal,
    }[operator]  # fmt: skip
    return Labels(compare(values, wanted), missing | bad)


def expected(use: ColumnUse) -> str:
    """What a label may be, in words, and how to have something else read."""
    if use.comparison is None:
        return "0, 1, true or false (--positive VALUE says which of two values is a click)"
    return "a number" if isinstance(use.comparison[1], float) else "a value"


def _zeros_and_ones(column: pa.Array) -> Labels:
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        lower = pc.utf8_lower(column)
        words = pc.replace_with_mask(lower, pc.fill_null(pc.equal(lower, "true"), False), "1")
        column = pc.replace_with_mask(words, pc.fill_null(pc.equal(words, "false"), False), "0")
    values, missing, bad = floats(column)
    return Labels(values == 1, missing | bad | ((values != 0) & (values != 1)))


def _one_of_two(column: pa.Array, positive: str) -> Labels:
    texts, bad = cast(column, pa.string())
    encoded = texts.dictionary_encode()
    values = [_plain(value) for value in encoded.dictionary.to_pylist()]
    is_click = np.array([value == _plain(positive) for value in values] + [False])
    codes = pc.fill_null(encoded.indices, len(values)).to_numpy(zero_copy_only=False)
    others = sorted({value for value in values if value != _plain(positive)})
    return Labels(is_click[codes], nulls(texts) | bad, tuple(others[:MAX_OTHERS]))


def _plain(text: str) -> str:
    """A value without spaces around it; 1 and 1.0 are the same one."""
    text = text.strip()
    if not NUMBER.fullmatch(text):
        return text
    number = float(text)
    if number.is_integer():
        return str(int(number)) if abs(number) < 2**53 else text
    return repr(number)
