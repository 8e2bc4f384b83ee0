"""A workload of two linear layers, to prove what the loop asks of one: pipeline and data parallel.

With the axis `pp`, rank 0 owns the first layer and rank 1 the second, and activations travel
between them, one micro-batch at a time; with `dp`, ranks share the batch and add their gradients.
"""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainmark.config import Better, Run, filled
from trainmark.contract import Data, Workload
from trainmark.distributed.mesh import Mesh
from trainmark.training.batches import BatchCounts, RankBatches
from trainmark.training.seeding import generator

ROWS = 230
WIDTH = 3


@dataclass(frozen=True, kw_only=True)
class ToyRun(Run):
    metric: ClassVar[str] = "error"
    better: ClassVar[Better] = "lower"

    poisoned_row: int | None = None
    """A row whose input is NaN."""
    signal_at: int | None = None
    """The step in which the last rank sends itself SIGTERM."""


@dataclass(frozen=True, kw_only=True)
class ToyBatch(BatchCounts):
    x: Tensor
    y: Tensor
    global_samples: int
    ready: Any = None


class ToyData(RankBatches):
    def __init__(self, cfg: ToyRun, split: str, dp_rank: int, dp_size: int) -> None:
        super().__init__(ROWS, cfg, split, dp_rank, dp_size, drops_last=False)
        self._poisoned_row = cfg.poisoned_row

    def describe(self, position: int) -> str:
        return f"the batch that ends at {position}"

    def __iter__(self) -> Iterator[ToyBatch]:
        for batch in self._to_come():
            share = self._share(batch)
            rows = torch.arange(share.start, share.stop)
            x = torch.sin(rows[:, None] * torch.arange(1.0, WIDTH + 1))
            if self._poisoned_row is not None:
                x[rows == self._poisoned_row] = float("nan")
            yield ToyBatch(
                x=x,
                y=torch.cos(rows * 0.7),
                global_samples=batch.size,
                tokens=5 * len(share),
                **self._counts(batch),
            )


class Stage(nn.Module):
    def __init__(self, name: str, fan_out: int) -> None:
        super().__init__()
        self.name = name
        self.linear = nn.Linear(WIDTH, fan_out)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class ToyTrainer:
    def __init__(self, stages: list[Stage], mesh: Mesh, cfg: ToyRun) -> None:
        self.stages, self.mesh, self.cfg = stages, mesh, cfg
        self._stage = mesh.coordinate("pp") if mesh.axes.get("pp", 1) > 1 else None
        self._parameters = {
            f"{stage.name}.{name}": p for stage in stages for name, p in stage.named_parameters()
        }
        self._applied = torch.zeros((), dtype=torch.int64)

    def prepare(self, batch: ToyBatch) -> ToyBatch:
        return batch

    def step(self, batch: ToyBatch, lr: float) -> tuple[Tensor, Tensor]:
        if batch.position == self.cfg.signal_at and self.mesh.rank == self.mesh.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        size = filled(self.cfg.micro_batch)
        for parameter in self._parameters.values():
            parameter.grad = None
        loss = torch.zeros(())
        for x, y in zip(batch.x.split(size), batch.y.split(size), strict=True):
            loss += self._micro_batch(x, y, batch.global_samples)
        # Only the last stage has a loss; its sum over all ranks is the same everywhere.
        loss = self._sum_over_ranks(loss)
        for parameter in self._parameters.values():
            if self.mesh.dp_size > 1:
                dist.all_reduce(parameter.grad, group=self.mesh.group("dp"))
        gate = torch.isfinite(loss)
        if gate:
            self._applied += 1
            with torch.no_grad():
                for parameter in self._parameters.values():
                    assert parameter.grad is not None
                    parameter.sub_(lr * parameter.grad)
        return loss, ~gate

    def _micro_batch(self, x: Tensor, y: Tensor, global_samples: int) -> Tensor:
        if self._stage == 0:
            hidden = self.stages[0](x)
            dist.send(hidden.detach(), dst=1)
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, src=1)
            hidden.backward(gradient)
            return torch.zeros(())
        hidden = torch.empty(len(x), WIDTH) if self._stage == 1 else self.stages[0](x)
        if self._stage == 1:
            dist.recv(hidden, src=0)
            hidden.requires_grad_()
        error = self.stages[-1](hidden).squeeze(1) - y
        loss = error.square().sum() / global_samples
        loss.backward()
        if self._stage == 1:
            assert hidden.grad is not None
            dist.send(hidden.grad, dst=0)
        return loss.detach()

    @torch.no_grad()
    def error(self, batch: ToyBatch) -> Tensor:
        """Sum of the squared errors, on the last stage."""
        if self._stage == 0:
            dist.send(self.stages[0](batch.x), dst=1)
            return torch.zeros(())
        hidden = torch.empty(batch.samples, WIDTH)
        if self._stage == 1:
            dist.recv(hidden, src=0)
        else:
            hidden = self.stages[0](batch.x)
        return (self.stages[-1](hidden).squeeze(1) - batch.y).square().sum()

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        if self.mesh.world_size > 1:
            dist.all_reduce(value)
        return value

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self._parameters.items()}

    def state_dict(self) -> dict[str, Tensor]:
        return {"applied": self._applied}


def _build_model(cfg: ToyRun) -> list[Stage]:
    with torch.device("meta"):
        return [Stage("first", WIDTH), Stage("second", 1)]


def _parallelize(model: list[Stage], mesh: Mesh, cfg: ToyRun) -> list[Stage]:
    return [model[mesh.coordinate("pp")]] if mesh.axes.get("pp", 1) > 1 else model


@torch.no_grad()
def _init_weights(parts: list[Stage], cfg: ToyRun, device: torch.device) -> None:
    for stage in parts:
        stage.to_empty(device=device)
        for name, parameter in stage.named_parameters():
            random = generator(device, cfg.seed, f"{stage.name}.{name}")
            parameter.uniform_(-1, 1, generator=random)


def _evaluate(trainer: ToyTrainer, data: Data[ToyBatch]) -> dict[str, float | None]:
    total = sum((trainer.error(batch) for batch in data), torch.zeros(()))
    return {"error": trainer._sum_over_ranks(total).item() / ROWS}


TOY: Workload[ToyRun, list[Stage], Stage, ToyBatch, ToyTrainer] = Workload(
    build_model=_build_model,
    parallelize=_parallelize,
    init_weights=_init_weights,
    build_data=ToyData,
    build_trainer=ToyTrainer,
    evaluate=_evaluate,
    held_out_splits=lambda cfg: ("test",),
    flops=lambda cfg, samples, tokens: {"model": 6.0 * samples},
    activation_bytes=lambda cfg: 0,
)
