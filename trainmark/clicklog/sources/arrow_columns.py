"""Columns of Arrow's in other types; what cannot be converted is marked, not raised."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Mask = NDArray[np.bool_]


def cast(column: pa.Array, kind: pa.DataType) -> tuple[pa.Array, Mask]:
    """The column in another type, null where that is not possible; and where that is."""
    try:
        return column.cast(kind), np.zeros(len(column), np.bool_)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        bad = np.array([not _casts(value, kind) for value in column], np.bool_)
        return pc.if_else(pa.array(~bad), column, pa.scalar(None, column.type)).cast(kind), bad


def _casts(value: pa.Scalar, kind: pa.DataType) -> bool:
    try:
        value.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return False
    return True


def nulls(column: pa.Array) -> Mask:
    """Where a column has no value."""
    return np.asarray(pc.is_null(column).to_numpy(zero_copy_only=False))


def floats(column: pa.Array) -> tuple[NDArray[np.float64], Mask, Mask]:
    """Numbers (0.0 where there is none), where they are missing, and where they are bad."""
    numbers, bad = cast(column, pa.float64())
    array = pc.fill_null(numbers, float("nan")).to_numpy(zero_copy_only=False)
    missing = np.isnan(array) & ~bad
    return np.where(np.isnan(array), 0.0, array), missing, bad


def utf8(column: pa.Array) -> pa.Array:
    """Strings, those that are not UTF-8 taken for Latin-1; with a dictionary, if they have one."""
    if pa.types.is_dictionary(column.type):
        return pa.DictionaryArray.from_arrays(column.indices, utf8(column.dictionary))
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        raw = column.cast(pa.binary()).to_pylist()
        return pa.array([None if text is None else decoded(text) for text in raw], pa.string())
    return column


def decoded(text: bytes) -> str:
    """Text that is not UTF-8 is taken for Latin-1: different bytes stay different values."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return text.decode("latin-1")
