"""Reads the data files of a checkpoint for DCP, and checks every byte.

DCP plans and calls. Tensors are read a few chunks at a time, as writer.py writes them.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from trainmark.checkpoint.manifest import (
    DTYPES,
    Chunk,
    DamagedError,
    Manifest,
    TensorEntry,
    crc32,
    read_manifest,
)
from trainmark.checkpoint.storage import WORKERS, Scratch, bytes_of, slices
from trainmark.distributed.mesh import of_all_ranks
from trainmark.errors import raise_all


class Reader(StorageReader):
    """Reads and checks the chunks that the planner asks for; DCP calls from top to bottom."""

    def __init__(
        self, path: Path, manifest: Manifest, tensors: dict[str, Tensor], exact: bool
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.tensors = tensors
        self.unasked = set(manifest.tensors) - _names_on_all_ranks(tensors) if exact else set()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return False  # DCP asks when it has to guess a storage from a path

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({name: _dcp_entry(entry) for name, entry in self.manifest.tensors.items()})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        # Here, because DCP passes an error of one rank on to all: none is left waiting.
        problems = list(_mismatches(self.tensors, self.manifest.tensors))
        if self.unasked:
            problems.append(f"only in the checkpoint: {_listing(self.unasked)}")
        raise_all(f"Checkpoint {self.path}: {problem}." for problem in problems)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        chunks = {
            MetadataIndex(name, torch.Size(chunk.offsets)): chunk
            for name in self.tensors
            for chunk in self.manifest.tensors[name].chunks
        }
        jobs = [(item, chunks[item.storage_index]) for item in plan.items]
        files = {chunk.file for _, chunk in jobs}
        with DataFiles(self.path, self.manifest, files) as data:
            _in_parallel(lambda item, chunk: _read_item(data, planner, item, chunk), jobs)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def read_all(path: Path) -> None:
    """Read and check every byte of a checkpoint, and keep nothing."""
    manifest = read_manifest(path)
    chunks = [(name, chunk) for name, entry in manifest.tensors.items() for chunk in entry.chunks]
    with DataFiles(path, manifest, manifest.files) as data:
        _in_parallel(lambda name, chunk: data.read(name, chunk), chunks)


# --- data files


class DataFiles:
    """Data files of a checkpoint, open for reading; every byte that is read is checked."""

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

    def read(self, name: str, chunk: Chunk, into: Tensor | None = None) -> Tensor:
        """The checked content of a chunk of tensor `name`.

        Args:
            name: the tensor.
            chunk: one of its chunks.
            into: the memory to read to, contiguous and on the host. If not given, it is this
                thread's own, until its next read.
        """
        if into is None:
            into = self.scratch.empty(chunk.sizes, DTYPES[self.manifest.tensors[name].dtype])
        data = bytes_of(into)
        _read_at(self.descriptors[chunk.file], data, chunk.byte_offset)
        if crc32(data) != chunk.crc32:
            end = chunk.byte_offset + chunk.byte_length
            raise DamagedError(
                f"{self.path / chunk.file} is damaged: tensor {name!r} (in bytes "
                f"{chunk.byte_offset} to {end} of the file) is not as it was written."
            )
        return into


def _read_item(data: DataFiles, planner: LoadPlanner, item: ReadItem, chunk: Chunk) -> None:
    name, destination = item.storage_index.fqn, planner.resolve_tensor(item)
    is_whole_chunk = tuple(item.lengths) == chunk.sizes
    if is_whole_chunk and destination.device.type == "cpu" and destination.is_contiguous():
        data.read(name, chunk, into=destination)
    else:
        destination.copy_(data.read(name, chunk)[slices(item.storage_offsets, item.lengths)])


def _in_parallel(action: Callable[..., object], jobs: Iterable[tuple[Any, ...]]) -> None:
    def run(job: tuple[Any, ...]) -> None:  # drops the result, which may be large
        action(*job)

    with ThreadPoolExecutor(WORKERS) as pool:
        for _ in pool.map(run, jobs):  # passes on the first exception and cancels the rest
            pass


def _read_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Fill `data`; at the end of the file the rest stays as it is, for the checksum to notice."""
    while data and (received := os.preadv(descriptor, [data], offset)):
        data, offset = data[received:], offset + received


# --- what is asked for and what is there


def _dcp_entry(entry: TensorEntry) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(dtype=DTYPES[entry.dtype]),
        torch.Size(entry.shape),
        [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks],
    )


def _mismatches(asked: dict[str, Tensor], stored: dict[str, TensorEntry]) -> Iterator[str]:
    if missing := asked.keys() - stored.keys():
        yield f"not in the checkpoint: {_listing(missing)}"
    for name in sorted(asked.keys() & stored.keys()):
        tensor, entry = asked[name], stored[name]
        if (tensor.dtype, tuple(tensor.shape)) != (DTYPES[entry.dtype], entry.shape):
            yield (
                f"tensor {name!r} is {DTYPES[entry.dtype]} {list(entry.shape)} there "
                f"and {tensor.dtype} {list(tensor.shape)} here"
            )


def _names_on_all_ranks(tensors: dict[str, Tensor]) -> set[str]:
    return set().union(*of_all_ranks(list(tensors)))


def _listing(names: Iterable[str]) -> str:
    ordered = sorted(names)
    others = f" and {len(ordered) - 5} more" if len(ordered) > 5 else ""
    return ", ".join(ordered[:5]) + others
