"""A whole workload in one file: bright squares on dark images, told by their place.

It is added to the registry and nowhere else, which proves that shared code knows no workload.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainmark.config import Hidden, Run, filled
from trainmark.contract import Data, Definition, Metrics, Workload
from trainmark.distributed.mesh import Mesh
from trainmark.hardware.devices import Cluster
from trainmark.training.batches import RankBatches
from trainmark.training.seeding import generator

SIDE, CLASSES = 8, 4
ROWS = {"train": 1024, "test": 256}


@dataclass(frozen=True, kw_only=True)
class ImageRun(Run):
    """An image classifier."""

    workload: Hidden = "images"
    global_batch: int | None = 64
    hidden: int = 16
    """Width of the hidden layer."""


@dataclass(frozen=True, kw_only=True)
class Images:
    """A batch, and what is prepared of it: on a CPU they are the same."""

    pixels: Tensor
    labels: Tensor
    samples: int
    position: int
    partial: bool
    global_samples: int
    tokens: int = 0
    ready: None = None


class ImageData(RankBatches):
    def __init__(self, cfg: ImageRun, split: str, dp_rank: int, dp_size: int) -> None:
        super().__init__(ROWS[split], cfg, split, dp_rank, dp_size, drops_last=False)
        random = generator(torch.device("cpu"), cfg.seed, split)
        self._labels = torch.randint(CLASSES, (ROWS[split],), generator=random)
        self._pixels = torch.rand(ROWS[split], SIDE, SIDE, generator=random)
        half = SIDE // 2
        for image, label in zip(self._pixels, self._labels.tolist(), strict=True):
            row, column = divmod(label, 2)
            image[row * half : (row + 1) * half, column * half : (column + 1) * half] += 0.5

    def describe(self, position: int) -> str:
        return f"the images before number {position}"

    def __iter__(self) -> Iterator[Images]:
        for whole in self._to_come():
            rows = self._share(whole)
            part = slice(rows.start, rows.stop)
            yield Images(
                pixels=self._pixels[part],
                labels=self._labels[part],
                samples=len(rows),
                position=whole.position,
                partial=whole.size < self._batches.size,
                global_samples=whole.size,
            )


class ImageTrainer:
    def __init__(self, parts: list[nn.Sequential], mesh: Mesh, cfg: ImageRun) -> None:
        (self.model,), self.mesh = parts, mesh

    def prepare(self, batch: Images) -> Images:
        return batch

    def step(self, prepared: Images, lr: float) -> tuple[Tensor, Tensor]:
        self.model.zero_grad()
        logits = self.model(prepared.pixels)
        loss = cross_entropy(logits, prepared.labels, reduction="sum") / prepared.global_samples
        loss.backward()
        loss = loss.detach()
        for tensor in [loss, *(p.grad for p in self.model.parameters() if p.grad is not None)]:
            self.mesh.add_over_dp(tensor)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.sub_(torch.where(loss.isfinite(), lr * filled(parameter.grad), 0.0))
        return loss, ~loss.isfinite()

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def host_state(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, host_state: dict[str, Any]) -> None: ...


def build_model(cfg: ImageRun) -> nn.Sequential:
    with torch.device("meta"):
        layers = nn.Linear(SIDE * SIDE, cfg.hidden), nn.ReLU(), nn.Linear(cfg.hidden, CLASSES)
        return nn.Sequential(nn.Flatten(), *layers)


@torch.no_grad()
def init_weights(parts: list[nn.Sequential], cfg: ImageRun, device: torch.device) -> None:
    parts[0].to_empty(device=device)
    for name, parameter in parts[0].named_parameters():
        bound = 1 / math.sqrt(parameter.shape[-1])
        parameter.uniform_(-bound, bound, generator=generator(device, cfg.seed, name))


@torch.no_grad()
def evaluate(trainer: ImageTrainer, data: Data[Images]) -> Metrics:
    sums = torch.zeros(2)
    for batch in data:
        right = (trainer.model(batch.pixels).argmax(1) == batch.labels).sum()
        sums += torch.stack([right, torch.tensor(batch.samples)])
    trainer.mesh.add_over_dp(sums)
    return {"accuracy": (sums[0] / sums[1]).item()}


def parameters(cfg: ImageRun) -> int:
    return (SIDE * SIDE + 1) * cfg.hidden + (cfg.hidden + 1) * CLASSES


def images_demo() -> ImageRun:
    """Bright squares in four places."""
    return ImageRun(name="images-demo", data="synthetic", lr=0.5, epochs=4, target=0.9)


def resolve(cfg: ImageRun, cluster: Cluster) -> tuple[ImageRun, list[str]]:
    return cfg, [] if cfg.hidden > 0 else [f"hidden must be at least 1. Received: {cfg.hidden}."]


WORKLOAD = Workload[ImageRun, nn.Sequential, nn.Sequential, Images, ImageTrainer](
    build_model=build_model,
    parallelize=lambda model, mesh, cfg: [model],
    init_weights=init_weights,
    build_data=ImageData,
    build_trainer=ImageTrainer,
    evaluate=evaluate,
    held_out_splits=lambda cfg: ("test",),
    metric="accuracy",
    better="higher",
    flops=lambda cfg, samples, tokens: {"model": 6.0 * parameters(cfg) * samples},
    activation_bytes=lambda cfg: 4 * cfg.hidden * (cfg.micro_batch or 0),
    build_predictor=lambda trainer: lambda batch: trainer.model(batch.pixels).detach(),
)

IMAGES = Definition[ImageRun](
    name="images",
    run_type=ImageRun,
    runs={"images-demo": images_demo},
    metric="accuracy",
    resolve=resolve,
    mesh_axes=lambda cfg, world: {"dp": world},
    closed=lambda cfg: frozenset({"seed", "device", "micro_batch", "accumulate"}),
    sizes=lambda cfg: {"parameters": parameters(cfg)},
    inference_batches=(1, 32),
    load=lambda: WORKLOAD,
)
