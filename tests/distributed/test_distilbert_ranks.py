"""DistilBERT on two ranks trains and evaluates like one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests import rank_processes
from tests.small_distilbert import CPU, NO_DROPOUT, config, trainer
from trainmark.distributed import mesh as meshes
from trainmark.workloads.distilbert.data import build_data
from trainmark.workloads.distilbert.step import evaluate

MODES = ("padded", "packed")


def run(mode: str, mesh: meshes.Mesh) -> dict[str, Any]:
    """Two epochs; 101 sentences in batches of 16 leave 5 for the last, 3 and 2 for two ranks."""
    cfg = config(
        mesh.world_size, mode=mode, model=NO_DROPOUT, synthetic_sentences=101, eval_batch=100,
        micro_batch=8,
    )  # fmt: skip
    ours = trainer(cfg, mesh)
    losses, samples = [], 0
    for batch in build_data(cfg, "train", mesh.dp_rank, mesh.dp_size):
        loss, _, differ = ours.checked_step(ours.prepare(batch), 1e-3)
        assert not any(differ.values())
        losses.append(float(loss))
        samples += batch.samples
    found = evaluate(ours, build_data(cfg, "validation", mesh.dp_rank, mesh.dp_size))
    norms = {name: float(t.norm()) for name, t in ours.weights().items()}
    return {"losses": losses, "samples": samples, "metrics": found, "norms": norms}


def _on_a_rank(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    mesh = meshes.build(CPU, {"dp": 2})
    found = {mode: run(mode, mesh) for mode in MODES}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    rank_processes.run(_on_a_rank, folder, world=2)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_train_like_one(ranks: list[dict[str, Any]], mode: str) -> None:
    alone = run(mode, meshes.single(CPU))
    assert sum(rank[mode]["samples"] for rank in ranks) == alone["samples"] == 202
    for rank in ranks:
        assert rank[mode]["losses"] == pytest.approx(alone["losses"], rel=1e-4)
        assert rank[mode]["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        assert rank[mode]["metrics"]["loss"] == pytest.approx(alone["metrics"]["loss"], rel=1e-4)
        assert rank[mode]["metrics"]["accuracy"] == pytest.approx(
            alone["metrics"]["accuracy"], abs=0.002
        )
    assert ranks[0][mode]["norms"] == ranks[1][mode]["norms"]
    assert ranks[0][mode]["metrics"] == ranks[1][mode]["metrics"]
