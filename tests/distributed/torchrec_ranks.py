"""Ranks that train the small DLRM of `small_dlrm` with TorchRec's tables.

`main` runs everything that so many ranks are needed for in one process group, started once. Rank 0
writes what it found to FOLDER/torchrec-WORLD.json.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.checkpoint_tensors import save_checkpoint
from tests.distributed.joining import join
from tests.distributed.small_dlrm import (
    DIM,
    GLOBAL_BATCH,
    TABLE_ROWS,
    batches,
    config,
    steps,
    tensors,
    train,
    trainer,
)
from trainmark.checkpoint import checkpoints, folders
from trainmark.distributed import mesh as meshes
from trainmark.distributed.mesh import Mesh
from trainmark.embeddings.placement.placement import (
    Placement,
    Shard,
    TablePlacement,
    even_ranges,
    sharding_of,
    to_json,
)
from trainmark.workloads.dlrm.runs import DlrmRun, Sharding

SAVED_AT = 3
CONTINUED = ("mixture", "adagrad")
"""The run whose checkpoints are read and written; `one` in its folder is of one native process."""
LOW_PRECISION = {"precision": "fp16", "loss_scale": 64.0}


def cases(world: int) -> dict[str, tuple[str, str, dict[str, Any]]]:
    """(placement, optimiser, other changes) of the runs that must equal those of one process."""
    chosen: list[tuple[str, str, dict[str, Any]]] = [
        ("auto", "sgd", {}),
        ("auto", "rowwise_adagrad", {}),
        ("table_wise", "sgd", {}),
        ("table_wise", "rowwise_adagrad", {}),
        ("row_wise", "sgd", {}),
        ("row_wise", "rowwise_adagrad", {}),
        ("column_wise", "sgd", {}),
        ("mixture", "adagrad", {}),
        ("mixture", "sgd", {"micro_batch": GLOBAL_BATCH // 4 // world}),
        ("mixture", "sgd", LOW_PRECISION),
    ]
    return {f"{k}, {o}, {'/'.join(c) or 'plain'}": (k, o, c) for k, o, c in chosen}


def placement(kind: str, world: int) -> Placement:
    """All tables in one way, or (`mixture`) in turn; of fewer rows than ranks none is row-wise."""
    kinds = ("row_wise", "table_wise", "column_wise")
    tables = []
    for table, rows in enumerate(TABLE_ROWS):
        chosen = kinds[table % 3] if kind == "mixture" else kind
        if chosen == "row_wise" and rows < world:
            chosen = "table_wise"
        shards = _shards(chosen, table, rows, world)
        sharding = sharding_of(shards, DIM)
        tables.append(TablePlacement(table=table, sharding=sharding, shards=shards))
    return Placement(devices=world, tables=tuple(tables))


def _shards(kind: str, table: int, rows: int, world: int) -> tuple[Shard, ...]:
    if kind == "row_wise":
        cut = even_ranges(rows, world)
        return tuple(Shard(device=r, rows=part, columns=(0, DIM)) for r, part in enumerate(cut))
    # FBGEMM takes four columns at least.
    cut = even_ranges(DIM, DIM // 4 if kind == "column_wise" and world > 1 else 1)
    return tuple(
        Shard(device=(table + place) % world, rows=(0, rows), columns=part)
        for place, part in enumerate(cut)
    )


def placed(world: int, kind: str, optimizer: str, folder: Path, **changes: Any) -> DlrmRun:
    """The small run with TorchRec's tables, placed in one of the ways or by its own planner."""
    path = folder / f"torchrec-{kind}-{world}.json"
    if kind != "auto" and dist.get_rank() == 0:
        path.write_text(to_json(placement(kind, world)))
    dist.barrier()
    chosen = "auto" if kind == "auto" else str(path)
    sharding = Sharding(engine="torchrec", placement=chosen)
    return config(world, optimizer, sharding=sharding, **changes)


def _continued(mesh: Mesh, folder: Path) -> dict[str, Any]:
    """Losses after a checkpoint of one process; and a checkpoint for one process."""
    cfg = placed(mesh.world_size, *CONTINUED, folder)
    reader = trainer(cfg, mesh)
    saved = folders.latest(folder / "one")
    assert saved is not None
    checkpoints.load(saved, tensors(reader), exact=True)
    writer = trainer(cfg, mesh)
    steps(writer, batches(writer)[:SAVED_AT])
    save_checkpoint(folder / f"torchrec-{mesh.world_size}", SAVED_AT, tensors(writer), {}, keep=1)
    return {"losses": steps(reader, batches(reader, SAVED_AT))}


def _gated(mesh: Mesh, folder: Path) -> dict[str, Any]:
    """Whether a step with an infinite input was skipped, and how much it changed the tables."""
    built = trainer(placed(mesh.world_size, "mixture", "adagrad", folder), mesh)
    first, second = batches(built)[:2]
    if mesh.is_main:
        second = dataclasses.replace(second, numerical=torch.full_like(second.numerical, torch.inf))
    good, bad = built.prepare(first), built.prepare(second)

    def tables() -> list[torch.Tensor]:
        held = built.model.tables.table_weights() | built.model.tables.table_state()
        return [shard.tensor.clone() for one in held.values() for shard in one.shards]

    before = tables()
    built.step(good, 0.1)
    between = tables()
    _, skipped = built.step(bad, 0.1)
    after = tables()
    return {
        "skipped": bool(skipped),
        "changed_by_good": any(not a.equal(b) for a, b in zip(before, between, strict=True)),
        "changed_by_bad": any(not a.equal(b) for a, b in zip(between, after, strict=True)),
    }


def main(rank: int, world: int, folder: Path) -> None:
    device = join(rank, world, folder / f"torchrec-store-{world}")
    mesh = meshes.build(device, {"dp": world})
    found: dict[str, Any] = {
        name: train(trainer(placed(world, kind, optimizer, folder, **changes), mesh))
        for name, (kind, optimizer, changes) in cases(world).items()
    }
    found["continued"] = _continued(mesh, folder)
    found["gated"] = _gated(mesh, folder)
    if rank == 0:
        (folder / f"torchrec-{world}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
