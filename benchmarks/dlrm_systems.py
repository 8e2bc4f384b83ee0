"""What the DLRM benchmarks train: ours through its configuration, and the peers.

Batches lie on the device. Precisions are changes of configuration, named here alone.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import dlrm_peers
from benchmarks.dlrm_clicks import EXPONENTS, Ids, draw_ids
from benchmarks.timing import synchronize
from trainmark import workloads
from trainmark.clickdata import feature_spec
from trainmark.distributed.mesh import single
from trainmark.embeddings.tables.batch import IdGroup
from trainmark.errors import InputError
from trainmark.hardware import devices
from trainmark.run.loop import build_trainer
from trainmark.training.seeding import generator
from trainmark.workloads import resolve
from trainmark.workloads.dlrm.data import ClickBatch
from trainmark.workloads.dlrm.runs import DlrmRun, Model

LR = 0.1  # small: made-up clicks must not drive the weights anywhere
POOL = 8  # different batches, so that no step finds the rows of the one before in a cache

Losses = Callable[[Ids], Iterator[Tensor]]
"""From a kind of ids to the losses of endless steps with them."""


# --- configuration


def tables_in(precision: str, rounding: str = "stochastic") -> dict[str, Any]:
    """The change of configuration that stores large tables in `precision`."""
    return {"table_format": {"table_precision": precision, "table_rounding": rounding}}


def mlps_in(precision: str) -> dict[str, Any]:
    """The change of configuration that computes the MLPs in `precision`."""
    return {"precision": precision}


def with_changes(run: Any, changes: dict[str, Any]) -> Any:
    """A copy of a dataclass with some fields changed, nested ones by nested dictionaries."""
    unknown = changes.keys() - {field.name for field in dataclasses.fields(run)}
    if unknown:
        raise InputError(f"{type(run).__name__} of this version has no {', '.join(unknown)}.")
    nested = {
        name: with_changes(getattr(run, name), value) if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    return dataclasses.replace(run, **nested)


def resolved(run: DlrmRun, changes: dict[str, Any], device: torch.device) -> DlrmRun:
    """The configuration to train with on `device`."""
    key = "cpu" if device.type == "cpu" else devices.identify(device).key
    changed = with_changes(run, changes | {"device": device.type})
    return resolve(changed, devices.Cluster(key, 1, 1))


def trainer_for(cfg: DlrmRun, device: torch.device) -> Any:
    """The product's own, with its weights allocated and filled."""
    return build_trainer(cfg, workloads.load("dlrm"), single(device))


# --- batches that lie on the device


def random_clicks(model: Model, batch: int, ids: Ids, device: torch.device) -> list[Any]:
    """A pool of (numerical [B, N] float16, ids [F, B] int32, labels [B] bool)."""
    random = generator(device, "benchmark", ids)
    return [
        (
            torch.randn(batch, model.numerical_features, device=device, generator=random).half(),
            draw_ids(model.table_rows, batch, EXPONENTS[ids], random),
            torch.rand(batch, device=device, generator=random) < 0.2,
        )
        for _ in range(POOL)
    ]


def click_batch(
    table_rows: Sequence[int], numerical_BN: Tensor, ids_FB: Tensor, labels_B: Tensor
) -> ClickBatch:
    """A batch as the reader makes it: one group of ids for each integer type."""
    dtypes = [feature_spec.dtype_for(rows) for rows in table_rows]
    groups = []
    for dtype in sorted(set(dtypes), key=lambda name: np.dtype(name).itemsize):
        features = [i for i, d in enumerate(dtypes) if d == dtype]
        groups.append(IdGroup(features, ids_FB[features].to(getattr(torch, dtype))))
    return batch_of(numerical_BN, groups, labels_B)


def batch_of(numerical_BN: Tensor, groups: list[IdGroup], labels_B: Tensor) -> ClickBatch:
    """All of a step's samples, and the first ones."""
    samples = len(labels_B)
    return ClickBatch(
        numerical=numerical_BN,
        labels=labels_B,
        groups=groups,
        samples=samples,
        global_samples=samples,
        position=samples,
        partial=False,
    )


def step(trainer: Any, prepared: Any, lr: float) -> Tensor:
    """One step as the training loop makes it: after the wait for the batch."""
    if prepared.ready is not None:
        prepared.ready.wait()
    loss: Tensor = trainer.step(prepared, lr)[0]
    return loss


# --- systems


def trainmark_system(cfg: DlrmRun, device: torch.device) -> Losses:
    return steps_of(trainer_for(cfg, device), device)


def steps_of(trainer: Any, device: torch.device) -> Losses:
    """Steps of a trainer of ours on batches of one id per feature."""
    cfg = trainer.cfg

    def losses(ids: Ids) -> Iterator[Tensor]:
        clicks = random_clicks(cfg.model, cfg.global_batch or 0, ids, device)
        pool = [click_batch(cfg.model.table_rows, *parts) for parts in clicks]
        return endless_steps(trainer, pool, LR, device)

    return losses


def endless_steps(
    trainer: Any, pool: Sequence[ClickBatch], lr: float, device: torch.device
) -> Iterator[Tensor]:
    """The losses of a trainer of ours; each batch is prepared a step ahead, as in a run."""
    batches = itertools.cycle(pool)
    synchronize(device)  # the trainer reads them on a stream of its own
    ahead = trainer.prepare(next(batches))
    while True:
        prepared, ahead = ahead, trainer.prepare(next(batches))
        yield step(trainer, prepared, lr)


def peer_system(name: str, cfg: DlrmRun, device: torch.device) -> Losses:
    compiles = device.type == "cuda"
    setting = dlrm_peers.Setting(
        model=cfg.model, lr=LR, device=device, precision=cfg.precision, compile=compiles
    )
    peer = dlrm_peers.PEERS[name](setting)

    def losses(ids: Ids) -> Iterator[Tensor]:
        clicks = random_clicks(cfg.model, cfg.global_batch or 0, ids, device)
        pool = [
            peer.batch(dlrm_peers.Clicks(numerical.float(), ids_FB.long(), labels.float()))
            for numerical, ids_FB, labels in clicks
        ]
        synchronize(device)
        return peer.train(itertools.cycle(pool))

    return losses
