"""Parses Criteo's text: 40 tab-separated fields a line, no header, empty fields for missing values.

Field 0 is the label (0 or 1), 1 to 13 are integers, 14 to 39 are hexadecimal 32-bit numbers.
Arrow reads well-formed files fast; for a malformed one, a slow second look names the bad line.
(Arrow forgives spaces around an integer, and 0x before it.)
"""

import gzip
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
from numpy.typing import NDArray

from trainmark.clicklog.columns import NUM_CATEGORICAL, NUM_NUMERICAL, Batch, Categorical
from trainmark.errors import InputError
from trainmark.numerical import log_transform

FIELDS = [
    "label",
    *(f"integer {i}" for i in range(1, NUM_NUMERICAL + 1)),
    *(f"categorical {i}" for i in range(1, NUM_CATEGORICAL + 1)),
]
BLOCK_BYTES = 16 << 20


def parse(path: Path) -> list[Batch]:
    """All rows of `path`; an `InputError` names the first line that is malformed."""
    try:
        table = csv.read_csv(
            path,
            csv.ReadOptions(column_names=FIELDS, block_size=BLOCK_BYTES),
            # Without quoting, and without skipping anything: a line is 40 fields or an error.
            csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False),
            csv.ConvertOptions(column_types=_types(), null_values=[""], strings_can_be_null=True),
        )
        return [_batch(part) for part in table.to_batches() if part.num_rows]
    except (pa.ArrowInvalid, _MalformedError) as error:
        raise _explain(path, error) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error}.") from None


class _MalformedError(ValueError):
    """Arrow accepted a field that the format does not allow."""


def _types() -> dict[str, pa.DataType]:
    # Declared, never guessed: 1e095050 is a value, not a floating-point number.
    kinds = [pa.int8()] + [pa.int64()] * NUM_NUMERICAL
    kinds += [pa.dictionary(pa.int32(), pa.string())] * NUM_CATEGORICAL
    return dict(zip(FIELDS, kinds, strict=True))


def _batch(part: pa.RecordBatch) -> Batch:
    columns = part.columns
    return Batch(
        _labels(columns[0]),
        # A missing integer and one of -3 or less are both 0.0 in the end.
        np.stack(
            [
                log_transform(pc.fill_null(column, -3).to_numpy())
                for column in columns[1 : 1 + NUM_NUMERICAL]
            ],
            axis=1,
        ),
        [_categorical(column) for column in columns[1 + NUM_NUMERICAL :]],
    )


def _labels(column: pa.Array) -> NDArray[np.bool_]:
    if column.null_count:
        raise _MalformedError("a label is missing")
    labels = column.to_numpy()
    if ((labels != 0) & (labels != 1)).any():
        raise _MalformedError("a label is neither 0 nor 1")
    return labels.astype(np.bool_)


def _categorical(column: pa.DictionaryArray) -> Categorical:
    codes = pc.fill_null(column.indices, -1).to_numpy()
    return Categorical(codes, parse_hex(column.dictionary))


def parse_hex(texts: pa.StringArray) -> NDArray[np.uint32]:
    """Numbers of up to 8 hexadecimal digits, in either case."""
    if len(texts) == 0:
        return np.empty(0, np.uint32)
    padded = pc.ascii_lpad(texts, width=8, padding="0").cast(pa.binary())
    if pc.any(pc.not_equal(pc.binary_length(padded), 8)).as_py():
        raise _MalformedError("a categorical value is longer than 8 characters")
    characters = np.frombuffer(b"".join(padded.to_pylist()), np.uint8).reshape(-1, 8)
    digits = _DIGIT_OF[characters]
    if (digits > 15).any():
        raise _MalformedError("a categorical value is not hexadecimal")
    pairs = (digits[:, ::2] << 4) | digits[:, 1::2]
    return np.ascontiguousarray(pairs).view(">u4").ravel().astype(np.uint32)


_DIGIT_OF = np.full(256, 255, np.uint8)
for _digit in range(16):
    _DIGIT_OF[[ord(f"{_digit:x}"), ord(f"{_digit:X}")]] = _digit


# --- what is wrong with a malformed file


def _explain(path: Path, error: Exception) -> InputError:
    """The error for `path`, with the first bad line if the slow look finds it."""
    # A damaged archive may fail here, after its first lines; then Arrow's reason has to do.
    with suppress(OSError, EOFError, zlib.error):
        for number, line in enumerate(_lines(path), start=1):
            problem = _problem(line)
            if problem:
                return InputError(f"{path}:{number}: {problem}.")
    return InputError(f"{path} is malformed: {error}.")


def _lines(path: Path) -> Iterator[bytes]:
    opener: Callable[[Path], Any] = gzip.open if path.suffix == ".gz" else _open
    with opener(path) as file:
        for line in file:
            yield line.removesuffix(b"\n").removesuffix(b"\r")


def _open(path: Path) -> BinaryIO:
    return path.open("rb")


def _problem(line: bytes) -> str | None:
    """What is wrong with a line, or None."""
    fields = line.split(b"\t")
    if len(fields) != len(FIELDS):
        return f"{len(fields)} tab-separated fields, expected {len(FIELDS)}"
    if fields[0] not in (b"0", b"1"):
        return f"label {_show(fields[0])}, expected 0 or 1"
    for name, field in zip(FIELDS[1:], fields[1:], strict=True):
        if not field:
            continue
        if name.startswith("integer") and not _is_integer(field):
            return (
                f"{name} is {_show(field)}, expected a whole number of at most 64 bits or nothing"
            )
        if name.startswith("categorical") and not re.fullmatch(rb"[0-9a-fA-F]{1,8}", field):
            return f"{name} is {_show(field)}, expected up to 8 hexadecimal digits or nothing"
    return None


def _is_integer(field: bytes) -> bool:
    return bool(re.fullmatch(rb"-?[0-9]{1,19}", field)) and -(2**63) <= int(field) < 2**63


def _show(field: bytes) -> str:
    return repr(field[:40].decode(errors="replace"))
