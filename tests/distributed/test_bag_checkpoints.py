"""Several ids per feature: what one process saved two ranks go on with, and the other way round."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import rank_processes
from tests.checkpoint_tensors import save_checkpoint
from tests.distributed import bag_ranks, joining, small_dlrm
from tests.distributed.bag_ranks import step, write_data
from tests.distributed.small_dlrm import CPU, batches, tensors, trainer
from trainmark.checkpoint import checkpoints, folders
from trainmark.distributed import mesh as meshes
from trainmark.distributed.mesh import single
from trainmark.workloads.dlrm.step import DlrmTrainer

BF16 = small_dlrm.stored("bf16", state_precision="bf16")
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("mixture", "sgd", {}),
    ("mixture", "rowwise_adagrad", {"pooling": "mean"}),
    ("mixture", "adagrad", {"eps": 1e-3}),
    ("mixture_host", "adam", {}),
    ("row_wise", "adam", {"pooling": "mean"}),
    ("formats", "rowwise_adagrad", small_dlrm.stored("int8")),
    ("formats", "adagrad", BF16 | {"eps": 1e-3}),
]
SAVED_AT = 2


def alone(case: int, folder: Path) -> DlrmTrainer:
    _, optimizer, changes = CASES[case]
    cfg = small_dlrm.config(1, optimizer, data=str(folder / "data"), **changes)
    return trainer(cfg, single(CPU))


def path_of(folder: Path, ranks: int, case: int) -> Path:
    return folder / f"saved-{ranks}-{case}"


def save(built: DlrmTrainer, folder: Path, steps: int) -> None:
    save_checkpoint(folder, steps, tensors(built), {}, keep=1)


def go_on(built: DlrmTrainer, folder: Path) -> None:
    path = folders.latest(folder)
    assert path is not None
    checkpoints.load(path, tensors(built), exact=True)
    built.state_loaded()


def compare(built: DlrmTrainer, expected: dict[str, Any]) -> None:
    """Weights and optimiser state, as near as another order of additions lets them be."""
    held, compared = tensors(built), 0
    for name, whole in expected.items():
        for found, part in small_dlrm.parts(held.get(name), whole):
            # A code may be one off, and a number of 16 bits the next one.
            near = {torch.int8: 1.0, torch.bfloat16: 2e-2}.get(found.dtype, 1e-5)
            told = partial("{}: {}".format, name)
            rel = 0 if near == 1 else near
            torch.testing.assert_close(found.float(), part.float(), rtol=rel, atol=near, msg=told)
            compared += 1
    assert compared > len(expected) / 2


def on_ranks(rank: int, folder: Path) -> None:
    joining.join(rank, 2, folder / "store")
    mesh = meshes.build(CPU, {"dp": 2})
    for case, (kind, optimizer, changes) in enumerate(CASES):
        data = str(folder / "data")
        cfg = small_dlrm.placed(2, optimizer, kind, folder, data=data, **changes)
        built = trainer(cfg, mesh)
        go_on(built, path_of(folder, 1, case))
        loss = step(built, batches(built)[SAVED_AT], cfg.lr)
        wanted = torch.load(folder / f"expected-{case}.pt")
        assert loss == pytest.approx(wanted.pop("loss"), rel=1e-5), CASES[case]
        compare(built, wanted)
        save(built, path_of(folder, 2, case), SAVED_AT + 1)
    dist.barrier()
    dist.destroy_process_group()


def test_one_process_two_ranks_and_back(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    one = [alone(case, tmp_path) for case in range(len(CASES))]
    for case, built in enumerate(one):
        assert built.cfg.model.hotness == bag_ranks.HOTNESS
        *first, last = batches(built)[: SAVED_AT + 1]
        for batch in first:
            step(built, batch, built.cfg.lr)
        save(built, path_of(tmp_path, 1, case), SAVED_AT)
        loss = step(built, last, built.cfg.lr)
        kept = {name: tensor.clone() for name, tensor in tensors(built).items()}
        torch.save(kept | {"loss": loss}, tmp_path / f"expected-{case}.pt")
    rank_processes.run(on_ranks, tmp_path, world=2)
    for case, built in enumerate(one):
        again = alone(case, tmp_path)
        go_on(again, path_of(tmp_path, 2, case))
        compare(again, tensors(built))
        batch = batches(built)[SAVED_AT + 1]
        losses = [step(each, batch, built.cfg.lr) for each in (again, built)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4 if case >= 5 else 1e-5)
