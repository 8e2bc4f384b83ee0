"""Tensors of which each rank holds some shards, such as embedding tables, as DCP saves them.

A checkpoint knows a tensor by its global name and shape, and its chunks by their offsets. Any rank
may read what another wrote.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True, kw_only=True)
class LocalShard:
    """A part of a tensor on this rank."""

    offsets: tuple[int, ...]
    tensor: Tensor
    is_copy: bool = False
    """Whether another rank holds the same and writes it; this one is only filled."""


class LocalShards:
    """This rank's shards of one tensor. It has the attributes of a tensor that DCP asks for."""

    def __init__(self, shape: Sequence[int], shards: Sequence[LocalShard]) -> None:
        self.shape, self.shards = torch.Size(shape), list(shards)
        first = self.shards[0].tensor
        self.dtype, self.layout, self.device = first.dtype, first.layout, first.device
        self.is_meta = first.is_meta

    def size(self) -> torch.Size:
        return self.shape

    def numel(self) -> int:
        """Elements on this rank."""
        return sum(shard.tensor.numel() for shard in self.shards)

    def element_size(self) -> int:
        return self.dtype.itemsize

    def detach(self) -> "LocalShards":
        return self  # tables have no gradient to begin with

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets, index),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(shard.tensor),
                    size=self.shape,
                ),
            )
            for index, (shard, chunk) in enumerate(
                zip(self.shards, self.__create_chunk_list__(), strict=True)
            )
            if not shard.is_copy
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(shard.offsets), shard.tensor.size())
            for shard in self.shards
        ]

    def tensor_of(self, index: MetadataIndex) -> Tensor:
        """The shard that DCP asks for."""
        # When loading, DCP says which shard it is on this rank; when saving, which of all ranks'.
        shards = self.shards[index.index :][:1] if index.index is not None else []
        for shard in [*shards, *self.shards]:
            if shard.offsets == tuple(index.offset or ()):
                return shard.tensor
        raise ValueError(f"This rank holds no shard {index}.")


def first_rows(tensor: Any, count: int) -> Any:
    """A view of the first `count` rows of a tensor, or of `LocalShards`; None if this rank holds
    none of these rows."""
    if not isinstance(tensor, LocalShards):
        return tensor[:count]
    shards = [
        replace(shard, tensor=shard.tensor[: count - shard.offsets[0]])
        for shard in tensor.shards
        if shard.offsets[0] < count
    ]
    return LocalShards((count, *tensor.shape[1:]), shards) if shards else None


class SavePlanner(DefaultSavePlanner):
    """DCP's planner, which also knows `LocalShards`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return (
            found.tensor_of(index)
            if isinstance(found, LocalShards)
            else super().lookup_object(index)
        )


class LoadPlanner(DefaultLoadPlanner):
    """DCP's planner, which also knows `LocalShards`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        # DCP's method looks for tensors on the meta device, and fails on `LocalShards`.
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found = self.state_dict[index.fqn]
        return (
            found.tensor_of(index)
            if isinstance(found, LocalShards)
            else super().lookup_tensor(index)
        )
