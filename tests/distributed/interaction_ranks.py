"""A toy interaction behind every engine's `lookup`, and the same model in plain PyTorch.

Ranks each train the plain model on all samples, and compare the parts of tables that they hold.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, embedding

from tests.distributed import small_dlrm, torchrec_ranks
from tests.distributed.joining import join
from tests.distributed.small_dlrm import CPU, DIM, TABLE_ROWS, config
from trainmark.distributed import mesh as meshes
from trainmark.distributed.mesh import Mesh, single
from trainmark.embeddings.engine import EmbeddingEngine
from trainmark.workloads.dlrm.data import build_data
from trainmark.workloads.dlrm.interactions import InteractionLayer
from trainmark.workloads.dlrm.mlp import Mlp
from trainmark.workloads.dlrm.model import Dlrm, build_model, init_weights
from trainmark.workloads.dlrm.parallelize import parallelize
from trainmark.workloads.dlrm.runs import DlrmRun, Optimizer
from trainmark.workloads.dlrm.step import DlrmTrainer

OPTIMIZERS = ("sgd", "adagrad")
EPS = 1e-3  # Adagrad divides by it: less would make much of sums that cancel


class Concatenation(InteractionLayer):
    """All vectors side by side, times weights of its own."""

    def __init__(self) -> None:
        super().__init__(self._scaled)
        self.factors = nn.Parameter(torch.empty(len(TABLE_ROWS) + 1, 1))

    def _scaled(self, x_BD: Tensor, rows_BFD: Tensor) -> Tensor:
        return (torch.cat([x_BD[:, None], rows_BFD], dim=1) * self.factors).flatten(1)


def trainer(cfg: DlrmRun, mesh: Mesh, engine: EmbeddingEngine | None = None) -> DlrmTrainer:
    """Trains a DLRM with the toy; with an engine of the caller's, if given."""
    cfg = dataclasses.replace(cfg, optimizer=Optimizer(name=cfg.optimizer.name, eps=EPS))
    model: Any = build_model(cfg)
    with torch.device("meta"):
        model.interaction = Concatenation()
        model.top = Mlp([(len(TABLE_ROWS) + 1) * DIM, *cfg.model.top_mlp], last_relu=False)
    (built,) = parallelize(model, mesh, cfg)
    assert isinstance(built, Dlrm)
    built.tables = engine or built.tables
    init_weights([built], cfg, mesh.device)
    model.interaction.factors.data.copy_(torch.linspace(0.5, 2, len(TABLE_ROWS) + 1)[:, None])
    return DlrmTrainer(built, mesh, cfg)


class Plain:
    """The same in PyTorch, dense gradients and all, of the weights that one process begins with."""

    def __init__(self, cfg: DlrmRun) -> None:
        begun = trainer(cfg, single(CPU))
        self.model: Any = begun.model
        self.model.bottom.fused_dtype = self.model.top.fused_dtype = None
        self.tables = [
            nn.Parameter(begun.weights()[f"tables.{i}.weight"].clone())
            for i in range(len(TABLE_ROWS))
        ]
        parameters = [*self.model.parameters(), *self.tables]
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(parameters, lr=cfg.lr)
            if cfg.optimizer.name == "sgd"
            else torch.optim.Adagrad(parameters, lr=cfg.lr, eps=EPS)
        )

    def step(self, numerical: Tensor, ids_FB: list[Tensor], labels: Tensor) -> float:
        x_BD = self.model.bottom(numerical)
        rows = [embedding(i.long(), table) for i, table in zip(ids_FB, self.tables, strict=True)]
        logits = self.model.top(self.model.interaction.plain(x_BD, torch.stack(rows, 1)))
        loss = binary_cross_entropy_with_logits(logits.squeeze(-1), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def check(built: DlrmTrainer, steps: int = 4) -> None:
    """Losses, weights and this rank's tables are those of plain PyTorch."""
    cfg, mesh = built.cfg, built.mesh
    alone = config(1, cfg.optimizer.name, global_batch=cfg.global_batch)
    plain = Plain(alone)
    ours = itertools.islice(build_data(cfg, "train", mesh.dp_rank, mesh.dp_size), steps)
    for mine, whole in zip(ours, build_data(alone, "train", 0, 1), strict=False):
        ids = {f: row for g in whole.groups for f, row in zip(g.features, g.ids, strict=True)}
        in_order = [ids[feature] for feature in sorted(ids)]
        expected = plain.step(whole.numerical.float(), in_order, whole.labels.float())
        loss, _ = built.step(built.prepare(mine), cfg.lr)
        assert abs(loss.item() - expected) < 1e-5 * expected
    held = built.weights()
    for name, parameter in plain.model.named_parameters():
        torch.testing.assert_close(held[name], parameter, rtol=1e-5, atol=1e-6)
    for i, table in enumerate(plain.tables):
        for found, part in small_dlrm.parts(held.get(f"tables.{i}.weight"), table):
            torch.testing.assert_close(found, part, rtol=1e-5, atol=1e-6)


def on_ranks(rank: int, folder: Path, engine: str) -> None:
    mesh = meshes.build(join(rank, 2, folder / f"store-{engine}"), {"dp": 2})
    for optimizer in OPTIMIZERS:
        if engine == "torchrec":
            cfg = torchrec_ranks.placed(2, "mixture", optimizer, folder)
        else:
            cfg = small_dlrm.placed(2, optimizer, "mixture_host", folder, micro_batch=24)
        check(trainer(cfg, mesh))
    dist.barrier()
    dist.destroy_process_group()
