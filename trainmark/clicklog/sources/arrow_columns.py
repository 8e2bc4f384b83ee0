"""Columns of Arrow's in other types; what cannot be converted is marked, not raised."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trainmark.clicklog.sources import lists

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
    """Strings, those that are not UTF-8 taken for Latin-1; with a dictionary, if they have one.
    So are those in lists. Columns of other types are returned as they are."""
    if pa.types.is_dictionary(column.type):
        return pa.DictionaryArray.from_arrays(column.indices, utf8(column.dictionary))
    in_lists = lists.is_list(column.type)
    if not _is_of_texts(column.type.value_type if in_lists else column.type):
        return column
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        kind = pa.list_(pa.binary()) if in_lists else pa.binary()
        texts = [_decoded(raw) for raw in column.cast(kind).to_pylist()]
        return pa.array(texts, pa.list_(pa.string()) if in_lists else pa.string())
    return column


def _decoded(raw: Any) -> Any:
    if isinstance(raw, list):
        return [_decoded(text) for text in raw]
    return None if raw is None else decoded(raw)


def _is_of_texts(kind: pa.DataType) -> bool:
    """Whether the values of a column of this type are texts, with a dictionary or without."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return kind in (pa.string(), pa.large_string())


def decoded(text: bytes) -> str:
    """Text that is not UTF-8 is taken for Latin-1: different bytes stay different values."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return text.decode("latin-1")
