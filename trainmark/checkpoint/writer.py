"""The data files of a checkpoint, in safetensors format.

PyTorch's distributed checkpoint (DCP) plans which rank writes what. The files are not DCP's, which
are pickled. Tensors are written in chunks, a few at a time, so that a large table is never copied
as a whole.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem

from trainmark.checkpoint.data_files import WORKERS, Scratch, slices
from trainmark.checkpoint.local_shards import SavePlanner
from trainmark.checkpoint.manifest import (
    Chunk,
    FileEntry,
    Manifest,
    TensorEntry,
    crc32,
    write_manifest,
)
from trainmark.checkpoint.storage import DTYPE_CODES, bytes_of, scratch_tensor
from trainmark.distributed.mesh import agreed, is_distributed
from trainmark.files import fsync_folder

CHUNK_BYTES = 16 * 2**20


# --- who writes what


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that becomes a chunk, and where it goes."""

    name: str
    tensor: Tensor
    offsets: tuple[int, ...]
    byte_offset: int


@dataclass(frozen=True, kw_only=True)
class Share:
    """What this rank writes of a checkpoint, and what is known of the whole."""

    rank: int
    header: bytes
    pieces: list[Piece]
    tensors: dict[str, TensorEntry]
    """The tensors of all ranks, without their chunks."""
    all_bytes: int
    """Bytes that all ranks write together; replicas count once."""


def plan_share(tensors: dict[str, Tensor], group: Any = None) -> Share:
    """Agree with all ranks on who writes what; each calls this with its own tensors.

    Args:
        tensors: by global name.
        group: the ranks; by default, all there are.
    """
    planner = SavePlanner()
    # Detached tensors share memory with the originals.
    planner.set_up_planner({name: tensor.detach() for name, tensor in tensors.items()})
    # Every rank makes the same global plan, and takes its own part.
    plans, metadata = planner.create_global_plan(agreed(planner.create_local_plan, group))
    rank = dist.get_rank(group) if is_distributed() else 0
    # Widest elements first, so that every tensor is aligned when the file is mapped to memory.
    items = sorted(plans[rank].items, key=lambda item: (-_dtype(item).itemsize, _entry_name(item)))
    header = _safetensors_header(items)
    return Share(
        rank=rank,
        header=header,
        pieces=list(_pieces(items, planner, byte_offset=len(header))),
        tensors=_tensors(metadata),
        all_bytes=sum(_byte_length(item) for plan in plans for item in plan.items),
    )


def _tensors(metadata: Metadata) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(tuple(entry.size), DTYPE_CODES[entry.properties.dtype], ())
        for name, entry in sorted(metadata.state_dict_metadata.items())
        if isinstance(entry, TensorStorageMetadata)
    }


# --- a checkpoint's folder

Written = list[tuple[str, Chunk]]
"""Chunks, each with its tensor's name."""


def write_share(folder: Path, share: Share) -> Written:
    """Write this rank's data file into `folder`, through to the disk."""
    if not share.pieces:
        return []  # no data, no file
    path = folder / f"rank-{share.rank:05d}.safetensors"
    scratch = Scratch()
    with open(path, "xb", buffering=0) as file, ThreadPoolExecutor(WORKERS) as pool:
        _write_at(file.fileno(), memoryview(share.header), 0)
        written = list(
            pool.map(lambda piece: _write_piece(path, file.fileno(), piece, scratch), share.pieces)
        )
        os.fsync(file.fileno())
    return written


def complete(
    folder: Path, share: Share, written: Sequence[Written], step: int, state: dict[str, Any]
) -> None:
    """Write the manifest of what all ranks have written; one of them calls this."""
    chunks: dict[str, list[Chunk]] = {name: [] for name in share.tensors}
    for name, chunk in (pair for of_rank in written for pair in of_rank):
        chunks[name].append(chunk)
    tensors = {
        name: TensorEntry(
            entry.shape, entry.dtype, tuple(sorted(chunks[name], key=lambda chunk: chunk.offsets))
        )
        for name, entry in share.tensors.items()
    }
    files = {path.name: _file_entry(path) for path in sorted(folder.glob("rank-*.safetensors"))}
    write_manifest(folder, Manifest("trainmark.checkpoint/1", step, state, files, tensors))
    fsync_folder(folder)


# --- a data file


def _safetensors_header(items: Iterable[WriteItem]) -> bytes:
    entries, end = {}, 0
    for item in items:
        begin, end = end, end + _byte_length(item)
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


def _pieces(items: Iterable[WriteItem], planner: SavePlanner, byte_offset: int) -> Iterator[Piece]:
    for item in items:
        tensor = cast(Tensor, planner.resolve_data(item))
        for offsets, sizes in _split(tuple(tensor.shape), CHUNK_BYTES // tensor.itemsize):
            part = tensor[slices(offsets, sizes)]
            begin = _sum(_tensor_data(item).chunk.offsets, offsets)
            yield Piece(item.index.fqn, part, begin, byte_offset)
            byte_offset += part.nbytes


def _split(sizes: tuple[int, ...], limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a tensor of these sizes into parts of at most `limit` elements, in row-major order.

    Yields the offsets and the sizes of each part.
    """
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


def _write_piece(path: Path, descriptor: int, piece: Piece, scratch: Scratch) -> tuple[str, Chunk]:
    tensor = piece.tensor
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        tensor = scratch_tensor(scratch, tuple(tensor.shape), tensor.dtype).copy_(tensor)
    data = bytes_of(tensor)
    _write_at(descriptor, data, piece.byte_offset)
    sizes = tuple(piece.tensor.shape)
    chunk = Chunk(piece.offsets, sizes, path.name, piece.byte_offset, len(data), crc32(data))
    return piece.name, chunk


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


# --- what DCP has a rank write


def _tensor_data(item: WriteItem) -> TensorWriteData:
    return cast(TensorWriteData, item.tensor_data)  # None for pickled objects alone


def _dtype(item: WriteItem) -> torch.dtype:
    return _tensor_data(item).properties.dtype


def _byte_length(item: WriteItem) -> int:
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
