"""Ranks that train a small DistilBERT."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import rank_processes, small_distilbert
from tests.distributed import joining
from tests.small_distilbert import NO_DROPOUT, trainer
from trainmark.distributed import mesh as meshes
from trainmark.training.transfer import wait_for
from trainmark.workloads.distilbert.data import build_data
from trainmark.workloads.distilbert.runs import DistilbertRun
from trainmark.workloads.distilbert.step import evaluate

MODES = ("padded", "packed")


def run(mode: str, mesh: meshes.Mesh) -> dict[str, Any]:
    """Two epochs; 101 sentences in batches of 16 leave 5 for the last, 3 and 2 for two ranks."""
    cfg = config(mesh, mode=mode, synthetic_sentences=101)
    ours, data = trainer(cfg, mesh), build_data(cfg, "train", mesh.dp_rank, mesh.dp_size)
    losses, samples = [], 0
    for batch in data:
        prepared = ours.prepare(batch)
        wait_for(prepared.ready)
        loss, _, differ = ours.checked_step(prepared, 1e-3)
        assert not any(differ.values())
        losses.append(float(loss))
        samples += batch.samples
    found = evaluate(ours, build_data(cfg, "validation", mesh.dp_rank, mesh.dp_size))
    norms = {name: float(t.norm()) for name, t in ours.weights().items()}
    norms |= {name: float(value) for name, value in ours.observed().items()}
    return {"losses": losses, "samples": samples, "metrics": found, "norms": norms}


def check(ranks: list[dict[str, Any]], mode: str, device: torch.device) -> None:
    """Ranks have trained and evaluated like one device."""
    alone = run(mode, meshes.single(device))
    assert sum(rank[mode]["samples"] for rank in ranks) == alone["samples"] == 202
    for rank in ranks:
        found = rank[mode]
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-4)
        assert found["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        near = 1e-4 if device.type == "cpu" else 1e-2
        assert found["metrics"]["loss"] == pytest.approx(alone["metrics"]["loss"], rel=near)
        right = pytest.approx(alone["metrics"]["accuracy"], rel=near, abs=0.002)
        assert found["metrics"]["accuracy"] == right


def config(mesh: meshes.Mesh, **changes: Any) -> DistilbertRun:
    return small_distilbert.config(
        mesh.world_size,
        mesh.device,
        model=NO_DROPOUT,
        eval_batch=100,
        micro_batch=min(8, 16 // mesh.world_size),
        **changes,
    )


def main(rank: int, world: int, folder: Path, kind: str = "cpu") -> None:
    """One rank; what it found goes to FOLDER/rank-RANK.json."""
    mesh = meshes.build(joining.join(rank, world, folder / "store", kind), {"dp": world})
    found = {mode: run(mode, mesh) for mode in MODES}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def start(folder: Path, world: int, kind: str = "cpu") -> list[dict[str, Any]]:
    """Start ranks, and wait for what they find."""
    rank_processes.run(main, world, folder, kind, world=world)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(world)]
