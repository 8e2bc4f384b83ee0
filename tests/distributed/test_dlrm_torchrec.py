"""TorchRec's tables, however placed, train like the native engine in one process."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import rank_processes
from tests.checkpoint_tensors import save_checkpoint
from tests.distributed import torchrec_ranks
from tests.distributed.small_dlrm import CPU, batches, config, steps, tensors, train, trainer
from tests.distributed.torchrec_ranks import CONTINUED, SAVED_AT, cases
from trainmark.checkpoint import checkpoints
from trainmark.distributed.mesh import single

pytest.importorskip("torchrec")

WORLDS = [1, 2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one native process has saved; ranks write beside it."""
    path = tmp_path_factory.mktemp("torchrec")
    built = trainer(config(1, CONTINUED[1]), single(CPU))
    steps(built, batches(built)[:SAVED_AT])
    save_checkpoint(path / "one", SAVED_AT, tensors(built), {}, keep=1)
    return path


@cache
def alone(optimizer: str, precision: str = "fp32") -> dict[str, Any]:
    """The native engine in one process."""
    changes: dict[str, Any] = {"precision": precision, "loss_scale": 64.0}
    return train(trainer(config(1, optimizer, **changes), single(CPU)))


def run_ranks(world: int, folder: Path) -> dict[str, Any]:
    rank_processes.run(torchrec_ranks.main, world, folder, world=world)
    found: dict[str, Any] = json.loads((folder / f"torchrec-{world}.json").read_text())
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_torchrec_trains_like_the_native_engine(world: int, folder: Path) -> None:
    """One test a world, so that its ranks are started once, whoever runs the tests."""
    found = run_ranks(world, folder)
    continued, gated = found.pop("continued"), found.pop("gated")
    assert found.keys() == cases(world).keys()
    for name, (_, optimizer, changes) in cases(world).items():
        expected = alone(optimizer, changes.get("precision", "fp32"))
        exact = "precision" not in changes
        near = 2e-6 if exact else 2e-3
        assert found[name]["losses"] == pytest.approx(expected["losses"], rel=near), name
        assert found[name]["samples"] == expected["samples"], name
        auc = pytest.approx(expected["metrics"]["auc"], abs=1e-6 if exact else 1e-3)
        assert found[name]["metrics"]["auc"] == auc, name
        assert (found[name]["sent"]["rows"] > 0) == (world > 1), name

    following = pytest.approx(alone(CONTINUED[1])["losses"][SAVED_AT:], rel=2e-6)
    assert continued["losses"] == following
    back = trainer(config(1, CONTINUED[1]), single(CPU))
    checkpoints.load(
        folder / f"torchrec-{world}" / f"step-{SAVED_AT:08d}", tensors(back), exact=True
    )
    assert steps(back, batches(back, SAVED_AT)) == following

    assert gated == {"skipped": True, "changed_by_good": True, "changed_by_bad": False}
