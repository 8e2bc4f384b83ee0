"""Strings as numbers, by interning: a string's number is its rank (from 1) among all, by bytes.

While parsing, every block numbers its own strings and keeps its sorted dictionary in a file. When
all blocks are there, their dictionaries are merged, a stretch at a time, which gives the sorted
dictionary of the whole column, and for each block the numbers of its own entries.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trainmark.checksums import Checksum
from trainmark.clicklog.arrays.primitives import arrow_array

BATCH_ROWS = 1 << 12
"""Strings of a batch in the files of dictionaries."""
MERGED_ROWS = 1 << 17
"""Strings of all dictionaries that are merged at a time, roughly."""
MERGED_BYTES = 1 << 25
"""And bytes of theirs, where strings are long."""
PART_BYTES = 1 << 20
"""Of a batch of long strings: parts in which it may be merged, roughly."""


def dictionary_path(folder: Path, index: int, column: int) -> Path:
    return folder / f"{index:06d}.{column}.arrow"


def numbers_path(folder: Path, column: int) -> Path:
    return folder / f"strings.{column}.numbers"


def all_strings_path(folder: Path, column: int) -> Path:
    return folder / f"strings.{column}.arrow"


def number_blocks(columns: Sequence[Any]) -> tuple[list[NDArray[np.uint32]], Any]:
    """What `number_block` gives of columns that are numbered together, of which those of a list's
    last places may be all null."""
    if len(columns) == 1:
        numbers, distinct = number_block(columns[0])
        return [numbers], distinct
    there = [column for column in columns if column.null_count < len(column)] or columns[:1]
    numbers, distinct = number_block(pa.concat_arrays(there))
    nothing = np.zeros(len(columns[0]), np.uint32)
    of_columns = np.split(numbers, len(there))
    return of_columns + [nothing] * (len(columns) - len(there)), distinct


def number_block(strings: Any) -> tuple[NDArray[np.uint32], Any]:
    """Ranks from 1 within the block, 0 where null, and the sorted distinct strings."""
    if isinstance(strings, pa.ChunkedArray):
        strings = strings.combine_chunks()
    if not pa.types.is_dictionary(strings.type):
        strings = strings.dictionary_encode()
    codes = pc.fill_null(strings.indices, len(strings.dictionary)).to_numpy()
    used = np.zeros(len(strings.dictionary) + 1, np.bool_)
    used[codes] = True
    entries = strings.dictionary
    if not used[:-1].all():  # those of other rows of the same file
        entries = entries.filter(pa.array(used[:-1]))
    rising, is_new = _by_bytes(entries)
    ranks = np.empty(len(rising), np.uint32)
    ranks[rising] = np.cumsum(is_new)
    rank_of = np.zeros(len(used), np.uint32)
    rank_of[:-1][used[:-1]] = ranks
    distinct = entries.take(arrow_array(rising[is_new])).cast(pa.large_binary())
    return rank_of[codes], distinct


def _bytes_of(strings: Any) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """The bounds of large_binary strings among their bytes, and these."""
    _, bounds, data = strings.buffers()
    found = np.frombuffer(bounds or bytes(8), np.int64)[strings.offset :][: len(strings) + 1]
    return found, np.frombuffer(data or b"", np.uint8)


def _by_bytes(strings: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The order of strings by their bytes, and which of them, in this order, is not the one before.

    They are sorted by their first 8 bytes; only where these are the same, by all.
    """
    strings = strings.cast(pa.large_binary())
    words = _first_words(strings)
    order = np.argsort(words)
    words = words[order]
    is_new = np.ones(len(order), np.bool_)
    is_new[1:] = words[1:] != words[:-1]
    tied = ~is_new
    tied[:-1] |= tied[1:]
    if tied.any():
        few = order[tied]
        texts = strings.take(arrow_array(few))
        rising = pc.sort_indices(texts)
        order[tied] = few[rising.to_numpy()]
        texts = texts.take(rising)
        same = pc.equal(texts.slice(1), texts.slice(0, len(texts) - 1))
        is_new[np.flatnonzero(tied)[1:]] = ~same.to_numpy(zero_copy_only=False)
    return order, is_new


def _first_words(strings: Any) -> NDArray[np.uint64]:
    """The first 8 bytes of strings, or all and zeros, as numbers that rise as the bytes do."""
    bounds, data = _bytes_of(strings)
    padded = np.concatenate([data[bounds[0] : bounds[-1]], np.zeros(8, np.uint8)])
    eights = np.ndarray(len(padded) - 7, ">u8", padded, strides=1)
    words = eights[bounds[:-1] - bounds[0]].astype(np.uint64)
    sizes = np.minimum(np.diff(bounds), 8)
    behind = (8 * (8 - sizes)).astype(np.uint64)
    return np.where(sizes > 0, words >> behind << behind, np.uint64(0))


def write_dictionary(path: Path, strings: Any) -> list[Any]:
    """Write sorted strings; the file's checksum."""
    with _Writer(path) as writer:
        writer.write(strings)
    check = Checksum()
    check.update(path.read_bytes())
    return check.value()


def intern(folder: Path, indices: Sequence[int], column: int) -> None:
    """Number the strings of a column through all blocks: a file of the numbers that each block's
    own strings get, one block after the other, behind where each begins. It is one file, because
    there are logs of more blocks than files may be open."""
    blocks = [_mapped(dictionary_path(folder, index, column)) for index in indices]
    sizes = [4 * (1 + len(block)) for block in blocks]  # the first number, 0, is of no string
    begins = np.cumsum([8 * (len(blocks) + 1), *sizes])
    starts, count = [0] * len(blocks), 0
    with (
        _Writer(all_strings_path(folder, column)) as writer,
        numbers_path(folder, column).open("wb") as file,  # buffered: on a full disk, an error
    ):
        file.write(begins.data)
        file.truncate(begins[-1])
        for bound in _bounds(blocks):
            stops = [
                bisect_right(block, bound, start, key=_text)
                for block, start in zip(blocks, starts, strict=True)
            ]
            places = zip(blocks, starts, stops, strict=True)
            parts = [block.slice(start, stop - start) for block, start, stop in places]
            joined = pa.concat_arrays([chunk for part in parts for chunk in part.chunks])
            numbers, distinct = number_block(joined)
            numbers += np.uint32(count)
            ends = np.cumsum([len(part) for part in parts])
            of_blocks = zip(begins, starts, np.split(numbers, ends[:-1]), strict=False)
            for begin, start, of_block in of_blocks:
                file.seek(begin + 4 * (1 + start))
                file.write(of_block.data)
            writer.write(distinct)
            starts, count = stops, count + len(distinct)


def read_numbers(folder: Path, index: int, column: int) -> NDArray[np.uint32]:
    """The numbers in all blocks of a block's own strings, behind a 0."""
    with numbers_path(folder, column).open("rb") as file:
        file.seek(8 * index)
        begin, end = np.fromfile(file, np.int64, 2)
        file.seek(begin)
        return np.fromfile(file, np.uint32, (end - begin) // 4)


def _mapped(path: Path) -> Any:
    """A block's dictionary, of which only what is looked at comes into memory."""
    with pa.memory_map(str(path)) as file:  # closed, it is mapped as long as it is looked at
        return pa.ipc.open_file(file).read_all().column(0)


def _bounds(blocks: Sequence[Any]) -> list[bytes]:
    """Rising strings, the largest one included, that divide all into stretches of about
    `MERGED_ROWS` or `MERGED_BYTES`, whichever is less, judged by the ends of batches' parts."""
    ends = sorted(end for block in blocks for chunk in block.chunks for end in _ends(chunk))
    bounds, rows, size = {end for end, _, _ in ends[-1:]}, 0, 0
    for end, of_rows, of_bytes in ends:
        rows, size = rows + of_rows, size + of_bytes
        if rows >= MERGED_ROWS or size >= MERGED_BYTES:
            bounds.add(end)
            rows = size = 0
    return sorted(bounds)


def _ends(batch: Any) -> Iterator[tuple[bytes, int, int]]:
    """Of each part of a batch: the last string, and how many strings and bytes it has."""
    bounds, _ = _bytes_of(batch)
    if bounds[-1] - bounds[0] < PART_BYTES:  # as of most
        yield _text(batch[-1]), len(batch), int(bounds[-1] - bounds[0])
        return
    ends = bounds[1:] - bounds[0]
    last = np.flatnonzero(np.diff(ends // PART_BYTES, append=-1))
    counts, sizes = np.diff(last, prepend=-1), np.diff(ends[last], prepend=0)
    for place, count, size in zip(last.tolist(), counts.tolist(), sizes.tolist(), strict=True):
        yield _text(batch[place]), count, size


def _text(string: Any) -> bytes:
    return bytes(string.as_py())


class _Writer:
    """An Arrow file of strings, in batches of `BATCH_ROWS`."""

    def __init__(self, path: Path) -> None:
        self._schema = pa.schema([("string", pa.large_binary())])
        self._file = pa.ipc.new_file(path, self._schema)
        self._waiting = pa.nulls(0, pa.large_binary())

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *exception: object) -> None:
        if len(self._waiting):
            self._file.write_batch(self._batch(self._waiting))
        self._file.close()

    def _batch(self, strings: Any) -> Any:
        return pa.record_batch([strings], schema=self._schema)

    def write(self, strings: Any) -> None:
        waiting = pa.concat_arrays([self._waiting, strings])
        while len(waiting) >= BATCH_ROWS:
            self._file.write_batch(self._batch(waiting.slice(0, BATCH_ROWS)))
            waiting = waiting.slice(BATCH_ROWS)
        self._waiting = waiting


def _read(path: Path) -> Iterator[Any]:
    with pa.OSFile(str(path)) as file:
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number).column(0)


def of_numbers(path: Path, numbers: NDArray[np.uint32]) -> Any:
    """The strings that rising `numbers` stand for. A file of all strings has fixed batches."""
    parts = []
    with pa.OSFile(str(path)) as file:
        reader = pa.ipc.open_file(file)
        places = numbers.astype(np.int64) - 1
        batches, starts = np.unique(places // BATCH_ROWS, return_index=True)
        of_batches = np.split(places % BATCH_ROWS, starts[1:]) if len(starts) else []
        for batch, here in zip(batches.tolist(), of_batches, strict=True):
            parts.append(reader.get_batch(batch).column(0).take(arrow_array(here)))
    strings = pa.concat_arrays(parts) if parts else pa.nulls(0, pa.large_binary())
    return strings.cast(pa.large_string())


def to_numbers(path: Path, strings: Any) -> NDArray[np.uint32]:
    """The numbers of rising strings; 0 where a string is not in the file of all strings."""
    if isinstance(strings, pa.ChunkedArray):
        strings = strings.combine_chunks()
    strings = strings.cast(pa.large_binary())
    numbers = np.zeros(len(strings), np.uint32)
    start = before = 0
    for batch in _read(path):
        if start == len(strings):
            break
        stop = bisect_right(strings, _text(batch[-1]), start, key=_text)
        ranks = pc.index_in(strings.slice(start, stop - start), value_set=batch)
        numbers[start:stop] = pc.fill_null(pc.add(ranks, before + 1), 0).to_numpy()
        start, before = stop, before + len(batch)
    return numbers
