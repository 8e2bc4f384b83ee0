"""TorchRec's tables behind the engine's interface: its sharding, its exchange, its fused update.

What `DistributedModelParallel` makes of an `EmbeddingBagCollection` is driven in the order of its
pipelined trainer (`TrainPipelineSparseDist`): the next batch's sizes are exchanged ahead of this
step's lookup, and its ids behind it. The rows are cut out of TorchRec's autograd graph. Its
backward pass, which exchanges gradients and updates rows in one go, runs in `apply_gradients`:
there loss scales are undone, and a step that must not count is left out. An update within the
model's own backward pass could do neither.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainmark.distributed.mesh import Mesh
from trainmark.embeddings.engine import EmbeddingEngine
from trainmark.embeddings.placement.costs import STATE_BYTES
from trainmark.embeddings.placement.placement import Placement
from trainmark.embeddings.tables.batch import IdGroup, gradient
from trainmark.embeddings.tables.store import TableBytes, TablePart, init_part, table_shards
from trainmark.embeddings.torchrec_tables import (
    TableSpecs,
    device_type,
    feature_names,
    local_tensors,
    make_collection,
    make_plan,
    parts_of,
    problems,
    shard,
)
from trainmark.errors import raise_all
from trainmark.hardware.devices import Cluster

_FLOAT_BYTES = 4


@dataclass(kw_only=True, eq=False)
class TorchRecExchange:
    """A batch on its way: first its ids to the ranks that have the rows, then the rows."""

    context: Any
    ids: Any
    """TorchRec's awaitable: first of the sizes that ranks send each other, then of the ids."""
    id_bytes: int
    """Sent to other ranks."""
    samples: Sequence[int]
    """Of each rank."""
    padded: int
    """Samples in the request: at least this rank's."""
    stream: Any
    """Where ids are exchanged; None on a CPU."""
    ids_sent: bool = False
    rows: Any = None
    """TorchRec's awaitable of the rows, once they are on their way."""

    def send_ids(self) -> None:
        """Wait for the sizes, and start the exchange of the ids."""
        if not self.ids_sent:
            with self.stream or nullcontext():
                self.ids = self.ids.wait()
            self.ids_sent = True

    def received_ids(self) -> Any:
        """The ids that all ranks sent here, for use on the current stream."""
        self.send_ids()
        with self.stream or nullcontext():
            ids = self.ids.wait()
        if self.stream is not None:
            compute = torch.accelerator.current_stream()
            compute.wait_stream(self.stream)
            ids.record_stream(compute)
            self.context.record_stream(compute)
        return ids


class TorchRecEngine(nn.Module, EmbeddingEngine):
    """An EmbeddingBagCollection, sharded by TorchRec over all ranks.

    Args:
        specs: the tables.
        mesh: this rank's place among all; on the meta device nothing is allocated.
        placement: who holds what; by default TorchRec's own planner decides.
        cluster: what the ranks run on, also in a dry run.
    """

    def __init__(
        self, specs: TableSpecs, mesh: Mesh, placement: Placement | None, cluster: Cluster
    ) -> None:
        super().__init__()
        raise_all(problems(specs, placement))
        self.specs, self.mesh = specs, mesh
        collection = make_collection(specs)
        plan = make_plan(collection, specs, placement, cluster)
        self.parts = list(parts_of(plan, specs, mesh.rank))
        kinds = [sharding.sharding_type for sharding in plan.values()]
        self._num_cut = kinds.count("row_wise")
        # The gradients of row-wise tables are gathered, and gloo gathers only equal blocks.
        self._pads = self._num_cut > 0 and device_type(cluster) == "cpu"
        # Not submodules: whoever moves or trains a model's parameters must not find TorchRec's.
        self._unsharded = (collection, plan)
        self._sharded: tuple[Any, ...] = ()
        self._prepared: list[TorchRecExchange] = []
        self._looked_up: list[tuple[Tensor, Tensor]] = []
        self._places: Tensor | None = None
        """Where TorchRec returns each feature, which its sharding decides; None: in their order."""
        self.sent_bytes = {"ids": 0, "rows": 0, "gradients": 0}

    # --- forward

    def prepare(self, groups: Sequence[IdGroup], samples: Sequence[int]) -> TorchRecExchange:
        """Start to tell all ranks how many ids they will be sent."""
        module, own = self._module, samples[self.mesh.rank]
        padded = max(samples) if self._pads else own
        context = module.create_context()
        ids = module.input_dist(context, self._keyed(groups, own, padded))
        prepared = TorchRecExchange(
            context=context,
            ids=ids,
            id_bytes=_sent_bytes(ids, self.mesh.rank),
            samples=samples,
            padded=padded,
            stream=None if self._on_host else torch.accelerator.current_stream(),
        )
        self._prepared.append(prepared)
        return prepared

    def _keyed(self, groups: Sequence[IdGroup], samples: int, padded: int) -> Any:
        """The ids as TorchRec takes them, by feature. The samples that pad have none."""
        from torchrec import KeyedJaggedTensor

        tables, device = len(self.specs.rows), self.mesh.device
        dtype = torch.int32 if max(self.specs.rows) < 2**31 else torch.int64
        lengths_FB = torch.zeros(tables, padded, dtype=torch.int32, device=device)
        if self.specs.has_bags:
            values = self._ids_of_bags(groups, lengths_FB[:, :samples], dtype)
        else:
            ids_FB = torch.empty(tables, samples, dtype=dtype, device=device)
            for group in groups:
                for feature, ids_B in zip(group.features, group.ids, strict=True):
                    ids_FB[feature] = ids_B
            values = ids_FB.view(-1)
            lengths_FB[:, :samples] = 1
        return KeyedJaggedTensor(
            keys=feature_names(tables),
            values=values,
            lengths=lengths_FB.view(-1),
            stride=padded,
        )

    def _ids_of_bags(
        self, groups: Sequence[IdGroup], lengths_FB: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Those that are there, where a feature has several or none; fills in how many."""
        features, samples = lengths_FB.shape
        values = [torch.empty(0, dtype=dtype, device=lengths_FB.device)] * features
        for group in groups:
            for feature, ids in zip(group.features, group.ids, strict=True):
                there = ids.view(samples, -1) >= 0
                lengths_FB[feature] = there.sum(1)
                values[feature] = ids.view(samples, -1)[there].to(dtype)
        return torch.cat(values)

    def begin_step(self, lr: float) -> None:
        """FBGEMM keeps, with the rows that it looks up, the rate of their update."""
        optimizer = self._module.fused_optimizer
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()  # only hands the rate to the kernels

    def begin(self, prepared: TorchRecExchange) -> None:
        """Look up what all ranks requested of this one, and start to send it."""
        training = torch.is_grad_enabled()
        ids = prepared.received_ids()
        # FBGEMM's CPU operators exist for autograd alone, which inference mode bypasses.
        with torch.inference_mode(False), torch.set_grad_enabled(training):
            prepared.rows = self._module.compute_and_output_dist(prepared.context, ids)
        self._prepared.remove(prepared)
        # The device has work: the host may wait for the sizes of the next batch.
        for following in self._prepared:
            following.send_ids()

    def lookup(self, prepared: TorchRecExchange) -> Tensor:
        """[B, F, D] of a batch that was begun. In training, the result collects the gradient."""
        training = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(training):
            keyed = prepared.rows.wait()
        names = feature_names(len(self.specs.rows))
        if self._places is None and keyed.keys() != names:
            places = [keyed.keys().index(name) for name in names]
            self._places = torch.tensor(places, device=self.mesh.device)
        pooled: Tensor = keyed.values()
        samples = prepared.samples[self.mesh.rank]
        rows_BFD = pooled.detach()[:samples].view(samples, len(names), self.specs.dim)
        if self._places is not None:
            rows_BFD = _in_order(rows_BFD, self._places)
        if training:
            rows_BFD.requires_grad_()
            self._looked_up.append((pooled, rows_BFD))
            self._count(prepared)
        return rows_BFD

    # --- update

    def gradients(self) -> list[Tensor]:
        return [rows.grad for _, rows in self._looked_up if rows.grad is not None]

    def rows_in_use(self, prepared: TorchRecExchange) -> list[Tensor]:
        """Of nobody: an exchange of TorchRec's is read once, so steps cannot be checked."""
        raise NotImplementedError

    def row_gradients(self) -> list[Tensor]:
        return self.gradients()

    def forget(self) -> None:
        self._looked_up = []

    def apply_gradients(self, lr: float, gate: Tensor, unscale: Tensor | None = None) -> None:
        looked_up, self._looked_up = self._looked_up, []
        if self._on_host and not gate:  # here asking costs nothing
            return
        for pooled, rows in looked_up:
            grads_BFD = gradient(rows)
            if unscale is not None:
                grads_BFD = grads_BFD * unscale
            if not self._on_host:
                # With zeros, SGD and Adagrad leave rows and state exactly as they were.
                grads_BFD = torch.where(gate > 0, grads_BFD, torch.zeros_like(grads_BFD))
            pooled.backward(self._as_returned(grads_BFD, len(pooled)))

    def _as_returned(self, grads_BFD: Tensor, padded: int) -> Tensor:
        """Gradients in the order and size of what TorchRec returned."""
        if self._places is not None:
            grads_BFD = _in_order(grads_BFD, self._places.argsort())
        grads = grads_BFD.flatten(1)
        missing = padded - len(grads)
        return nn.functional.pad(grads, (0, 0, 0, missing)) if missing else grads

    # --- what is sent

    def _count(self, prepared: TorchRecExchange) -> None:
        """Count what a lookup in training sends to other ranks, and its gradients to come."""
        own, everybody = prepared.samples[self.mesh.rank], sum(prepared.samples)
        ranks, dim = self.mesh.world_size, self.specs.dim
        whole_here = sum(p.width for p in self.parts if p.num_rows == p.shape[0])
        whole_elsewhere = (len(self.specs.rows) - self._num_cut) * dim - whole_here
        # Of a row-wise table, a rank sends every other its share of each sum, and gets all
        # gradients.
        cut = self._num_cut * dim
        self.sent_bytes["ids"] += prepared.id_bytes
        self.sent_bytes["rows"] += (everybody - own) * (whole_here + cut) * _FLOAT_BYTES
        self.sent_bytes["gradients"] += own * (whole_elsewhere + cut * (ranks - 1)) * _FLOAT_BYTES

    # --- state

    @property
    def _module(self) -> Any:
        """TorchRec's sharded collection."""
        return self._sharded[0]

    @property
    def _on_host(self) -> bool:
        return self.mesh.device.type == "cpu"

    def init_weights(self, seed: int, bound: float | None = None) -> None:
        self._sharded = (shard(*self._unsharded, self.mesh),)
        for part, weight in zip(self.parts, self._part_weights(), strict=True):
            init_part(part, weight, seed, bound=bound)

    def table_weights(self) -> dict[str, Any]:
        weights = zip(self.parts, self._part_weights(), strict=True)
        return table_shards((part, "weight", rows) for part, rows in weights)

    def table_state(self) -> dict[str, Any]:
        if self.specs.optimizer == "sgd":
            return {}
        sums = zip(self.parts, self._part_sums(), strict=True)
        return table_shards((part, "sum", rows) for part, rows in sums)

    def device_bytes(self) -> TableBytes:
        _, plan = self._unsharded
        ranks = range(self.mesh.world_size)
        of_ranks = [_bytes(parts_of(plan, self.specs, rank), self.specs) for rank in ranks]
        return max(of_ranks, key=lambda found: found.total)

    def _part_weights(self) -> list[Tensor]:
        """This rank's rows, in the order of `parts`."""
        if not self._sharded:
            return [torch.empty(p.num_rows, p.width, device="meta") for p in self.parts]
        return local_tensors(self._module.state_dict(), "embedding_bags.{}.weight", self.parts)

    def _part_sums(self) -> list[Tensor]:
        """Adagrad's sums of squares of this rank's rows, in the order of `parts`."""
        if not self._sharded:
            per_row = self.specs.optimizer == "rowwise_adagrad"
            return [w[:, 0] if per_row else w for w in self._part_weights()]
        kept = self._module.fused_optimizer.state_dict()["state"]
        sums = {name: tensor for of_table in kept.values() for name, tensor in of_table.items()}
        return local_tensors(sums, "{}.momentum1", self.parts)


def _bytes(parts: Iterable[TablePart], specs: TableSpecs) -> TableBytes:
    """What parts take of a device's memory."""
    per_element, per_row = STATE_BYTES[specs.optimizer]
    weights = optimizer = 0
    for part in parts:
        elements = part.num_rows * part.width
        weights += elements * _FLOAT_BYTES
        optimizer += elements * per_element + part.num_rows * per_row
    return TableBytes(weights=weights, optimizer=optimizer)


def _in_order(rows_BFD: Tensor, places: Tensor) -> Tensor:
    """Features from their places: by whole rows, which is faster on a CPU than along one axis."""
    samples, features, dim = rows_BFD.shape
    places_BF = torch.arange(samples, device=places.device)[:, None] * features + places
    return rows_BFD.reshape(-1, dim).index_select(0, places_BF.flatten()).view_as(rows_BFD)


def _sent_bytes(ids: Any, rank: int) -> int:
    """Of the tensors that `ids` will send, those that go to other ranks."""
    return sum(
        (sum(sizes) - sizes[rank]) * tensor.element_size()
        for exchange in ids.awaitables
        for sizes, tensor in zip(exchange._input_splits, exchange._input_tensors, strict=True)
    )
