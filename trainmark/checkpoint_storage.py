"""The data files of a checkpoint, in safetensors format, written and read for DCP.

PyTorch's distributed checkpoint (DCP) plans and calls; the storage below is ours because its own
pickles. Tensors are written and read in chunks, a few at a time, so that no second copy of a large
table ever exists on the host.
"""

import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from trainmark.checkpoint_manifest import (
    DTYPE_CODES,
    DTYPES,
    Chunk,
    DamagedError,
    FileEntry,
    Manifest,
    TensorEntry,
    crc32,
    read_manifest,
    write_manifest,
)
from trainmark.errors import raise_all

T = TypeVar("T")

CHUNK_BYTES = 16 * 2**20
WORKERS = 4  # times CHUNK_BYTES: the most host memory that a device's tensors pass through

# --- writing; DCP calls the methods from top to bottom


class Writer(StorageWriter):
    """Writes one data file per rank, then the manifest, then publishes the folder.

    Args:
        folder: where the files go, under a name that no reader looks for.
        step: for the manifest.
        state: for the manifest.
        prepare: called with the bytes needed, on the coordinating rank, before anything is written.
        publish: called with the finished folder, on the coordinating rank.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        state: dict[str, Any],
        prepare: Callable[[int], None],
        publish: Callable[[Path], None],
    ) -> None:
        self.folder = folder
        self.step = step
        self.state = state
        self.prepare = prepare
        self.publish = publish
        self.is_coordinator = False

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return False  # DCP asks when it has to guess a storage from a path

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.prepare(sum(byte_length(item) for plan in plans for item in plan.items))
        self.folder.mkdir()
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        rank = dist.get_rank() if is_distributed() else 0
        file = self.folder / f"rank-{rank:05d}.safetensors"
        return _completed(_write_data_file(file, plan.items, planner))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        write_manifest(self.folder, self._manifest(metadata, results))
        sync_folder(self.folder)
        self.publish(self.folder)

    def _manifest(self, metadata: Metadata, results: list[list[WriteResult]]) -> Manifest:
        chunks: dict[str, list[Chunk]] = {name: [] for name in metadata.state_dict_metadata}
        for result in (result for of_rank in results for result in of_rank):
            chunks[result.index.fqn].append(result.storage_data)
        tensors = {
            name: TensorEntry(
                shape=tuple(entry.size),
                dtype=DTYPE_CODES[entry.properties.dtype],
                chunks=tuple(sorted(chunks[name], key=lambda chunk: chunk.offsets)),
            )
            for name, entry in sorted(metadata.state_dict_metadata.items())
            if isinstance(entry, TensorStorageMetadata)
        }
        files = {
            path.name: _file_entry(path) for path in sorted(self.folder.glob("rank-*.safetensors"))
        }
        return Manifest("trainmark.checkpoint/1", self.step, self.state, files, tensors)

    def remove_unfinished(self) -> None:
        """Remove what an exception has left; to be called on all ranks in any case."""
        if self.is_coordinator:
            shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class _Piece:
    """A part of a tensor that becomes a chunk, and where it goes."""

    index: MetadataIndex
    tensor: Tensor
    offsets: tuple[int, ...]
    byte_offset: int


def _write_data_file(
    path: Path, items: Sequence[WriteItem], planner: SavePlanner
) -> list[WriteResult]:
    if not any(map(byte_length, items)):
        return []  # no data, no file
    # Widest elements first, so that every tensor is aligned when the file is mapped to memory.
    items = sorted(items, key=lambda item: (-_dtype(item).itemsize, _entry_name(item)))
    header = _safetensors_header(items)
    pieces = _pieces(items, planner, byte_offset=len(header))
    scratch = _Scratch()
    with open(path, "xb", buffering=0) as file, ThreadPoolExecutor(WORKERS) as pool:
        _write_at(file.fileno(), memoryview(header), 0)
        written = list(
            pool.map(lambda piece: _write_piece(path, file.fileno(), piece, scratch), pieces)
        )
        os.fsync(file.fileno())
    return written


def _safetensors_header(items: Iterable[WriteItem]) -> bytes:
    entries, end = {}, 0
    for item in items:
        begin, end = end, end + byte_length(item)
        entries[_entry_name(item)] = {
            "dtype": DTYPE_CODES[_dtype(item)],
            "shape": list(_tensor_data(item).chunk.sizes),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _file_entry(path: Path) -> FileEntry:
    with open(path, "rb") as file:
        length = file.read(8)
        header = length + file.read(int.from_bytes(length, "little"))
    return FileEntry(path.stat().st_size, len(header), crc32(header))


def _pieces(items: Iterable[WriteItem], planner: SavePlanner, byte_offset: int) -> Iterator[_Piece]:
    for item in items:
        tensor = cast(Tensor, planner.resolve_data(item))
        for offsets, sizes in _split(tuple(tensor.shape), CHUNK_BYTES // tensor.itemsize):
            part = tensor[_box(offsets, sizes)]
            yield _Piece(
                item.index, part, _sum(_tensor_data(item).chunk.offsets, offsets), byte_offset
            )
            byte_offset += part.nbytes


def _split(sizes: tuple[int, ...], most: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a box into (offsets, sizes) of at most `most` elements each, in row-major order."""
    if 0 in sizes:
        return
    if math.prod(sizes) <= most:
        yield (0,) * len(sizes), sizes
        return
    num_rows, row_sizes = sizes[0], sizes[1:]
    rows_at_once = most // math.prod(row_sizes)
    if rows_at_once == 0:  # one row is too large: cut each
        for row in range(num_rows):
            for offsets, part in _split(row_sizes, most):
                yield (row, *offsets), (1, *part)
        return
    for row in range(0, num_rows, rows_at_once):
        yield (row, *(0,) * len(row_sizes)), (min(rows_at_once, num_rows - row), *row_sizes)


def _write_piece(path: Path, descriptor: int, piece: _Piece, scratch: "_Scratch") -> WriteResult:
    tensor = piece.tensor
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        tensor = scratch.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)
    data = _bytes_of(tensor)
    _write_at(descriptor, data, piece.byte_offset)
    sizes = tuple(piece.tensor.shape)
    chunk = Chunk(piece.offsets, sizes, path.name, piece.byte_offset, len(data), crc32(data))
    return WriteResult(piece.index, len(data), chunk)


def _tensor_data(item: WriteItem) -> TensorWriteData:
    return cast(TensorWriteData, item.tensor_data)  # None for pickled objects alone


def _dtype(item: WriteItem) -> torch.dtype:
    return _tensor_data(item).properties.dtype


def byte_length(item: WriteItem) -> int:
    """Of what DCP has a rank write."""
    return math.prod(_tensor_data(item).chunk.sizes) * _dtype(item).itemsize


def _entry_name(item: WriteItem) -> str:
    """The tensor's name; of a shard, also which part it is, as in `table[0:500,0:64]`."""
    data = _tensor_data(item)
    if data.chunk.sizes == data.size:
        return item.index.fqn
    ends = _sum(data.chunk.offsets, data.chunk.sizes)
    ranges = (f"{begin}:{end}" for begin, end in zip(data.chunk.offsets, ends, strict=True))
    return f"{item.index.fqn}[{','.join(ranges)}]"


# --- reading; DCP calls the methods from top to bottom


class Reader(StorageReader):
    """Reads and checks the chunks that the planner asks for."""

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
        return _completed(None)


def read_all(path: Path) -> None:
    """Read and check every byte of a checkpoint, and keep nothing."""
    manifest = read_manifest(path)
    chunks = [(name, chunk) for name, entry in manifest.tensors.items() for chunk in entry.chunks]
    with DataFiles(path, manifest, manifest.files) as data:
        _in_parallel(lambda name, chunk: data.read(name, chunk), chunks)


class DataFiles:
    """Data files of a checkpoint, open for reading; no byte leaves unchecked."""

    def __init__(self, path: Path, manifest: Manifest, files: Iterable[str]) -> None:
        self.path = path
        self.manifest = manifest
        self.files = sorted(files)
        self.descriptors: dict[str, int] = {}
        self.scratch = _Scratch()

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
        data = _bytes_of(into)
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
        destination.copy_(data.read(name, chunk)[_box(item.storage_offsets, item.lengths)])


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


# --- small things


class _Scratch(threading.local):
    """Memory for one chunk, for each thread that asks, used again and again.

    Blocks that are allocated and freed by turns pile up in malloc's pools, one of each thread:
    loading a table could take nearly its size besides.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        needed = math.prod(shape) * dtype.itemsize
        if needed > len(self._bytes):
            self._bytes = torch.empty(needed, dtype=torch.uint8)
        return self._bytes[:needed].view(dtype).view(shape)


def is_distributed() -> bool:
    """Whether there are other ranks to agree with."""
    return dist.is_available() and dist.is_initialized()


def of_all_ranks(value: T) -> list[T]:
    """Every rank's value, in the order of the ranks, on all of them."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def sync_folder(path: Path) -> None:
    """Have the names in a folder on disk, so that a power cut does not undo a rename."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _in_parallel(action: Callable[..., object], jobs: Iterable[tuple[Any, ...]]) -> None:
    def run(job: tuple[Any, ...]) -> None:  # drops the result, which may be large
        action(*job)

    with ThreadPoolExecutor(WORKERS) as pool:
        for _ in pool.map(run, jobs):  # passes on the first exception and cancels the rest
            pass


def _completed(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _box(offsets: Iterable[int], sizes: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + size) for o, size in zip(offsets, sizes, strict=True))


def _sum(a: Iterable[int], b: Iterable[int]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    return cast(Any, tensor.view(-1).view(torch.uint8).numpy()).data


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _read_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Fill `data`; at the end of the file the rest stays as it is, for the checksum to notice."""
    while data and (received := os.preadv(descriptor, [data], offset)):
        data, offset = data[received:], offset + received


def _listing(names: Iterable[str]) -> str:
    ordered = sorted(names)
    others = f" and {len(ordered) - 5} more" if len(ordered) > 5 else ""
    return ", ".join(ordered[:5]) + others
