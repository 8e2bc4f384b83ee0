"""Reads the data files of a checkpoint without torch, and checks every byte."""

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainmark.checkpoint.manifest import Chunk, DamagedError, Manifest, crc32, read_manifest

WORKERS = 4  # times a chunk's bytes: the most host memory that a device's tensors pass through
NUMPY_TYPES = {
    **{"F64": "f8", "F32": "f4", "F16": "f2", "C64": "c8", "BOOL": "?"},
    **{"I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1"},
    **{"U64": "u8", "U32": "u4", "U16": "u2", "U8": "u1"},
}
"""numpy's types by safetensors' names."""


class Scratch(threading.local):
    """Memory for one chunk per thread, used again and again.

    Allocating and freeing such blocks would fill malloc's pools, one per thread: loading a table
    could take nearly twice its size.
    """

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def empty(self, count: int) -> NDArray[np.uint8]:
        if count > len(self._bytes):
            self._bytes = np.empty(count, np.uint8)
        return self._bytes[:count]


def slices(offsets: Iterable[int], sizes: Iterable[int]) -> tuple[slice, ...]:
    """The index of a part of a tensor."""
    return tuple(slice(o, o + size) for o, size in zip(offsets, sizes, strict=True))


class DataFiles:
    """Data files of a checkpoint, open for reading."""

    def __init__(self, path: Path, manifest: Manifest, files: Iterable[str]) -> None:
        self.path = path
        self.manifest = manifest
        self.files = sorted(files)
        self.descriptors: dict[str, int] = {}
        self.scratch = Scratch()

    def __enter__(self) -> "DataFiles":
        try:
            for file in self.files:
                self._open(file)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self.descriptors.values():
            os.close(descriptor)

    def _open(self, file: str) -> None:
        path, entry = self.path / file, self.manifest.files[file]
        try:
            descriptor = self.descriptors[file] = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise DamagedError(f"{path} is missing.") from None
        size = os.fstat(descriptor).st_size
        if size != entry.byte_length:
            raise DamagedError(
                f"{path} is damaged: it has {size} bytes, and {entry.byte_length} were written."
            )
        if crc32(os.pread(descriptor, entry.header_length, 0)) != entry.header_crc32:
            raise DamagedError(f"{path} is damaged: its header is not as it was written.")

    def read(self, name: str, chunk: Chunk, into: memoryview) -> None:
        """Fill `into` with a chunk of tensor `name`, and check it."""
        _read_at(self.descriptors[chunk.file], into, chunk.byte_offset)
        if crc32(into) != chunk.crc32:
            end = chunk.byte_offset + chunk.byte_length
            raise DamagedError(
                f"{self.path / chunk.file} is damaged: tensor {name!r} (in bytes "
                f"{chunk.byte_offset} to {end} of the file) is not as it was written."
            )


def read_arrays(path: Path, names: Iterable[str]) -> dict[str, NDArray[Any]]:
    """Whole tensors of a checkpoint, by name, of types that numpy has."""
    manifest = read_manifest(path)
    entries = {name: manifest.tensors[name] for name in names}
    arrays = {name: np.empty(e.shape, NUMPY_TYPES[e.dtype]) for name, e in entries.items()}
    fill_arrays(path, manifest, arrays)
    return arrays


def fill_arrays(path: Path, manifest: Manifest, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Read whole tensors, by name, into arrays of their shapes and sizes."""
    jobs = [(name, chunk) for name in arrays for chunk in manifest.tensors[name].chunks]

    def read(name: str, chunk: Chunk) -> None:
        of_chunk: Any = (
            *slices(chunk.offsets, chunk.sizes),
            ...,
        )  # a view of single numbers, too
        place = arrays[name][of_chunk]
        part = place if place.flags.c_contiguous else np.empty_like(place)
        data.read(name, chunk, part.reshape(-1).view(np.uint8).data)
        if part is not place:
            place[...] = part

    with DataFiles(path, manifest, {chunk.file for _, chunk in jobs}) as data:
        in_parallel(read, jobs)


def read_all(path: Path) -> None:
    """Read and check every byte of a checkpoint, and keep nothing."""
    manifest = read_manifest(path)
    chunks = [(name, chunk) for name, entry in manifest.tensors.items() for chunk in entry.chunks]
    with DataFiles(path, manifest, manifest.files) as data:
        in_parallel(
            lambda name, chunk: data.read(name, chunk, data.scratch.empty(chunk.byte_length).data),
            chunks,
        )


def in_parallel(action: Callable[..., object], jobs: Iterable[tuple[Any, ...]]) -> None:
    def run(job: tuple[Any, ...]) -> None:  # drops the result, which may be large
        action(*job)

    with ThreadPoolExecutor(WORKERS) as pool:
        for _ in pool.map(run, jobs):  # passes on the first exception and cancels the rest
            pass


def _read_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Fill `data`; at the end of the file the rest stays as it is, for the checksum to notice."""
    while data and (received := os.preadv(descriptor, [data], offset)):
        data, offset = data[received:], offset + received
