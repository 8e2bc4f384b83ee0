"""Ranks that train the small DLRM with its tables in all places.

`main` does everything that ranks are needed for in one process group, started once. Groups of all
sizes, on CPUs and on a GPU, run at the same time and read each other's checkpoints. What a rank
found goes to FOLDER/GROUP-RANK.json.
"""

import dataclasses
import itertools
import json
import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.checkpoint_tensors import save_checkpoint
from tests.distributed import checkpoint_memory, joining
from tests.distributed.small_dlrm import (
    GLOBAL_BATCH,
    KINDS,
    OPTIMIZERS,
    batches,
    config,
    placed,
    placement,
    steps,
    stored,
    tensors,
    train,
    trainer,
)
from tests.waiting import wait_until
from trainmark import workloads
from trainmark.checkpoint import checkpoints, folders
from trainmark.checkpoint.local_shards import LocalShard
from trainmark.distributed import mesh as meshes
from trainmark.distributed.gradients import FlatGradients
from trainmark.distributed.mesh import Mesh
from trainmark.embeddings.placement.placement import to_json
from trainmark.errors import InputError
from trainmark.hardware import devices
from trainmark.run import memory
from trainmark.workloads.dlrm.runs import Sharding
from trainmark.workloads.dlrm.sharding import plan_devices
from trainmark.workloads.dlrm.step import DlrmTrainer

SAVED_AT = 4
RESHARDED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "table_wise": ("rowwise_adagrad", "table_wise", {}),
    "row_wise": ("rowwise_adagrad", "row_wise", {}),
    "column_wise": ("rowwise_adagrad", "column_wise", {}),
    "mixture, Adam": ("adam", "mixture_host", {}),
    "table_wise, Adam": ("adam", "table_wise", {}),
    "row_wise, int8": ("adagrad", "row_wise", stored("int8")),
    "formats, int8": ("adagrad", "formats", stored("int8")),
}
"""What checkpoints are written from and loaded into: (optimiser, placement, other changes)."""


@dataclass(frozen=True)
class Group:
    """Ranks that train together."""

    world: int
    kind: str = "cpu"

    def __str__(self) -> str:
        return f"{self.kind}x{self.world}"


ON_CPUS = (Group(1), Group(2), Group(4))
WITH_A_GPU = (Group(1, "cuda"), Group(2, "cuda"), Group(4, "cuda"), Group(2))


# --- what ranks do

LOW_PRECISION = {"precision": "fp16", "loss_scale": 64.0}


FORMATS = ("bf16", "fp16", "int8", "fp8")
"""Of tables, beside fp32."""


def cases(group: Group) -> dict[str, tuple[str, str, dict[str, Any]]]:
    """(placement, optimiser, other changes) of the runs that must equal those of one process.

    A GPU trains every placement with every optimiser. On CPUs, to save time, each has one of two by
    the number of ranks; a mixture has tables in all ways, and its checkpoints are of the other.
    """
    on_a_gpu, world = group.kind == "cuda", group.world
    micro_batches = {"micro_batch": GLOBAL_BATCH // 4 // world}
    optimizers = OPTIMIZERS if on_a_gpu else OPTIMIZERS[world == 2 :][:1]
    chosen: list[tuple[str, str, dict[str, Any]]] = [
        (kind, optimizer, {}) for kind in KINDS for optimizer in optimizers
    ]
    for kind in (*["data_parallel"] * on_a_gpu, "mixture", "mixture_host"):
        chosen += [(kind, optimizer, {}) for optimizer in OPTIMIZERS[2:]]
        chosen += [(kind, "rowwise_adagrad", micro_batches), (kind, "sgd", LOW_PRECISION)]
        chosen += [(kind, "rowwise_adagrad", micro_batches | {"regular": True})]
    chosen += [("mixture", optimizer, {"regular": True}) for optimizer in ("sgd", "adam")]
    chosen += [
        ("table_wise", "rowwise_adagrad", micro_batches | {"narrow": True}),
        ("table_wise", "adam", {"narrow": True, "sharding": Sharding(host_tables=(1, 4))}),
        ("mixture", "rowwise_adagrad", micro_batches | {"interaction": "dcn"}),
        ("mixture_host", "sgd", {"interaction": "cat"}),
        ("data_parallel", "sgd", {"interaction": "projection", "regular": True}),
        ("formats", "rowwise_adagrad", stored("bf16") | {"regular": True}),
        ("formats", "adagrad", stored("int8", state_precision="bf16") | micro_batches),
        ("formats", "sgd", stored("fp8") | LOW_PRECISION),
        ("row_wise", "sgd", stored("fp16")),
    ]
    return {f"{k}, {o}, {'/'.join(c) or 'plain'}": (k, o, c) for k, o, c in chosen}


def _equality(mesh: Mesh, group: Group, folder: Path) -> dict[str, Any]:
    found = {}
    for name, (kind, optimizer, changes) in cases(group).items():
        cfg = placed(group.world, optimizer, kind, folder, device=mesh.device, **changes)
        result = train(trainer(cfg, mesh))
        shared = {key: value for key, value in result.items() if key != "sent"}
        everywhere: list[Any] = [None] * mesh.world_size
        dist.all_gather_object(everywhere, shared)
        assert everywhere == [shared] * mesh.world_size, name
        found[name] = result
    return found


def _formats(mesh: Mesh, folder: Path) -> dict[str, Any]:
    """What becomes of tables that are not fp32, in every placement, by every optimiser: losses, or
    why not."""
    found: dict[str, Any] = {}
    for kind, optimizer, precision in itertools.product(KINDS, OPTIMIZERS, FORMATS):
        changes = stored(precision) | {"device": mesh.device}
        try:
            cfg = placed(mesh.world_size, optimizer, kind, folder, **changes)
            built = trainer(cfg, mesh)
        except InputError as refusal:
            found[f"{kind}, {optimizer}, {precision}"] = str(refusal)
        else:
            found[f"{kind}, {optimizer}, {precision}"] = steps(built, batches(built))
    return found


def _continued(mesh: Mesh, folder: Path) -> list[list[float]]:
    """Losses of a run that rounds by chance, and of one that goes on from its checkpoint."""
    changes = stored("int8", table_rounding="stochastic") | {"device": mesh.device}
    cfg = placed(mesh.world_size, "adagrad", "formats", folder, **changes)
    whole, again = trainer(cfg, mesh), trainer(cfg, mesh)
    steps(whole, batches(whole)[:SAVED_AT])
    root = folder / f"continued-{mesh.device.type}x{mesh.world_size}"
    path = save_checkpoint(root, SAVED_AT, tensors(whole), {}, keep=1)
    mesh.barrier()
    checkpoints.load(path, tensors(again), exact=True)
    again.state_loaded()
    return [steps(built, batches(built, SAVED_AT)) for built in (whole, again)]


def _save(mesh: Mesh, group: Group, folder: Path) -> None:
    for kind in RESHARDED:
        built = _resharded(kind, mesh, folder)
        steps(built, batches(built)[:SAVED_AT])
        path = save_checkpoint(
            folder / f"saved-{kind}-{group}", SAVED_AT, tensors(built), {}, keep=1
        )
        mesh.barrier()
        if mesh.is_main:
            path.with_name("done").touch()


def _reshard(mesh: Mesh, group: Group, groups: tuple[Group, ...], folder: Path) -> dict[str, float]:
    """Load what every group and every sharding saved; the loss of the step after it."""
    built = {kind: _resharded(kind, mesh, folder) for kind in RESHARDED}
    found = {}
    for begun_by, source in itertools.product(groups, RESHARDED):
        saved = folder / f"saved-{source}-{begun_by}"
        wait_until((saved / "done").exists)  # ranks of another world size write it
        for kind, target in built.items():
            if RESHARDED[kind][::2] != RESHARDED[source][::2]:
                continue  # another optimiser has other state, and another format other tables
            name = f"{source} on {begun_by} -> {kind} on {group}"
            path = folders.latest(saved)
            assert path is not None
            checkpoints.load(path, tensors(target), exact=True)
            target.state_loaded()
            _check_bits(path, tensors(target), name)
            (found[name],) = steps(target, batches(target, SAVED_AT)[:1])
    return found


def _resharded(kind: str, mesh: Mesh, folder: Path) -> DlrmTrainer:
    optimizer, way, changes = RESHARDED[kind]
    cfg = placed(mesh.world_size, optimizer, way, folder, device=mesh.device, **changes)
    return trainer(cfg, mesh)


def _check_bits(path: Path, loaded: dict[str, Any], name: str) -> None:
    """Every shard has the elements of the whole tensor."""
    whole = {n: torch.empty(t.shape, dtype=t.dtype) for n, t in loaded.items()}
    checkpoints.load(path, whole)
    for tensor, held in loaded.items():
        plain = (
            [LocalShard(offsets=(0,) * held.dim(), tensor=held)] if isinstance(held, Tensor) else []
        )
        for shard in plain or held.shards:
            ends = zip(shard.offsets, shard.tensor.shape, strict=True)
            part = whole[tensor][tuple(slice(o, o + n) for o, n in ends)]
            assert torch.equal(part, shard.tensor.cpu()), (name, tensor)


def _skips(mesh: Mesh, folder: Path) -> dict[str, bool]:
    """What happens when one rank has a bad sample, or one rank's rows overflow fp16."""
    world, found = mesh.world_size, {}
    for name, changes in (("nan", {}), ("overflow", LOW_PRECISION | {"loss_scale": 2.0**40})):
        cfg = placed(world, "adam", "mixture_host", folder, device=mesh.device, **changes)
        built = trainer(cfg, mesh)
        first = batches(built)[0]
        if name == "nan" and mesh.rank == world - 1:
            first.numerical[0, 0] = float("nan")
        before = _copies(built)
        _, skipped = built.step(built.prepare(first), 0.1)
        unchanged = all(map(torch.equal, _copies(built), before))
        found[name] = bool(skipped) and not mesh.any(not unchanged)
        steps(built, batches(built)[:2]) if name == "nan" else None
    return found


def _memory(mesh: Mesh, folder: Path) -> None:
    """On CPUs, all ranks of a machine must fit it together; here two are a machine, or one."""
    cfg, workload = placed(mesh.world_size, "sgd", "table_wise", folder), workloads.load("dlrm")
    together = min(2, mesh.world_size)
    first = mesh.rank // together * together
    needed = sum(plan.total for plan in plan_devices(cfg)[first : first + together])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(together))
        patch.setattr(devices, "host_memory_bytes", lambda: needed)
        memory.check_memory(cfg, workload, mesh)
        patch.setattr(devices, "host_memory_bytes", lambda: needed - 1)
        with pytest.raises(InputError, match="2 ranks need" if together == 2 else "it needs"):
            memory.check_memory(cfg, workload, mesh)


def _unstarted_sum(mesh: Mesh) -> None:
    """A sum over ranks that nothing has begun is no sum; one rank has nothing to add."""
    gradients = FlatGradients([nn.Parameter(torch.ones(3, device=mesh.device))], mesh)
    with (
        pytest.raises(RuntimeError, match="nothing began") if mesh.world_size > 1 else nullcontext()
    ):
        gradients.wait()
    gradients.reduce()


def _streams_large_tables(mesh: Mesh, folder: Path) -> None:
    model = dataclasses.replace(config(1, "sgd").model, table_rows=(checkpoint_memory.ROWS,))

    def build(kind: str) -> DlrmTrainer:
        path = folder / f"large-{kind}-{os.getpid()}.json"
        path.write_text(to_json(placement(kind, mesh.world_size, model.table_rows)))
        sharding = Sharding(placement=str(path))
        return trainer(config(mesh.world_size, "sgd", model=model, sharding=sharding), mesh)

    checkpoint_memory.check(build, folder / "large")


def _copies(built: DlrmTrainer) -> list[Tensor]:
    return [
        shard.clone()
        for held in tensors(built).values()
        for shard in ([held] if isinstance(held, Tensor) else [b.tensor for b in held.shards])
    ]


def save_without_end(rank: int, folder: Path) -> None:
    """One of two ranks, for the kill test."""
    mesh = meshes.build(joining.join(rank, 2, folder / "store"), {"dp": 2})
    built = trainer(placed(mesh.world_size, "rowwise_adagrad", "mixture", folder), mesh)
    for step in itertools.count(1):
        steps(built, batches(built)[:1])
        save_checkpoint(folder / "killed", step, tensors(built), {"step": step}, keep=2)


def main(rank: int, group: Group, groups: tuple[Group, ...], folder: Path) -> None:
    device = joining.join(rank, group.world, folder / f"store-{group}", group.kind)
    mesh = meshes.build(device, {"dp": group.world})
    assert mesh.from_main(f"of rank {rank}") == "of rank 0"
    found: dict[str, Any] = {}
    _save(mesh, group, folder)  # first: other groups wait for it
    if group.kind == "cuda":
        found["formats"] = _formats(mesh, folder)
    else:
        _memory(mesh, folder)
    _unstarted_sum(mesh)
    if group == Group(2):
        _streams_large_tables(mesh, folder)
    found |= {
        "equality": _equality(mesh, group, folder),
        "skips": _skips(mesh, folder),
        "continued": _continued(mesh, folder),
        "reshard": _reshard(mesh, group, groups, folder),
    }
    (folder / f"{group}-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
