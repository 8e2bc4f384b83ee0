"""What an engine of many ranks needs to talk to others: process groups, indices on the device."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainmark.distributed.mesh import Mesh
from trainmark.embeddings.exchange.all_to_all import Exchange
from trainmark.embeddings.exchange.buckets import Buckets
from trainmark.embeddings.exchange.layout import Layouts, bags_by_slot
from trainmark.embeddings.exchange.routes import Routes, SlotRows
from trainmark.embeddings.tables.batch import IdGroup
from trainmark.hardware.backends import collectives
from trainmark.kernels.pool_rows import Bags


class Connection:
    """Made when the first batch is prepared; a dry run needs none."""

    def __init__(self, routes: Routes, mesh: Mesh, ids_type: torch.dtype, force: bool) -> None:
        self._device, self._ids_type, self._routes = mesh.device, ids_type, routes
        self.group, ids_group = mesh.group("dp"), mesh.background_group
        if self.group is None and force:
            self.group, ids_group = group_of_one(mesh.device), dist.new_group()
        self.rows = Exchange(self.group, mesh.dp_rank, mesh.device)
        self.ids = Exchange(ids_group, mesh.dp_rank, mesh.device)
        self._whole = self._slots_of(routes.whole_parts())
        self._replicas = self._slots_of(routes.slot_rows(routes.replicas))
        self.buckets = Buckets(routes, mesh.device) if routes.cut_stores else None
        self.layouts = Layouts(routes, mesh.dp_rank, mesh.device)
        self.finite = torch.ones((), device=mesh.device)
        """1 until a gradient row of the step is not finite, then 0."""
        self._slots: dict[tuple[int, ...], Tensor] = {}
        self._replica_bags: dict[int, Bags] = {}

    def join(self, groups: Sequence[IdGroup], samples: int) -> Tensor:
        """[slots, B] ids of all features, in the type in which they travel."""
        shape = (self._routes.num_slots, samples)
        ids_SB = torch.empty(shape, dtype=self._ids_type, device=self._device)
        for group in groups:
            key = tuple(group.features)
            if key not in self._slots:  # copied to the device only once
                slots = [slot for feature in key for slot in self._routes.slots(feature)]
                self._slots[key] = self._indices(slots)
            ids = group.ids if group.ids.dim() == 2 else group.ids.transpose(1, 2).flatten(0, 1)
            ids_SB[self._slots[key]] = ids.to(self._ids_type)
        return ids_SB

    def whole_rows(self, ids_SB: Tensor) -> Tensor:
        """[slots, B] rows of the receivers' stores, of parts that get all ids of a feature."""
        return self._rows(ids_SB, *self._whole)

    def replica_rows(self, ids_SB: Tensor) -> Tensor:
        """The same of tables that lie on every device."""
        return self._rows(ids_SB, *self._replicas)

    def replica_bags(self, samples: int) -> Bags | None:
        """How those are added up, if several make a row."""
        routes = self._routes
        if not routes.has_bags:
            return None
        if samples not in self._replica_bags:
            hotness = [routes.hotness[table] for table in routes.replicas.tables]
            self._replica_bags[samples] = bags_by_slot(hotness, [samples], self._device)
        return self._replica_bags[samples]

    def _rows(self, ids_SB: Tensor, slots: Tensor, rows_S3: Tensor) -> Tensor:
        ids = ids_SB.index_select(0, slots)
        first, last, shift = rows_S3.unbind(1)
        rows = ids + shift[:, None]
        if not self._routes.has_bags:
            return rows
        return torch.where((ids >= first[:, None]) & (ids < last[:, None]), rows, -1)

    def _slots_of(self, found: list[SlotRows]) -> tuple[Tensor, Tensor]:
        """The slots, and of each the rows that it looks up, with what leads to those of a store."""
        rows = [(*slot.rows, slot.start - slot.rows[0]) for slot in found]
        rows_S3 = torch.tensor(rows, dtype=self._ids_type, device=self._device).view(-1, 3)
        return self._indices([slot.slot for slot in found]), rows_S3

    def _indices(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def group_of_one(device: torch.device) -> Any:
    """A process group of this process alone."""
    if not dist.is_initialized():
        backend = collectives(device)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD
