"""Tensors of which each rank holds some boxes, such as embedding tables, for DCP.

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
class Box:
    """A part of a tensor on this rank."""

    offsets: tuple[int, ...]
    tensor: Tensor
    is_copy: bool = False
    """Whether another rank holds the same and writes it; this one is only filled."""


class Boxes:
    """This rank's boxes of one tensor. It has the attributes of a tensor that DCP asks for."""

    def __init__(self, shape: Sequence[int], boxes: Sequence[Box]) -> None:
        self.shape, self.boxes = torch.Size(shape), list(boxes)
        first = self.boxes[0].tensor
        self.dtype, self.layout, self.device = first.dtype, first.layout, first.device
        self.is_meta = first.is_meta

    def size(self) -> torch.Size:
        return self.shape

    def numel(self) -> int:
        """Elements on this rank."""
        return sum(box.tensor.numel() for box in self.boxes)

    def element_size(self) -> int:
        return self.dtype.itemsize

    def detach(self) -> "Boxes":
        return self  # tables have no gradient to begin with

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets, index),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(box.tensor),
                    size=self.shape,
                ),
            )
            for index, (box, chunk) in enumerate(
                zip(self.boxes, self.__create_chunk_list__(), strict=True)
            )
            if not box.is_copy
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(box.offsets), box.tensor.size()) for box in self.boxes
        ]

    def tensor_of(self, index: MetadataIndex) -> Tensor:
        """The box that DCP asks for."""
        # When loading, DCP says which box it is on this rank; when saving, which of all ranks'.
        boxes = self.boxes[index.index :][:1] if index.index is not None else []
        for box in [*boxes, *self.boxes]:
            if box.offsets == tuple(index.offset or ()):
                return box.tensor
        raise ValueError(f"This rank holds no box {index}.")


def first_rows(tensor: Any, count: int) -> Any:
    """The first rows of a tensor, or of what this rank holds of it as `Boxes`, in the same memory;
    None if it holds none of them."""
    if not isinstance(tensor, Boxes):
        return tensor[:count]
    boxes = [
        replace(box, tensor=box.tensor[: count - box.offsets[0]])
        for box in tensor.boxes
        if box.offsets[0] < count
    ]
    return Boxes((count, *tensor.shape[1:]), boxes) if boxes else None


class SavePlanner(DefaultSavePlanner):
    """DCP's own, which finds the tensor of a box."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.tensor_of(index) if isinstance(found, Boxes) else super().lookup_object(index)


class LoadPlanner(DefaultLoadPlanner):
    """DCP's own, which finds the tensor of a box."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        # DCP's own looks for tensors on the meta device, and fails on boxes.
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found = self.state_dict[index.fqn]
        return found.tensor_of(index) if isinstance(found, Boxes) else super().lookup_tensor(index)
