"""Operations on whole arrays, compiled where numba is installed, in numpy elsewhere.

Both give the same bytes.
"""

import atexit
import gc
import importlib.util
import mmap
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FAST = importlib.util.find_spec("numba") is not None
"""Whether the compiled loops are used. Tests turn it off."""

Array = NDArray[Any]
NO_KEYS: NDArray[np.int64] = np.empty(0, np.int64)
UNKNOWN = -1
"""No id."""
HUGE_BYTES = 4 << 20
"""Of a table that is worth huge pages."""


def _kernels() -> Any:
    from trainmark.clicklog.arrays import kernels

    return kernels


def load() -> None:
    """Load the compiled loops, and what these load when the first of them is called: half a second,
    which every process that is forked before would spend for itself.

    There is no garbage in it, for which Python would look a quarter of this time, and as long again
    before it ends.
    """
    collecting = gc.isenabled()
    gc.disable()
    count(np.zeros(1, np.uint8), 0)
    if collecting:
        gc.enable()
    atexit.register(gc.freeze)


def arrow_array(values: Array) -> Any:
    """A numpy array as Arrow's, without the detour over pandas that `pa.array` takes."""
    import pyarrow as pa

    buffer = pa.py_buffer(np.ascontiguousarray(values))
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [None, buffer])


def numpy_array(values: Any) -> Array:
    """Arrow's numbers, none of them null, as a numpy array; again without pandas, which Arrow wants
    before its version 26 even to say what numpy calls one of its types."""
    if hasattr(values, "combine_chunks"):
        values = values.combine_chunks()
    return np.from_dlpack(values)


class Scratch(threading.local):
    """Memory that a thread uses again and again: fresh pages cost as much as filling them."""

    def __init__(self) -> None:
        self._arrays: dict[str, Array] = {}

    def array(self, name: str, shape: int | tuple[int, ...], dtype: Any) -> Array:
        """An array of any content. The next call with this `name` overwrites it."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if name not in self._arrays or self._arrays[name].nbytes < size:
            self._arrays[name] = np.empty(size + size // 8, np.uint8)
        array: Array = self._arrays[name][:size].view(dtype).reshape(shape)
        return array


_scratch = Scratch()


def count(values: Array, value: int) -> int:
    """How many of `values` are `value`."""
    if FAST:
        return int(_kernels().count_equal(values, value))
    return int(np.count_nonzero(values == value))


def take(source: Array, order: Array, out: Array) -> None:
    """out[i] = source[order[i]], with a cast to a narrower type that holds all values."""
    row_bytes = source[:1].nbytes
    if FAST and source.ndim == 1:
        _kernels().take(source, order, out)
    elif FAST and row_bytes >= 8 and source.dtype == out.dtype:
        _kernels().take_rows(_bytes(source), order, _bytes(out), row_bytes)
    else:
        out[...] = source[order]


def put(source: Array, order: Array, out: Array) -> None:
    """out[order[i]] = source[i]."""
    if FAST and source.ndim == 1:
        _kernels().put(source, order, out)
    else:
        out[order] = source


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def replace(values: Array, old: int, new: int) -> int:
    """Put `new` wherever `old` is; how often that was."""
    if FAST:
        kind = values.dtype.type
        return int(_kernels().replace(values.reshape(-1), kind(old), kind(new)))
    where = values == old
    values[where] = new
    return int(np.count_nonzero(where))


def join(source: Array, starts: Array, sizes: Array) -> Array:
    """Segments of `source` one behind the other; valid until the next call in this thread."""
    out = _scratch.array("joined", (int(sizes.sum()), *source.shape[1:]), source.dtype)
    if FAST:
        width = source[:1].size
        _kernels().join(source.reshape(-1), starts * width, sizes * width, out.reshape(-1))
    elif len(starts):
        ends = (starts + sizes).tolist()
        parts = zip(starts.tolist(), ends, strict=True)
        np.concatenate([source[start:end] for start, end in parts], out=out)
    return out


def encode(values: Array, limit: int) -> tuple[Array, Array, Array] | None:
    """Codes, dictionary in order of appearance, and counts; None if more than `limit` are distinct,
    or are expected to be.

    What is returned holds until the next call in this thread.
    """
    limit = min(limit, 1 << 16)
    if not FAST:
        return _encode_slowly(values, limit)
    table = _scratch.array("table", 2 << limit.bit_length(), np.uint32)
    table.fill(0)
    codes = _scratch.array("codes", len(values), np.uint16)
    dictionary = _scratch.array("dictionary", limit, values.dtype)
    counts = _scratch.array("counts", limit, np.uint32)
    size = _kernels().encode(values, table, codes, dictionary, counts)
    return None if size < 0 else (codes, dictionary[:size], counts[:size])


def _encode_slowly(values: Array, limit: int) -> tuple[Array, Array, Array] | None:
    # Arrow numbers distinct values in order of appearance, too.
    encoded = arrow_array(values).dictionary_encode()
    if len(encoded.dictionary) > limit:
        return None
    codes = encoded.indices.to_numpy()
    counts = np.bincount(codes, minlength=len(encoded.dictionary)).astype(np.uint32)
    return codes.astype(np.uint16), encoded.dictionary.to_numpy(), counts


def number_in_turn(classes: Array, next_id: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ids that continue, for each class, at `next_id`, which moves on."""
    ids = np.empty(len(classes), np.int64)
    if FAST:
        _kernels().number_in_turn(classes, next_id, ids)
        return ids
    order = np.argsort(classes, kind="stable")
    grouped = classes[order]
    starts = np.flatnonzero(np.r_[True, grouped[1:] != grouped[:-1]][: len(grouped)])
    sizes = np.diff(np.r_[starts, len(grouped)])
    within = np.arange(len(grouped)) - np.repeat(starts, sizes)
    ids[order] = next_id[grouped] + within
    next_id[grouped[starts]] += sizes
    return ids


class IdLookup:
    """Ids by value, for part of a vocabulary.

    Args:
        values: distinct, rising, not 0; uint32 or uint64.
        ids: what belongs to them.
    """

    def __init__(self, values: Array, ids: NDArray[np.int32]) -> None:
        if FAST:
            self.table = empty_table(slots_for(len(values)), values.dtype)
            _kernels().insert(self.table, values, ids.view(np.uint32))
        else:
            self.values, self.ids = values, ids

    def write(self, path: Path) -> None:
        """Into a file that several processes may read."""
        arrays = [self.table] if FAST else [self.values, self.ids.astype(self.values.dtype)]
        with path.open("wb") as file:
            for array in arrays:
                file.write(array.data)

    @classmethod
    def read(cls, path: Path, dtype: Any) -> "IdLookup":
        """What was written."""
        lookup = cls.__new__(cls)
        if FAST:  # not mapped: a file's pages are small
            lookup.table = empty_table(path.stat().st_size // (2 * np.dtype(dtype).itemsize), dtype)
            with path.open("rb") as file:
                file.readinto(lookup.table.reshape(-1).view(np.uint8).data)
        else:
            lookup.values, ids = np.fromfile(path, dtype).reshape(2, -1)
            lookup.ids = ids.astype(np.int32)
        return lookup

    def __call__(self, values: Array, ids: Array, missing: int) -> None:
        """Set `ids`, of any signed type that holds them: to `missing` where a value is 0, to
        UNKNOWN where it is not known."""
        if FAST:
            _kernels().look_up(self.table, values, ids, missing, UNKNOWN)
            return
        ids.fill(UNKNOWN)
        ids[values == 0] = missing
        if len(self.values):
            where = np.searchsorted(self.values, values).clip(max=len(self.values) - 1)
            known = self.values[where] == values
            ids[known] = self.ids[where[known]]


def empty_table(slots: int, dtype: Any) -> Array:
    """Zeros [slots, 2]; a large table in huge pages, where the system has them: of each slot that
    is looked up in small ones, the processor would have to find the page, too."""
    size = slots * 2 * np.dtype(dtype).itemsize
    if size < HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros((slots, 2), dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # where the system has none
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(slots, 2)


def slots_for(entries: int) -> int:
    """Slots of a table that holds `entries` at a load of at most two thirds."""
    return 1 << max(entries * 3 // 2, 15).bit_length()
