"""A DLRM so small that a run takes a second, the placements of its tables, and ranks that train it.

    python -m tests.distributed.dlrm_ranks RANK WORLD FOLDER

runs everything that WORLD ranks are needed for in one process group, started once: importing torch
takes as long as ten of the runs. Rank 0 writes what it found to FOLDER/ranks-WORLD.json.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainmark import workloads
from trainmark.config import resolve
from trainmark.distributed import mesh as meshes
from trainmark.distributed.mesh import Mesh
from trainmark.embeddings.placement import (
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
from trainmark.hardware import Cluster
from trainmark.loop import build_trainer
from trainmark.workloads.dlrm.runs import DlrmRun, Model, Optimizer, Sharding
from trainmark.workloads.dlrm.step import DlrmTrainer

CPU = torch.device("cpu")
TABLE_ROWS = (50, 7, 300, 1, 129, 31)
DIM = 8
GLOBAL_BATCH = 96
TRAIN_ROWS = 4 * GLOBAL_BATCH + 3  # the last batch leaves ranks without a sample
OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad", "adam")


# --- placements


def placement(kind: str, world: int) -> Placement:
    """All tables in one way, or (`mixture`) each in another."""
    kinds = ("row_wise", "table_wise", "column_wise", "data_parallel", "row_wise", "column_wise")
    tables = []
    for table, rows in enumerate(TABLE_ROWS):
        chosen = kinds[table] if kind.startswith("mixture") else kind.removesuffix("_host")
        memory: Memory = "device"
        if kind.endswith("_host") and chosen != "data_parallel":
            memory = "host"
        if kind == "mixture_host" and table % 2:
            memory = "device"
        shards = _shards(chosen, table, rows, world)
        sharding = "data_parallel" if chosen == "data_parallel" else sharding_of(shards, rows, DIM)
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


def config(world: int, optimizer: str, **changes: Any) -> DlrmRun:
    """The small run, resolved for `world` ranks."""
    run = DlrmRun(
        name="dlrm-demo",
        data="synthetic",
        device="cpu",
        model=Model(
            numerical_features=5,
            table_rows=TABLE_ROWS,
            embedding_dim=DIM,
            bottom_mlp=(16, DIM),
            top_mlp=(16, 1),
        ),
        optimizer=Optimizer(name=optimizer),
        global_batch=GLOBAL_BATCH,
        eval_batch=50,
        lr=0.1,
        synthetic_rows=TRAIN_ROWS,
        epochs=2,
        seed=4,
    )
    return resolve(dataclasses.replace(run, **changes), Cluster("cpu", 1, world))


def placed(world: int, optimizer: str, kind: str, folder: Path, **changes: Any) -> DlrmRun:
    """The same with its tables placed in one of the ways."""
    path = folder / f"{kind}-{world}.json"
    if not path.exists():
        path.write_text(to_json(placement(kind, world)))
    sharding = Sharding(placement=str(path), force_exchange=True)
    return config(world, optimizer, sharding=sharding, **changes)


def trainer(cfg: DlrmRun, mesh: Mesh) -> DlrmTrainer:
    built = build_trainer(cfg, workloads.load("dlrm"), mesh)
    assert isinstance(built, DlrmTrainer)
    return built


def train(built: DlrmTrainer, *, skip: int = 0, steps: int | None = None) -> dict[str, Any]:
    """Losses, samples of this rank and metrics; batches are prepared a step ahead, as in a run."""
    cfg, mesh, workload = built.cfg, built.mesh, workloads.load("dlrm")
    data = workload.build_data(cfg, "train", mesh.dp_rank, mesh.dp_size)
    data.restore({"samples": skip})
    losses, samples = [], 0
    batches = list(data)[:steps]
    ahead = built.prepare(batches[0])
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        prepared = ahead
        if following is not None:
            ahead = built.prepare(following)
        loss, skipped = built.step(prepared, cfg.lr)
        assert not skipped
        losses.append(loss.item())
        samples += batch.samples
    held_out = workload.build_data(cfg, "test", mesh.dp_rank, mesh.dp_size)
    return {
        "losses": losses,
        "samples": samples,
        "metrics": workload.evaluate(built, held_out),
        "sent": dict(built.model.tables.sent_bytes),
    }


KINDS = (
    "table_wise", "column_wise", "row_wise", "data_parallel", "mixture",
    "table_wise_host", "row_wise_host", "column_wise_host", "mixture_host",
)  # fmt: skip
CASES: list[tuple[str, str, dict[str, Any]]] = [
    (kind, optimizer, {}) for kind in KINDS for optimizer in OPTIMIZERS
]


def _main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / f'store-{world}'}"
    dist.init_process_group("gloo", store, rank=rank, world_size=world)
    mesh = meshes.build(CPU, {"dp": world})
    found = {}
    try:
        for kind, optimizer, changes in CASES:
            built = trainer(placed(world, optimizer, kind, folder, **changes), mesh)
            result = train(built)
            result["samples"] = mesh.sum_over_dp([result["samples"]])[0]
            found[f"{kind}-{optimizer}"] = result
        if rank == 0:
            (folder / f"ranks-{world}.json").write_text(json.dumps(found))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def main(arguments: Sequence[str]) -> None:
    _main(int(arguments[0]), int(arguments[1]), Path(arguments[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
