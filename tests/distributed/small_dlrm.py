"""A DLRM so small that a run takes a second, and the placements of its tables."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.distributed import joining
from trainmark import workloads
from trainmark.distributed.mesh import Mesh
from trainmark.embeddings.placement.placement import (
    Memory,
    Placement,
    Range,
    Shard,
    TablePlacement,
    even_ranges,
    sharding_of,
    to_json,
    whole_everywhere,
)
from trainmark.run.assessment import evaluated
from trainmark.run.loop import build_trainer
from trainmark.training.transfer import wait_for
from trainmark.workloads import resolve
from trainmark.workloads.dlrm.data import ClickBatch, build_data
from trainmark.workloads.dlrm.runs import DlrmRun, Model, Optimizer, Sharding, TableFormat
from trainmark.workloads.dlrm.step import DlrmTrainer, build_predictor

CPU = torch.device("cpu")
TABLE_ROWS = (50, 7, 300, 1, 129, 31)
DIM = 8
GLOBAL_BATCH = 96
TRAIN_ROWS = 3 * GLOBAL_BATCH + 3  # the last batch leaves ranks without a sample
OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad", "adam")
SCORES = 40
"""Of a request that are compared: samples that every group has in its first one."""
KINDS = (
    "table_wise", "column_wise", "row_wise", "data_parallel", "mixture",
    "table_wise_host", "row_wise_host", "column_wise_host", "mixture_host",
)  # fmt: skip
MIXTURES = {
    "mixture": (
        "row_wise", "table_wise", "column_wise", "data_parallel", "row_wise", "column_wise",
    ),
    "formats": (
        "row_wise", "column_wise", "table_wise", "data_parallel", "row_wise", "table_wise",
    ),
}  # fmt: skip
"""Ways of each table; the second one's large tables need not be fp32."""


def stored(precision: Any, **other: Any) -> dict[str, Any]:
    """Large tables in another format, rounded in a way that does not depend on their place."""
    chosen = {"fp32_up_to_rows": 7, "table_rounding": "nearest", **other}
    return {"table_format": TableFormat(table_precision=precision, **chosen)}


# --- placements


def placement(kind: str, world: int, table_rows: tuple[int, ...] = TABLE_ROWS) -> Placement:
    """All tables in one way, or each in another."""
    plain, tables = kind.removesuffix("_host"), []
    for table, rows in enumerate(table_rows):
        chosen = MIXTURES[plain][table] if plain in MIXTURES else plain
        memory: Memory = "device"
        if kind.endswith("_host") and chosen != "data_parallel":
            memory = "host"
        if kind == "mixture_host" and table % 2:
            memory = "device"
        shards = _shards(chosen, table, rows, world)
        sharding = "data_parallel" if chosen == "data_parallel" else sharding_of(shards, DIM)
        tables.append(TablePlacement(table=table, sharding=sharding, shards=shards, memory=memory))
    return Placement(devices=world, tables=tuple(tables))


def _shards(kind: str, table: int, rows: int, world: int) -> tuple[Shard, ...]:
    if kind == "data_parallel":
        return whole_everywhere(rows, DIM, world)
    if kind == "table_wise":
        return (Shard(device=table % world, rows=(0, rows), columns=(0, DIM)),)
    # More parts than ranks, and not the same rank first: a rank holds several parts of a table.
    axis = rows if kind == "row_wise" else DIM
    parts = even_ranges(axis, min(world + table % 2, axis))
    ranks = [(table + place) % world for place in range(len(parts))]
    return tuple(_shard(kind, rank, part, rows) for rank, part in zip(ranks, parts, strict=True))


def _shard(kind: str, rank: int, part: Range, rows: int) -> Shard:
    if kind == "row_wise":
        return Shard(device=rank, rows=part, columns=(0, DIM))
    return Shard(device=rank, rows=(0, rows), columns=part)


# --- runs


def config(
    world: int,
    optimizer: Any,
    regular: bool = False,
    narrow: bool = False,
    interaction: Any = "dot",
    pooling: Any = "sum",
    eps: float = 1e-8,
    device: torch.device = CPU,
    **changes: Any,
) -> DlrmRun:
    """The small run, resolved for `world` ranks.

    Args:
        regular: with dropout and weight decay.
        narrow: with tables of several widths.
        interaction: with layers of default widths.
        pooling: of several ids per feature.
    """
    run = DlrmRun(
        name="dlrm-demo",
        data="synthetic",
        device=device.type,  # type: ignore[arg-type]
        model=Model(
            numerical_features=5,
            table_rows=TABLE_ROWS,
            embedding_dim=DIM,
            table_widths=(8, 2, 4, 8, 6, 2) if narrow else None,
            bottom_mlp=(16, DIM),
            top_mlp=(16, 1),
            interaction=interaction,
            pooling=pooling,
            dropout=0.3 * regular,
            interaction_dropout=0.1 * regular,
        ),
        optimizer=Optimizer(name=optimizer, eps=eps, weight_decay=0.5 * regular),
        global_batch=GLOBAL_BATCH,
        eval_batch=50,
        lr=0.1,
        synthetic_rows=TRAIN_ROWS,
        epochs=2,
        seed=4,
    )
    return resolve(dataclasses.replace(run, **changes), joining.cluster(device, world))


def placed(world: int, optimizer: str, kind: str, folder: Path, **changes: Any) -> DlrmRun:
    """The same with its tables placed in one of the ways; of several widths, by themselves."""
    if "narrow" in changes:
        return config(world, optimizer, **changes)
    path = folder / f"{kind}-{world}-{os.getpid()}.json"  # every rank makes the same
    if not path.exists():
        path.write_text(to_json(placement(kind, world)))
    sharding = Sharding(placement=str(path), force_exchange=True)
    return config(world, optimizer, sharding=sharding, **changes)


def trainer(cfg: DlrmRun, mesh: Mesh) -> DlrmTrainer:
    built = build_trainer(cfg, workloads.load("dlrm"), mesh)
    assert isinstance(built, DlrmTrainer)
    return built


def batches(built: DlrmTrainer, after: int = 0) -> list[ClickBatch]:
    """This rank's batches behind the first `after` steps."""
    data = build_data(built.cfg, "train", built.mesh.dp_rank, built.mesh.dp_size)
    return list(data)[after:]


def steps(built: DlrmTrainer, of: list[ClickBatch]) -> list[float]:
    """Losses; batches are prepared a step ahead, as in a run."""
    losses, ahead = [], built.prepare(of[0])
    for following in [*of[1:], None]:
        prepared = ahead
        if following is not None:
            ahead = built.prepare(following)
        wait_for(prepared.ready)
        loss, skipped = built.step(prepared, built.cfg.lr)
        losses.append(torch.stack([loss.float(), skipped.float()]))
    found = torch.stack(losses)
    assert not found[:, 1].any()
    return found[:, 0].tolist()


def train(built: DlrmTrainer) -> dict[str, Any]:
    """A whole run: losses, samples of all ranks, metrics, bytes that this rank sent, and scores of
    the first samples of a request. Afterwards the trainer can only predict."""
    of = batches(built)
    held_out = build_data(built.cfg, "test", built.mesh.dp_rank, built.mesh.dp_size)
    found = {
        "losses": steps(built, of),
        "samples": built.mesh.sum_over_dp([sum(batch.samples for batch in of)])[0],
        "metrics": evaluated(workloads.load("dlrm"), built, held_out)[0],
        "sent": dict(built.model.tables.sent_bytes),
    }
    request = next(iter(held_out))
    scores = build_predictor(built)(request)
    assert len(scores) == request.global_samples
    return found | {"scores": scores[:SCORES].tolist()}


def tensors(built: DlrmTrainer) -> dict[str, Any]:
    """What a checkpoint holds."""
    return built.weights() | built.state_dict()


def parts(held: Any, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """What a rank holds of a tensor, nothing if `held` is None, beside the same of the whole."""
    if isinstance(held, Tensor):
        yield held, whole
    elif held is not None:
        for shard in held.shards:
            ends = zip(shard.offsets, shard.tensor.shape, strict=True)
            yield shard.tensor, whole[tuple(slice(start, start + size) for start, size in ends)]
