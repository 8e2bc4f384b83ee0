"""The data files of a checkpoint, in safetensors format, written for DCP.

PyTorch's distributed checkpoint (DCP) plans and calls; the storage below is ours because its own
pickles. Tensors are written in chunks, a few at a time, so that no second copy of a large table
ever exists on the host.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from trainmark.checkpoint.manifest import (
    DTYPE_CODES,
    Chunk,
    FileEntry,
    Manifest,
    TensorEntry,
    crc32,
    write_manifest,
)
from trainmark.checkpoint.storage import WORKERS, Scratch, box, bytes_of, completed
from trainmark.distributed.mesh import is_distributed
from trainmark.files import fsync_folder

CHUNK_BYTES = 16 * 2**20


class Writer(StorageWriter):
    """Writes one data file per rank, then the manifest, then publishes the folder.

    DCP calls the methods from top to bottom.

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
        return completed(_write_data_file(file, plan.items, planner))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        write_manifest(self.folder, self._manifest(metadata, results))
        fsync_folder(self.folder)
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


# --- a data file


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
    scratch = Scratch()
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
            part = tensor[box(offsets, sizes)]
            yield _Piece(
                item.index, part, _sum(_tensor_data(item).chunk.offsets, offsets), byte_offset
            )
            byte_offset += part.nbytes


def _split(sizes: tuple[int, ...], limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a box into (offsets, sizes) of at most `limit` elements each, in row-major order."""
    if 0 in sizes:
        return
    if math.prod(sizes) <= limit:
        yield (0,) * len(sizes), sizes
        return
    num_rows, row_sizes = sizes[0], sizes[1:]
    rows_at_once = limit // math.prod(row_sizes)
    if rows_at_once == 0:  # one row is too large: cut each
        for row in range(num_rows):
            for offsets, part in _split(row_sizes, limit):
                yield (row, *offsets), (1, *part)
        return
    for row in range(0, num_rows, rows_at_once):
        yield (row, *(0,) * len(row_sizes)), (min(rows_at_once, num_rows - row), *row_sizes)


def _write_piece(path: Path, descriptor: int, piece: _Piece, scratch: Scratch) -> WriteResult:
    tensor = piece.tensor
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        tensor = scratch.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)
    data = bytes_of(tensor)
    _write_at(descriptor, data, piece.byte_offset)
    sizes = tuple(piece.tensor.shape)
    chunk = Chunk(piece.offsets, sizes, path.name, piece.byte_offset, len(data), crc32(data))
    return WriteResult(piece.index, len(data), chunk)


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


# --- what DCP has a rank write


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


def _sum(a: Iterable[int], b: Iterable[int]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))
