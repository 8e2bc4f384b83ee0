"""Ranks that train every workload for 300 steps: how far rounding takes them from one device.

Learning rates are low, so that what differs by the order of additions is not amplified. Llama has
few layers and micro-batches: a collective of ranks on one GPU takes long.
"""

import dataclasses
import json
import math
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import rank_processes, small_distilbert
from tests.distributed import distilbert_ranks, joining, llama3_ranks, small_dlrm
from trainmark.distributed import mesh as meshes
from trainmark.distributed.mesh import Mesh
from trainmark.embeddings.placement.placement import to_json
from trainmark.training.transfer import wait_for
from trainmark.workloads.distilbert.data import build_data
from trainmark.workloads.dlrm.runs import Sharding
from trainmark.workloads.llama3 import runs

STEPS = 300
SHOWN = (1, 10, 30, 100, 300)
"""Steps up to which the growth of a difference is shown."""
CLOSE, ROUGH = 1e-5, 1e-2
"""How far losses may be from those of one device; ROUGH where rounding decides on an fp8 code."""
Run = Callable[..., list[float]]

FP8 = {"precision": "fp8", "micro_batch": 2}
"""Each micro-batch has scales of its own."""
FSDP = {"data_parallel": "fsdp"}
INTERLEAVED = {"pipeline": "interleaved", "layers": 4}
SPLITS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "TP2": {"parallel": "PP1DP1TP2"},
        "PP2": {"parallel": "PP2DP1TP1"},
        "PP2-interleaved": {"parallel": "PP2DP1TP1"} | INTERLEAVED,
        "DP2-zero1": {"parallel": "PP1DP2TP1"},
        "DP2-fsdp": {"parallel": "PP1DP2TP1"} | FSDP,
        "DP2-fp8": {"parallel": "PP1DP2TP1"} | FP8,
    },
    4: {
        "PP2xDP2-interleaved": {"parallel": "PP2DP2TP1"} | INTERLEAVED,
        "DP4-zero1": {"parallel": "PP1DP4TP1"},
        "DP4-fsdp-fp8": {"parallel": "PP1DP4TP1"} | FSDP | FP8,
    },
}
"""Of Llama, by ranks."""
IN_TURNS = ("dlrm, rowwise_adagrad", "llama3, DP4-zero1", "distilbert")
"""What four ranks have time for if they take turns on a GPU (`joining.MPS`)."""
OF_ONE_DEVICE = ("optimizer", "layers", *FP8)
"""What one device must be told to compute the same."""


def _dlrm(world: int, device: torch.device, folder: Path, optimizer: str) -> list[float]:
    """With tables in all ways, if there are several ranks."""
    changes: dict[str, Any] = {"synthetic_rows": STEPS * small_dlrm.GLOBAL_BATCH, "epochs": 1}
    if world > 1:
        path = folder / f"long-{world}-{os.getpid()}.json"
        path.write_text(to_json(small_dlrm.placement("mixture_host", world)))
        changes["sharding"] = Sharding(placement=str(path), force_exchange=True)
    changes |= {"lr": 0.01, "eps": 1e-3}  # less, and gradients that cancel decide on whole steps
    cfg = small_dlrm.config(world, optimizer, device=device, **changes)
    built = small_dlrm.trainer(cfg, _mesh(device, {"dp": world}))
    return small_dlrm.steps(built, small_dlrm.batches(built))


def _llama3(
    world: int, device: torch.device, _folder: Path, layers: int = 2, **changes: Any
) -> list[float]:
    model = dataclasses.replace(llama3_ranks.config().model, layers=layers)
    plain = {"model": model, "micro_batch": 8 // max(world, 2), "max_steps": STEPS, "lr": 1e-4}
    cfg = llama3_ranks.config(world, device, **plain | changes)
    return llama3_ranks.train(cfg, _mesh(device, runs.mesh_axes(cfg, world)), stop=STEPS)


def _distilbert(world: int, device: torch.device, _folder: Path) -> list[float]:
    mesh = _mesh(device, {"dp": world})
    cfg = distilbert_ranks.config(mesh, mode="packed", synthetic_sentences=STEPS * 16, epochs=1)
    ours, losses = small_distilbert.trainer(cfg, mesh), []
    for batch in build_data(cfg, "train", mesh.dp_rank, mesh.dp_size):
        prepared = ours.prepare(batch)
        wait_for(prepared.ready)
        losses.append(ours.step(prepared, 2e-5)[0].clone())
    return torch.stack(losses).tolist()


def _mesh(device: torch.device, axes: dict[str, int]) -> Mesh:
    return meshes.build(device, axes) if math.prod(axes.values()) > 1 else meshes.single(device)


def cases(world: int, kind: str) -> dict[str, tuple[Run, dict[str, Any]]]:
    """What so many ranks train."""
    dlrm = {f"dlrm, {name}": (_dlrm, {"optimizer": name}) for name in small_dlrm.OPTIMIZERS}
    llama3 = {f"llama3, {name}": (_llama3, changes) for name, changes in SPLITS[world].items()}
    every: dict[str, tuple[Run, dict[str, Any]]]
    every = {**dlrm, **llama3, "distilbert": (_distilbert, {})}
    if world == 4 and kind == "cuda" and not joining.MPS.exists():
        return {name: every[name] for name in IN_TURNS}
    return every


def main(rank: int, world: int, folder: Path, kind: str) -> None:
    """Losses of every case go to FOLDER/WORLD.json."""
    device = joining.join(rank, world, folder / f"store-{world}", kind)
    found = {
        name: run(world, device, folder, **told) for name, (run, told) in cases(world, kind).items()
    }
    if rank == 0:
        (folder / f"{world}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def check(world: int, folder: Path, kind: str = "cpu") -> list[str]:
    """Losses of all steps stay those of one device. Rows of a table of how far they are."""
    started = rank_processes.start(main, world, folder, kind, world=world)
    device = joining.device_of(kind)

    @cache
    def alone(run: Run, **told: Any) -> list[float]:
        return run(1, device, folder, **told)

    expected = {
        name: alone(run, **{key: told[key] for key in OF_ONE_DEVICE if key in told})
        for name, (run, told) in cases(world, kind).items()
    }
    rank_processes.finish(started)
    found = json.loads((folder / f"{world}.json").read_text())
    faults, rows = [], []
    for name, losses in found.items():
        apart = [abs(a - b) for a, b in zip(losses, expected[name], strict=True)]
        growth = " | ".join(f"{max(apart[:step]):.1e}" for step in SHOWN)
        rows.append(f"| {name}, {world} ranks | {growth} |")
        if max(apart) >= (ROUGH if "fp8" in name else CLOSE):
            faults.append(name)
        assert len(set(expected[name])) > STEPS // 2, name
    assert found.keys() == expected.keys()
    assert not faults, rows
    return rows
