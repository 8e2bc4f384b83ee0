"""What `dlrm_scaling.py` measures: trainmark's step, with either engine, and TorchRec's trainer."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from trainmark import workloads
from trainmark.config import filled
from trainmark.distributed.mesh import Mesh
from trainmark.hardware.devices import Cluster
from trainmark.kernels.compiled import is_compiled_for
from trainmark.kernels.interaction import dot_interaction
from trainmark.run.loop import build_trainer
from trainmark.workloads.dlrm.data import ClickBatch
from trainmark.workloads.dlrm.model import build_model
from trainmark.workloads.dlrm.runs import DlrmRun

LR = 0.01
CPU = torch.device("cpu")
Step = Callable[[], Tensor]
"""Each call trains the next batch."""


def trainmark_step(cfg: DlrmRun, mesh: Mesh, pool: list[ClickBatch]) -> Step:
    """The loop's order: the next batch is prepared before this one's step."""
    trainer = build_trainer(cfg, workloads.load("dlrm"), mesh)
    batches = itertools.cycle(pool)
    ahead = [trainer.prepare(next(batches))]

    def step() -> Tensor:
        ahead.append(trainer.prepare(next(batches)))
        loss, _ = trainer.step(ahead.pop(0), LR)
        return loss

    return step


class WholeDlrm(nn.Module):
    """Tables and MLPs in one module, with its loss, as TorchRec's trainer wants it."""

    def __init__(self, cfg: DlrmRun, collection: nn.Module) -> None:
        super().__init__()
        model = build_model(cfg)
        self.bottom, self.top = (
            model.bottom.to_empty(device="cpu"),
            model.top.to_empty(device="cpu"),
        )
        if is_compiled_for(CPU, torch.float32):
            self.bottom.fused_dtype = self.top.fused_dtype = torch.float32
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.05, 0.05)
        self.collection = collection
        self.dim, self.num_features = cfg.model.embedding_dim, len(cfg.model.table_rows)

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        rows = self.collection(batch.sparse_features).values()
        x = self.bottom(batch.dense_features)
        rows_BFD = rows.view(-1, self.num_features, self.dim)
        logits = self.top(dot_interaction(x, rows_BFD)).squeeze(-1)
        loss = binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, loss.detach()


torch.fx.wrap("dot_interaction")


def own_step(cfg: DlrmRun, mesh: Mesh, pool: list[ClickBatch]) -> Step:
    """TorchRec's own trainer."""
    from torchrec import KeyedJaggedTensor
    from torchrec.datasets.utils import Batch
    from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.types import ShardingEnv, ShardingPlan
    from torchrec.optim import CombinedOptimizer, KeyedOptimizerWrapper

    from trainmark.embeddings.torchrec_tables import feature_names, make_collection, make_plan
    from trainmark.training.optimizers import make_optimizer
    from trainmark.workloads.dlrm.parallelize import torchrec_specs
    from trainmark.workloads.dlrm.sharding import place

    specs = torchrec_specs(cfg)
    collection = make_collection(specs)
    placement = place(cfg)
    plan = make_plan(collection, specs, placement, Cluster("cpu", 1, mesh.world_size))
    model = DistributedModelParallel(
        WholeDlrm(cfg, collection),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=CPU,
        plan=ShardingPlan({"collection": plan}),
        sharders=[EmbeddingBagCollectionSharder()],
    )
    for group in model.fused_optimizer.param_groups:
        group["lr"] = LR
    dense = {n: p for n, p in model.named_parameters() if "collection" not in n}

    def dense_optimizer(parameters: Any) -> torch.optim.Optimizer:
        name, eps = cfg.optimizer.name, filled(cfg.optimizer.eps)
        made = make_optimizer(name, parameters, eps=eps, beta1=0.9, beta2=0.999)
        for group in made.param_groups:
            group["lr"] = LR
        return made

    optimizer = CombinedOptimizer(
        [model.fused_optimizer, KeyedOptimizerWrapper(dense, dense_optimizer)]
    )
    pipeline = TrainPipelineSparseDist(model, optimizer, CPU)
    names = feature_names(len(specs.rows))

    def wide(batch: ClickBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        (group,) = batch.groups
        ids = group.ids.int().flatten()
        return batch.numerical.float(), ids, torch.ones_like(ids), batch.labels.float()

    def batches() -> Iterator[Batch]:
        for numerical, ids, lengths, labels in itertools.cycle([wide(batch) for batch in pool]):
            yield Batch(numerical, KeyedJaggedTensor(names, ids, lengths=lengths), labels)

    endless = batches()
    return lambda: pipeline.progress(endless)
