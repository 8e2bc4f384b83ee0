"""Values of one column as numbers, and which of its rows are bad."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trainmark.clicklog.sources.arrow_columns import Mask, cast, floats, nulls
from trainmark.clicklog.sources.column_spec import ColumnUse
from trainmark.clicklog.sources.rows import Values

HOUR_S, DAY_S = 3600, 86_400
THURSDAY = 3
"""Day of the week of 1 January 1970, Monday being 0."""
SLASHED = r"^(\d{4})/(\d\d)/(\d\d)"
"""Dates that are written with slashes, the year first: no other order starts so."""
ZONE = r"[T ]\d\d.*(Z|[+-]\d\d(:?\d\d)?)$"
"""Times that end with their zone."""


def number(column: pa.Array) -> tuple[NDArray[np.float64], Mask]:
    """As they are; what is bad counts as missing."""
    if pa.types.is_integer(column.type):
        column = column.cast(pa.float64(), safe=False)  # also those that float64 rounds
    numbers, bad = cast(column, pa.float64())
    values = pc.fill_null(numbers, float("nan")).to_numpy(zero_copy_only=False)
    bad |= np.isinf(values)
    return np.where(bad, np.nan, values) if bad.any() else values, bad


def category(column: pa.Array, reading: str) -> tuple[Any, Mask]:
    if pa.types.is_dictionary(column.type):
        return column, np.zeros(len(column), np.bool_)
    if reading == "string":
        return cast(column, pa.string())
    if reading == "hex":
        return hexadecimal(column)
    kinds = {"int64": pa.int64(), "uint64": pa.uint64(), "float64": pa.float64()}
    numbers, bad = cast(column, kinds[reading])
    missing = nulls(numbers)
    array = pc.fill_null(numbers, 0).to_numpy(zero_copy_only=False)
    if reading == "float64":
        missing = missing | np.isnan(array)
        array = np.where(missing, 0.0, array) + 0.0  # one zero, not a negative one too
    return Values(array, missing if missing.any() else None), bad


def hexadecimal(column: pa.Array) -> tuple[Values, Mask]:
    """Numbers of up to 8 digits, in either case."""
    missing = nulls(column)
    good = pc.fill_null(pc.match_substring_regex(column, "^[0-9a-fA-F]{1,8}$"), False)
    bad = ~good.to_numpy(zero_copy_only=False) & ~missing
    padded = pc.ascii_lpad(pc.if_else(good, column, "0"), width=8, padding="0")
    texts = np.frombuffer(padded.buffers()[-1] or b"", np.uint8)
    characters = texts[: 8 * len(padded)].reshape(-1, 8)
    digits = (characters & 15) + 9 * (characters >> 6)  # the bit of 64 marks letters
    pairs = (digits[:, ::2] << 4) | digits[:, 1::2]
    numbers = np.ascontiguousarray(pairs).view(">u4").ravel().astype(np.uint32)
    absent = missing | bad
    return Values(numbers, absent if absent.any() else None), bad


def time(column: pa.Array, use: ColumnUse) -> tuple[list[Values], Mask]:
    """Hour and day of the week, in UTC."""
    if use.reading in ("unix", "unix_ms"):
        values, missing, bad = floats(column)
        bad |= ~(np.abs(values) < 2**53)
        values = np.where(bad, 0.0, values)
        seconds = np.floor(values / (1000 if use.reading == "unix_ms" else 1)).astype(np.int64)
    else:
        times, bad = _iso(column)
        missing = nulls(times) & ~bad
        milliseconds = pc.fill_null(times.cast(pa.timestamp("ms"), safe=False).cast(pa.int64()), 0)
        seconds = milliseconds.to_numpy(zero_copy_only=False) // 1000
    absent = missing | bad
    hidden = absent if absent.any() else None
    hours = (seconds // HOUR_S % 24).astype(np.uint32)
    weekdays = ((seconds // DAY_S + THURSDAY) % 7).astype(np.uint32)
    return [Values(hours, hidden), Values(weekdays, hidden)], bad


def order(column: pa.Array, use: ColumnUse) -> tuple[Values, Mask]:
    """What rows are ordered by: a number, or a time in microseconds."""
    if use.reading == "number":
        values, missing, bad = floats(column)
        return Values(values + 0.0, missing | bad), bad
    times, bad = _iso(column)
    moments = pc.fill_null(times.cast(pa.timestamp("us"), safe=False).cast(pa.int64()), 0)
    return Values(moments.to_numpy(zero_copy_only=False), nulls(times)), bad


def _iso(column: pa.Array) -> tuple[pa.Array, Mask]:
    if pa.types.is_temporal(column.type):
        if pa.types.is_timestamp(column.type) and column.type.tz:
            column = column.cast(pa.timestamp(column.type.unit))  # the same instant, in UTC
        return cast(column, pa.timestamp("ms") if pa.types.is_date(column.type) else column.type)
    plain, utc = pa.timestamp("us"), pa.timestamp("us", tz="UTC")
    for kind in (utc, plain):  # as nearly all columns are: every time with a zone, or none
        try:
            return column.cast(kind).cast(plain), np.zeros(len(column), np.bool_)
        except pa.ArrowInvalid:
            continue
    column = pc.replace_substring_regex(column, SLASHED, r"\1-\2-\3")
    has_zone, none = pc.match_substring_regex(column, ZONE), pa.scalar(None, column.type)
    here, bad = cast(pc.if_else(has_zone, none, column), plain)
    elsewhere, also_bad = cast(pc.if_else(has_zone, column, none), utc)
    return pc.coalesce(here, elsewhere.cast(plain)), bad | also_bad
