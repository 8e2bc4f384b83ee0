"""Megatron's indexed token files, byte for byte: `PREFIX.bin` and `PREFIX.idx`.

The .bin file is token ids, one after the other, without a header. The .idx file:

    offset  bytes  what
    0       9      MMIDIDX\\0\\0
    9       8      version, 1
    17      1      code of the token type
    18      8      S, how many sequences
    26      8      D, how many document boundaries
    34      4 S    lengths of the sequences, int32
            8 S    where each begins in the .bin file, in bytes, int64
            8 D    first sequence of each document, int64; the first is 0, the last is S
            S      modes, int8 (optional, of multimodal data; not read here)

All numbers are little endian.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from trainmark.errors import InputError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
HEADER_BYTES = _HEADER.size

_CODES = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32,
    8: np.uint16,
}  # fmt: skip
MAX_UINT16_VOCAB = 65_500


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Megatron's choice: two bytes a token where the ids fit, else four."""
    return np.dtype(np.uint16 if vocab_size < MAX_UINT16_VOCAB else np.int32)


@dataclass(frozen=True)
class IndexedTokens:
    """An open pair of files; nothing is read before it is asked for."""

    prefix: Path
    tokens: NDArray[Any]
    """All token ids, memory-mapped."""
    lengths: NDArray[np.int32]
    starts: NDArray[np.int64]
    """Where each sequence begins, in tokens."""
    documents: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, sequence: int, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Tokens `start` to `stop` of one sequence."""
        begin = int(self.starts[sequence])
        end = int(self.lengths[sequence]) if stop is None else stop
        return self.tokens[begin + start : begin + end]


def open_tokens(prefix: Path) -> IndexedTokens:
    """Read and check `PREFIX.idx`, map `PREFIX.bin`."""
    path, data_path = prefix.with_name(f"{prefix.name}.idx"), prefix.with_name(f"{prefix.name}.bin")
    for file in (path, data_path):
        if not file.is_file():
            raise InputError(f"{file} does not exist: an indexed dataset is a .bin and an .idx.")
    raw = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    dtype, sequences, boundaries = _read_header(path, raw)
    offset = HEADER_BYTES
    arrays = []
    for what, count, kind in (
        ("sequence lengths", sequences, "<i4"),
        ("sequence offsets", sequences, "<i8"),
        ("document boundaries", boundaries, "<i8"),
    ):
        end = offset + count * np.dtype(kind).itemsize
        if end > len(raw):
            raise InputError(
                f"{path} is truncated: its {count:,} {what} take bytes {offset:,} to {end:,}, and "
                f"the file ends at {len(raw):,}."
            )
        arrays.append(np.array(raw[offset:end]).view(kind))
        offset = end
    if offset not in (len(raw), len(raw) - sequences):
        raise InputError(
            f"{path}: expected the file to end at byte {offset:,} (or {offset + sequences:,}, with "
            f"modes); it has {len(raw):,} bytes."
        )
    lengths, offsets, documents = arrays
    _check(path, data_path, dtype, lengths, offsets, documents)
    empty = data_path.stat().st_size == 0
    tokens = np.empty(0, dtype) if empty else np.memmap(data_path, dtype, "r")
    return IndexedTokens(prefix, tokens, lengths, offsets // dtype.itemsize, documents)


def _read_header(path: Path, raw: NDArray[np.uint8]) -> tuple[np.dtype[Any], int, int]:
    if len(raw) < HEADER_BYTES:
        raise InputError(
            f"{path} is truncated: its header takes bytes 0 to {HEADER_BYTES}, and the file ends "
            f"at {len(raw)}."
        )
    magic, version, code, sequences, boundaries = _HEADER.unpack(raw[:HEADER_BYTES].tobytes())
    if magic != MAGIC:
        raise InputError(f"{path}, byte 0: expected {MAGIC!r}, received {magic!r}.")
    if version != VERSION:
        raise InputError(f"{path}, byte 9: expected version {VERSION}, received {version}.")
    if code not in _CODES or code in (6, 7):
        raise InputError(f"{path}, byte 17: {code} is not the code of an integer type.")
    if max(sequences, boundaries) > len(raw):  # each takes more than a byte
        raise InputError(
            f"{path}, byte 18: {sequences:,} sequences and {boundaries:,} boundaries cannot be in "
            f"a file of {len(raw):,} bytes."
        )
    return np.dtype(_CODES[code]), sequences, boundaries


def _check(
    path: Path,
    data_path: Path,
    dtype: np.dtype[Any],
    lengths: NDArray[np.int32],
    offsets: NDArray[np.int64],
    documents: NDArray[np.int64],
) -> None:
    """Every sequence lies inside the .bin file; documents cover the sequences."""
    size, count = data_path.stat().st_size, len(lengths)
    ends = offsets + lengths.astype(np.int64) * dtype.itemsize
    bad = (lengths < 0) | (offsets < 0) | (offsets % dtype.itemsize != 0) | (ends > size)
    if bad.any():
        first = int(bad.argmax())
        where = HEADER_BYTES + 4 * count + 8 * first
        raise InputError(
            f"{path}, byte {where:,}: sequence {first} ({int(lengths[first]):,} tokens from byte "
            f"{int(offsets[first]):,}) does not lie inside {data_path.name} ({size:,} bytes)."
        )
    where = HEADER_BYTES + 12 * count
    good = (
        len(documents) > 0
        and documents[0] == 0
        and documents[-1] == count
        and bool((np.diff(documents) >= 0).all())
    )
    if not good:
        raise InputError(
            f"{path}, byte {where:,}: document boundaries must rise from 0 to the number of "
            f"sequences ({count:,})."
        )


def write_index(
    file: BinaryIO, dtype: np.dtype[Any], lengths: NDArray[Any], documents: Iterable[int]
) -> None:
    """The .idx file of sequences that lie one after the other."""
    code = next(code for code, kind in _CODES.items() if np.dtype(kind) == dtype)
    wide = lengths.astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(wide)[:-1]]) if len(wide) else wide
    boundaries = np.fromiter(documents, "<i8")
    file.write(_HEADER.pack(MAGIC, VERSION, code, len(lengths), len(boundaries)))
    file.write(lengths.astype("<i4").tobytes())
    file.write((starts * dtype.itemsize).astype("<i8").tobytes())
    file.write(boundaries.tobytes())
