"""Reads the data files of a checkpoint for DCP.

DCP plans and calls. Tensors are read a few chunks at a time, as writer.py writes them.
"""

import os
from collections.abc import Iterable, Iterator
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

from trainmark.checkpoint.data_files import DataFiles, in_parallel, slices
from trainmark.checkpoint.manifest import Chunk, Manifest, TensorEntry
from trainmark.checkpoint.storage import DTYPES, bytes_of, scratch_tensor
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
        asked = of_all_ranks(list(tensors)) if exact else [list(manifest.tensors)]
        self.unasked = set(manifest.tensors).difference(*asked)

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
            in_parallel(lambda item, chunk: _read_item(data, planner, item, chunk), jobs)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _read_item(data: DataFiles, planner: LoadPlanner, item: ReadItem, chunk: Chunk) -> None:
    name, destination = item.storage_index.fqn, planner.resolve_tensor(item)
    is_whole_chunk = tuple(item.lengths) == chunk.sizes
    if is_whole_chunk and destination.device.type == "cpu" and destination.is_contiguous():
        data.read(name, chunk, bytes_of(destination))
    else:
        read = scratch_tensor(data.scratch, chunk.sizes, destination.dtype)
        data.read(name, chunk, bytes_of(read))
        destination.copy_(read[slices(item.storage_offsets, item.lengths)])


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


def _listing(names: Iterable[str]) -> str:
    ordered = sorted(names)
    others = f" and {len(ordered) - 5} more" if len(ordered) > 5 else ""
    return ", ".join(ordered[:5]) + others
