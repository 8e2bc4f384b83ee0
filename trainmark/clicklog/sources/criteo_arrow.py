"""Criteo's text through Arrow's CSV reader: what is used where numba is not installed."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
from numpy.typing import NDArray

from trainmark.clicklog.sources.criteo_text import FIELDS, NUM_CATEGORICAL, NUM_NUMERICAL

BLOCK_BYTES = 1 << 20
"""What Arrow reads at a time: more is slower."""
_ALLOWED = b"0123456789abcdefABCDEF-\t\n"
_DIGIT_OF = np.full(256, 255, np.uint8)
for _digit in range(16):
    _DIGIT_OF[[ord(f"{_digit:x}"), ord(f"{_digit:X}")]] = _digit


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
        values = parse_hex(column.dictionary)
        if values is None:
            return None
        codes = pc.fill_null(column.indices, len(values)).to_numpy()
        out[:] = np.append(values, np.uint32(0))[codes]
        zeros.append(np.flatnonzero(np.append(values == 0, False)[codes]))
    return labels.astype(np.uint8), numbers, missing, categorical, zeros


def _types() -> dict[str, pa.DataType]:
    # Declared, never guessed: 1e095050 is a value, not a floating-point number.
    kinds = [pa.int8()] + [pa.int64()] * NUM_NUMERICAL
    kinds += [pa.dictionary(pa.int32(), pa.string())] * NUM_CATEGORICAL
    return dict(zip(FIELDS, kinds, strict=True))


def parse_hex(texts: pa.StringArray) -> NDArray[np.uint32] | None:
    """Numbers of up to 8 hexadecimal digits, in either case; None if one is not."""
    if len(texts) == 0:
        return np.empty(0, np.uint32)
    padded = pc.ascii_lpad(texts, width=8, padding="0").cast(pa.binary())
    if pc.any(pc.not_equal(pc.binary_length(padded), 8)).as_py():
        return None
    characters = np.frombuffer(b"".join(padded.to_pylist()), np.uint8).reshape(-1, 8)
    digits = _DIGIT_OF[characters]
    if (digits > 15).any():
        return None
    pairs = (digits[:, ::2] << 4) | digits[:, 1::2]
    return np.ascontiguousarray(pairs).view(">u4").ravel().astype(np.uint32)
