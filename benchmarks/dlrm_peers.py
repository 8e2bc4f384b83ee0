"""DLRM as users of other software would train it, for side-by-side measurements.

| peer | tables | everything else |
|---|---|---|
| `pytorch` | one `nn.Embedding(sparse=True)` over all tables, `torch.optim.SGD` | shared |
| `fbgemm` | FBGEMM's table-batched embeddings, SGD fused into their backward pass | shared |
| `torchrec` | EmbeddingBagCollection, DistributedModelParallel, TrainPipelineSparseDist | its own |
| `torchrec-compiled` | the same | shared |

What they share is what a competent user writes: a compiled dense part under bf16 autocast, with its
interaction padded to a width that tensor cores like, and fused SGD. `torchrec` is its example as it
stands: its own network, not compiled, under bf16 autocast.

Batches are ready-made for each peer (int64 ids, float32 numbers, offsets) and lie on the device,
those of `torchrec` in pinned host memory, from where its pipeline copies them; whatever a peer does
with the ids themselves (sorting, distribution) is in its step.

A peer has `batch(clicks)`, which makes its kind of batch, and `train(batches)`, which takes a step
for each batch and gives the loss. `train` rather than `step`, because TorchRec's pipeline wants to
see batches ahead.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, pad

from trainmark.training.precision import autocast
from trainmark.workloads.dlrm.runs import Model


@dataclass(frozen=True)
class Clicks:
    """Samples on the device, as every peer can take them."""

    numerical_BN: Tensor
    """float32"""
    ids_FB: Tensor
    """int64 rows of each feature's own table"""
    labels_B: Tensor
    """float32"""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What to train, and how."""

    model: Model
    lr: float
    device: torch.device
    precision: str = "bf16"
    compile: bool = True


class Dense(nn.Module):
    """Both MLPs, the dot interaction and the loss: compiled as one."""

    lower: Tensor

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        model, self._setting = setting.model, setting
        num_vectors = len(model.table_rows) + 1
        self._width = model.interaction_width
        with setting.device:
            self.bottom = mlp([model.numerical_features, *model.bottom_mlp], last_relu=True)
            self.top = mlp([self._width, *model.top_mlp], last_relu=False)
            row, column = torch.tril_indices(num_vectors, num_vectors, offset=-1)
            self.register_buffer("lower", row * num_vectors + column, persistent=False)
        if setting.compile:
            self.compile(dynamic=False)

    def forward(self, numerical_BN: Tensor, rows_BFD: Tensor, labels_B: Tensor) -> Tensor:
        with autocast(self._setting.precision, self._setting.device):
            x_BD = self.bottom(numerical_BN)
            vectors_BVD = torch.cat([x_BD.unsqueeze(1), rows_BFD.to(x_BD.dtype)], dim=1)
            dots_BVV = torch.bmm(vectors_BVD, vectors_BVD.transpose(1, 2))
            # Faster in the backward pass than the dots[:, row, column] of the published models.
            dots_BP = dots_BVV.flatten(1).index_select(1, self.lower)
            joined = torch.cat([x_BD, dots_BP], dim=1)
            logits_B = self.top(pad(joined, (0, self._width - joined.shape[1]))).squeeze(-1)
        return binary_cross_entropy_with_logits(logits_B.float(), labels_B)

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self._setting.lr, fused=True)


def mlp(widths: list[int], *, last_relu: bool) -> nn.Sequential:
    layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths)]
    flat = list(itertools.chain.from_iterable(layers))
    return nn.Sequential(*(flat if last_relu else flat[:-1]))


def _fill(weight: Tensor, rows: int) -> None:
    weight.uniform_(-(rows**-0.5), rows**-0.5)


# --- plain PyTorch


class PlainPytorch:
    """All tables in one `nn.Embedding`: 26 would launch 26 times as many small kernels."""

    def __init__(self, setting: Setting) -> None:
        rows = setting.model.table_rows
        self.dense = Dense(setting)
        starts = list(itertools.accumulate(rows, initial=0))
        weight = torch.empty(starts[-1], setting.model.embedding_dim, device=setting.device)
        self.tables = [weight[a:b] for a, b in itertools.pairwise(starts)]
        for table in self.tables:
            _fill(table, len(table))
        self._embedding = nn.Embedding.from_pretrained(weight, freeze=False, sparse=True)
        self._starts_F = torch.tensor(starts[:-1], device=setting.device)
        sparse = torch.optim.SGD(self._embedding.parameters(), lr=setting.lr)
        self._optimizers = [sparse, self.dense.optimizer()]

    def batch(self, clicks: Clicks) -> Clicks:
        return clicks

    def train(self, batches: Iterable[Clicks]) -> Iterator[Tensor]:
        return map(self._step, batches)

    def _step(self, batch: Clicks) -> Tensor:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        rows_BFD = self._embedding(batch.ids_FB.t() + self._starts_F)
        loss = self.dense(batch.numerical_BN, rows_BFD, batch.labels_B)
        loss.backward()
        for optimizer in self._optimizers:
            optimizer.step()
        return loss.detach()


# --- FBGEMM


@dataclass(frozen=True)
class Bags:
    """A batch as table-batched embeddings take it: the bags of all features, one after another."""

    numerical_BN: Tensor
    ids: Tensor
    offsets: Tensor
    labels_B: Tensor


class FbgemmTables:
    """The sparse update happens inside the backward pass.

    Args:
        dense: the rest of the network, which takes numbers, rows and labels.
        options: for FBGEMM.
    """

    def __init__(self, setting: Setting, dense: Any, **options: Any) -> None:
        from fbgemm_gpu.split_embedding_configs import SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            EmbeddingLocation,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        model, on_gpu = setting.model, setting.device.type == "cuda"
        place = (
            (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
            if on_gpu
            else (EmbeddingLocation.HOST, ComputeDevice.CPU)
        )
        self.dense = dense
        self._shape = (-1, len(model.table_rows), model.embedding_dim)
        self._embeddings = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, model.embedding_dim, *place) for rows in model.table_rows],
            learning_rate=setting.lr,
            # The dense part computes in bf16 anyhow; this saves it a conversion.
            output_dtype=SparseType.BF16 if on_gpu else SparseType.FP32,
            device=setting.device,
            **options,
        )
        self.tables = self._embeddings.split_embedding_weights()
        for table in self.tables:
            _fill(table, len(table))
        self._optimizer = self.dense.optimizer()

    def train(self, batches: Iterable[Bags]) -> Iterator[Tensor]:
        return map(self._step, batches)

    def _step(self, batch: Bags) -> Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        rows_BFD = self._embeddings(batch.ids, batch.offsets).view(self._shape)
        loss = self.dense(batch.numerical_BN, rows_BFD, batch.labels_B)
        loss.backward()
        self._optimizer.step()
        return loss.detach()


class Fbgemm(FbgemmTables):
    def __init__(self, setting: Setting) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType

        super().__init__(setting, Dense(setting), optimizer=EmbOptimType.EXACT_SGD)

    def batch(self, clicks: Clicks) -> Bags:
        ids = clicks.ids_FB.reshape(-1)
        offsets = torch.arange(len(ids) + 1, device=ids.device)
        return Bags(clicks.numerical_BN, ids, offsets, clicks.labels_B)


# --- TorchRec


def import_torchrec() -> Any:
    """TorchRec; where FBGEMM was packed without its inference kernels, with stand-ins for them."""
    try:
        from stub_missing_operators import stub_missing_operators
    except ImportError:
        pass
    else:
        global _stand_ins
        _stand_ins = stub_missing_operators()
    import torchrec

    return torchrec


_stand_ins: list[Any] = []
"""Operators live as long as the objects that define them."""


class TorchrecTables:
    """One rank of TorchRec's usual set-up; the optimiser of the tables is fused."""

    def __init__(self, setting: Setting) -> None:
        torchrec = import_torchrec()
        from torch.distributed.optim import (
            _apply_optimizer_in_backward as apply_optimizer_in_backward,
        )

        start_one_rank(setting.device)
        model, self._setting = setting.model, setting
        self.names = [f"t{i}" for i in range(len(model.table_rows))]
        self.collection = torchrec.EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                torchrec.EmbeddingBagConfig(
                    name=name,
                    num_embeddings=rows,
                    embedding_dim=model.embedding_dim,
                    feature_names=[name],
                )
                for name, rows in zip(self.names, model.table_rows, strict=True)
            ],
        )
        sgd = torch.optim.SGD
        apply_optimizer_in_backward(sgd, self.collection.parameters(), {"lr": setting.lr})

    def pipeline(self, model: nn.Module, path: str, dense: dict[str, nn.Parameter]) -> Any:
        """Trains `model`, which has the collection at `path`, and these other parameters."""
        from torchrec.distributed import DistributedModelParallel
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
        from torchrec.optim.keyed import KeyedOptimizerWrapper

        setting = self._setting
        parallel = DistributedModelParallel(
            model,
            device=setting.device,
            plan=self._plan(path),
            sharders=[EmbeddingBagCollectionSharder()],
        )
        optimizer = KeyedOptimizerWrapper(
            dense, lambda parameters: torch.optim.SGD(parameters, lr=setting.lr, fused=True)
        )
        state = {k.split(".")[-2]: v for k, v in parallel.state_dict().items() if path in k}
        self.weights = [state[name].local_shards()[0].tensor for name in self.names]
        return TrainPipelineSparseDist(parallel, optimizer, setting.device)

    def _plan(self, path: str) -> Any:
        """Whole tables, fused kernels: on one device nothing else makes sense."""
        from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
        from torchrec.distributed.types import ShardingPlan

        kind = self._setting.device.type
        whole = table_wise(rank=0, device=kind, compute_kernel="fused")
        return ShardingPlan(
            plan={
                path: construct_module_sharding_plan(
                    self.collection,
                    dict.fromkeys(self.names, whole),
                    local_size=1,
                    world_size=1,
                    device_type=kind,
                )
            }
        )

    def bags(self, clicks: Clicks) -> Any:
        from torchrec import KeyedJaggedTensor

        ids = clicks.ids_FB.reshape(-1)
        lengths = torch.ones_like(ids, dtype=torch.int32)
        return KeyedJaggedTensor(self.names, ids, lengths=lengths)


def _outputs(pipeline: Any, batches: Iterable[Any]) -> Iterator[Any]:
    waiting = iter(batches)
    while True:
        try:
            yield pipeline.progress(waiting)
        except StopIteration:
            return


class TorchrecExample:
    """TorchRec's network as its example trains it."""

    def __init__(self, setting: Setting) -> None:
        tables, model = TorchrecTables(setting), setting.model
        from torchrec.models.dlrm import DLRM, DLRMTrain

        network = DLRM(
            embedding_bag_collection=tables.collection,
            dense_in_features=model.numerical_features,
            dense_arch_layer_sizes=list(model.bottom_mlp),
            over_arch_layer_sizes=list(model.top_mlp),
            dense_device=setting.device,
        )
        path = "model.sparse_arch.embedding_bag_collection"
        trained = DLRMTrain(network)
        self.mlps = {name: p for name, p in trained.named_parameters() if path not in name}
        self._pipeline = tables.pipeline(trained, path, self.mlps)
        self._tables, self._setting, self.tables = tables, setting, tables.weights

    def batch(self, clicks: Clicks) -> Any:
        from torchrec.datasets.utils import Batch

        on_host = Clicks(clicks.numerical_BN.cpu(), clicks.ids_FB.cpu(), clicks.labels_B.cpu())
        batch = Batch(on_host.numerical_BN, self._tables.bags(on_host), on_host.labels_B)
        return batch.pin_memory() if self._setting.device.type == "cuda" else batch

    def train(self, batches: Iterable[Any]) -> Iterator[Tensor]:
        with autocast(self._setting.precision, self._setting.device):
            for loss, _, _ in _outputs(self._pipeline, batches):
                yield loss


class TorchrecModel(nn.Module):
    """What `TrainPipelineSparseDist` wants: a batch in, (loss, outputs) out."""

    def __init__(self, tables: nn.Module, dense: Dense, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.tables, self.dense, self._shape = tables, dense, shape

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        rows_BFD = self.tables(batch.ids).values().view(self._shape)
        loss = self.dense(batch.numerical_BN, rows_BFD, batch.labels_B)
        return loss, loss.detach()


class TorchrecCompiled:
    """TorchRec's tables under the dense part that the peers share."""

    def __init__(self, setting: Setting) -> None:
        tables, self.dense = TorchrecTables(setting), Dense(setting)
        shape = (-1, len(tables.names), setting.model.embedding_dim)
        model = TorchrecModel(tables.collection, self.dense, shape)
        self._pipeline = tables.pipeline(model, "tables", dict(self.dense.named_parameters()))
        self._tables, self.tables = tables, tables.weights

    def batch(self, clicks: Clicks) -> Any:
        return _pipelineable(clicks.numerical_BN, self._tables.bags(clicks), clicks.labels_B)

    def train(self, batches: Iterable[Any]) -> Iterator[Tensor]:
        return _outputs(self._pipeline, batches)


def _pipelineable(numerical_BN: Tensor, ids: Any, labels_B: Tensor) -> Any:
    """A batch that TorchRec's pipeline can move between devices and streams."""
    from torchrec.streamable import Pipelineable

    @dataclass
    class Batch(Pipelineable):
        numerical_BN: Tensor
        ids: Any
        labels_B: Tensor

        def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
            return Batch(
                self.numerical_BN.to(device, non_blocking=non_blocking),
                self.ids.to(device, non_blocking=non_blocking),
                self.labels_B.to(device, non_blocking=non_blocking),
            )

        def record_stream(self, stream: Any) -> None:
            for part in (self.numerical_BN, self.ids, self.labels_B):
                part.record_stream(stream)

        def pin_memory(self) -> "Batch":
            return Batch(
                self.numerical_BN.pin_memory(), self.ids.pin_memory(), self.labels_B.pin_memory()
            )

    return Batch(numerical_BN, ids, labels_B)


def start_one_rank(device: torch.device) -> None:
    """TorchRec trains within a process group, be it of one rank."""
    import torch.distributed as dist

    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


PEERS: dict[str, Callable[[Setting], Any]] = {
    "pytorch": PlainPytorch,
    "fbgemm": Fbgemm,
    "torchrec": TorchrecExample,
    "torchrec-compiled": TorchrecCompiled,
}


def missing(peer: str) -> str | None:
    """Why a peer cannot be measured here; None if it can."""
    try:
        if peer == "fbgemm":
            import fbgemm_gpu  # noqa: F401
        elif peer.startswith("torchrec"):
            import_torchrec()
    except Exception as error:  # a wheel for another torch fails in many ways
        return f"{peer} cannot be imported: {type(error).__name__}: {error}"
    return None
