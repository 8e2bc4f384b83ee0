"""Strings as numbers, by interning: a string's number is its rank (from 1) among all, by bytes.

While parsing, every block numbers its own strings and keeps its sorted dictionary in a file. When
all blocks are there, their dictionaries are merged, a stretch at a time, which gives the sorted
dictionary of the whole column, and for each block the numbers of its own entries.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trainmark.checksums import Checksum

BATCH_ROWS = 1 << 12
"""Strings of a dictionary that are in memory at a time."""


def dictionary_path(folder: Path, index: int, column: int) -> Path:
    return folder / f"{index:06d}.{column}.arrow"


def numbers_path(folder: Path, index: int, column: int) -> Path:
    return folder / f"{index:06d}.{column}.numbers"


def all_strings_path(folder: Path, column: int) -> Path:
    return folder / f"strings.{column}.arrow"


def number_block(strings: Any) -> tuple[NDArray[np.uint32], Any]:
    """Ranks from 1 within the block, 0 where null, and the sorted distinct strings."""
    if isinstance(strings, pa.ChunkedArray):
        strings = strings.combine_chunks()
    encoded = strings.cast(pa.large_binary()).dictionary_encode()
    order = pc.sort_indices(encoded.dictionary)
    rank = np.empty(len(order) + 1, np.uint32)
    rank[order.to_numpy()] = np.arange(1, len(order) + 1, dtype=np.uint32)
    rank[-1] = 0
    codes = pc.fill_null(encoded.indices, len(order)).to_numpy()
    return rank[codes], encoded.dictionary.take(order)


def write_dictionary(path: Path, strings: Any) -> list[Any]:
    """Write sorted strings; the file's checksum."""
    with _Writer(path) as writer:
        writer.write(strings)
    check = Checksum()
    check.update(path.read_bytes())
    return check.value()


def intern(folder: Path, indices: Sequence[int], columns: Sequence[int]) -> None:
    """Number the strings of columns through all blocks, in place of each block's own numbers.

    Those of several columns are numbered together; their file of all strings is the first one's.
    """
    own = [(index, column) for index in indices for column in columns]
    blocks = [_Stretch(dictionary_path(folder, *place)) for place in own]
    files = [numbers_path(folder, *place).open("wb") for place in own]
    for file in files:
        file.write(np.zeros(1, np.uint32).data)  # the missing value
    count = 0
    with _Writer(all_strings_path(folder, columns[0])) as writer:
        while ends := [block.end() for block in blocks if len(block.strings)]:
            # No block has strings up to the smallest of these ends besides those in memory.
            bound = min(ends)
            parts = [block.take(bound) for block in blocks]
            distinct = pc.unique(pa.concat_arrays(parts))
            distinct = distinct.take(pc.sort_indices(distinct))
            for file, part in zip(files, parts, strict=True):
                ranks = pc.index_in(part, value_set=distinct).to_numpy()
                file.write((ranks + (count + 1)).astype(np.uint32).data)
            writer.write(distinct)
            count += len(distinct)
    for file in files:
        file.close()


class _Stretch:
    """The part of a block's dictionary that is in memory."""

    def __init__(self, path: Path) -> None:
        self._batches = _read(path)
        self.strings = next(self._batches, pa.array([], pa.large_binary()))

    def end(self) -> bytes:
        return bytes(self.strings[-1].as_py())

    def take(self, bound: bytes) -> Any:
        """Remove the strings up to `bound`."""
        within = pc.less_equal(self.strings, pa.scalar(bound, pa.large_binary()))
        count = pc.sum(within).as_py() or 0
        taken, self.strings = self.strings.slice(0, count), self.strings.slice(count)
        if not len(self.strings):
            self.strings = next(self._batches, self.strings)
        return taken


class _Writer:
    """An Arrow file of strings, in batches of `BATCH_ROWS`."""

    def __init__(self, path: Path) -> None:
        self._schema = pa.schema([("string", pa.large_binary())])
        self._file = pa.ipc.new_file(path, self._schema)
        self._waiting = pa.array([], pa.large_binary())

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
        for batch in np.unique(places // BATCH_ROWS).tolist():
            here = places[places // BATCH_ROWS == batch] - batch * BATCH_ROWS
            parts.append(reader.get_batch(batch).column(0).take(pa.array(here)))
    strings = pa.concat_arrays(parts) if parts else pa.array([], pa.large_binary())
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
        rest = strings.slice(start)
        stop = start + (pc.sum(pc.less_equal(rest, batch[-1])).as_py() or 0)
        ranks = pc.index_in(strings.slice(start, stop - start), value_set=batch)
        numbers[start:stop] = pc.fill_null(pc.add(ranks, before + 1), 0).to_numpy()
        start, before = stop, before + len(batch)
    return numbers
