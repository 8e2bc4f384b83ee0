"""What an engine of many ranks needs to talk to others: process groups, indices on the device."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainmark.distributed.mesh import Mesh
from trainmark.embeddings.exchange.all_to_all import Exchange
from trainmark.embeddings.exchange.buckets import Buckets
from trainmark.embeddings.exchange.layout import Layouts
from trainmark.embeddings.exchange.routes import Routes
from trainmark.embeddings.tables.batch import IdGroup


class Connection:
    """Made when the first batch is prepared; a dry run needs none."""

    def __init__(self, routes: Routes, mesh: Mesh, ids_type: torch.dtype, force: bool) -> None:
        self._device, self._ids_type, self._routes = mesh.device, ids_type, routes
        self.group, ids_group = mesh.group("dp"), mesh.background_group
        if self.group is None and force:
            self.group, ids_group = group_of_one(mesh.device), dist.new_group()
        self.rows = Exchange(self.group, mesh.dp_rank, mesh.device)
        self.ids = Exchange(ids_group, mesh.dp_rank, mesh.device)
        whole = routes.whole_parts()
        self.whole_features = self._indices([feature for feature, _ in whole])
        self.whole_starts = self._starts([start for _, start in whole])
        replicas = routes.replicas
        self.replica_features = self._indices(list(replicas.tables))
        self.replica_starts = self._starts(replicas.starts[:-1])
        self.buckets = Buckets(routes, mesh.device) if routes.cut_stores else None
        self.layouts = Layouts(routes, mesh.dp_rank, mesh.device)
        self.finite = torch.ones((), device=mesh.device)
        """1 until a gradient row of the step is not finite, then 0."""
        self._features: dict[tuple[int, ...], Tensor] = {}

    def join(self, groups: Sequence[IdGroup], samples: int) -> Tensor:
        """[F, B] ids of all features, in the type in which they travel."""
        shape = (self._routes.num_features, samples)
        ids_FB = torch.empty(shape, dtype=self._ids_type, device=self._device)
        for group in groups:
            key = tuple(group.features)
            if key not in self._features:  # copied to the device only once
                self._features[key] = self._indices(group.features)
            ids_FB[self._features[key]] = group.ids.to(self._ids_type)
        return ids_FB

    def _indices(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _starts(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=self._ids_type, device=self._device)[:, None]


def group_of_one(device: torch.device) -> Any:
    """A process group of this process alone."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD
