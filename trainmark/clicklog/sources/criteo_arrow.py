"""Criteo's text through Arrow's CSV reader: what is used where numba is not installed."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv

from trainmark.clicklog.sources.column_values import hexadecimal
from trainmark.clicklog.sources.criteo_format import FIELDS, NUM_CATEGORICAL, NUM_NUMERICAL

BLOCK_BYTES = 1 << 20
"""What Arrow reads at a time: more is slower."""
_ALLOWED = b"0123456789abcdefABCDEF-\t\n"


def read(text: bytes) -> tuple[Any, ...] | None:
    """Labels, integers, which are missing, categorical numbers, rows of zeros; None if odd.

    Arrow forgives spaces and prefixes, and takes a lone CR for a line end; so text with any
    other characters than the format's own is odd, whether Arrow would read it or not.
    """
    if text.translate(None, _ALLOWED) or not text:
        return None
    try:
        table = csv.read_csv(
            pa.py_buffer(text),
            csv.ReadOptions(column_names=FIELDS, block_size=BLOCK_BYTES, use_threads=False),
            # Without quoting, and without skipping anything: a line is 40 fields or an error.
            csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False),
            csv.ConvertOptions(column_types=_types(), null_values=[""], strings_can_be_null=True),
        )
        table = table.unify_dictionaries().combine_chunks()
        columns = [column.chunk(0) for column in table.columns]
    except pa.ArrowInvalid:
        return None
    labels = columns[0].to_numpy(zero_copy_only=False)
    if columns[0].null_count or (labels >> 1).any():
        return None
    integers = columns[1 : 1 + NUM_NUMERICAL]
    numbers = np.stack([pc.fill_null(column, 0).to_numpy() for column in integers], axis=1)
    missing = np.stack(
        [column.is_null().to_numpy(zero_copy_only=False) for column in integers], axis=1
    )
    categorical = np.empty((NUM_CATEGORICAL, len(labels)), np.uint32)
    zeros = []
    for out, column in zip(categorical, columns[1 + NUM_NUMERICAL :], strict=True):
        parsed, bad = hexadecimal(column.dictionary)
        if bad.any():
            return None
        values = parsed.numbers
        codes = pc.fill_null(column.indices, len(values)).to_numpy()
        out[:] = np.append(values, np.uint32(0))[codes]
        zeros.append(np.flatnonzero(np.append(values == 0, False)[codes]))
    return labels.astype(np.uint8), numbers, missing, categorical, zeros


def _types() -> dict[str, pa.DataType]:
    # Declared, never guessed: 1e095050 is a value, not a floating-point number.
    kinds = [pa.int8()] + [pa.int64()] * NUM_NUMERICAL
    kinds += [pa.dictionary(pa.int32(), pa.string())] * NUM_CATEGORICAL
    return dict(zip(FIELDS, kinds, strict=True))
