"""An interaction that no engine has heard of trains behind `lookup` as in plain PyTorch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import rank_processes
from tests.distributed.interaction_ranks import EPS, OPTIMIZERS, check, on_ranks, trainer
from tests.distributed.small_dlrm import CPU, DIM, TABLE_ROWS, batches, config, placed
from trainmark.distributed.mesh import single
from trainmark.embeddings.fused import FusedEngine
from trainmark.embeddings.tables import row_update
from trainmark.embeddings.tables.formats import Formats
from trainmark.embeddings.tables.update import Adagrad, Sgd, UpdateRule
from trainmark.kernels import gather_rows, sparse_update

RULES: dict[str, UpdateRule] = {"sgd": Sgd(), "adagrad": Adagrad(EPS)}
pytestmark = pytest.mark.usefixtures("no_process_group_is_left")


@pytest.mark.parametrize("micro_batch", [96, 24])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_on_one_device(optimizer: str, micro_batch: int, tmp_path: Path) -> None:
    cfg = config(1, optimizer, micro_batch=micro_batch)
    check(trainer(cfg, single(CPU)))
    check(trainer(cfg, single(CPU), fused(optimizer)))
    check(trainer(placed(1, optimizer, "mixture", tmp_path, micro_batch=micro_batch), single(CPU)))


def fused(optimizer: str) -> FusedEngine:
    formats = Formats(of_tables=["fp32"] * 6, seed=1)
    return FusedEngine(TABLE_ROWS, DIM, RULES[optimizer], formats)


def test_by_the_kernels_of_the_fused_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("kernels run on the GPU here")
    monkeypatch.setattr(gather_rows, "_has_kernel", lambda _: True)
    monkeypatch.setattr(row_update, "update_rows", sparse_update.update_rows_triton)
    for optimizer in OPTIMIZERS:
        cfg = config(1, optimizer, global_batch=8)
        check(trainer(cfg, single(CPU), fused(optimizer)), steps=2)


@pytest.mark.parametrize("engine", [None, "fused", "sharded"])
def test_a_gradient_of_rows_that_is_not_finite_is_not_applied(
    engine: str | None, tmp_path: Path
) -> None:
    cfg = placed(1, "sgd", "mixture", tmp_path) if engine == "sharded" else config(1, "sgd")
    built = trainer(cfg, single(CPU), fused("sgd") if engine == "fused" else None)
    lookup_rows = built.model.tables.lookup

    def poisoned(lookup: Any) -> Tensor:
        rows_BFD = lookup_rows(lookup)
        rows_BFD.register_hook(lambda grads: grads.index_fill(0, torch.tensor(3), torch.inf))
        return rows_BFD

    built.model.tables.lookup = poisoned  # type: ignore[method-assign, assignment]
    (batch,) = batches(built)[:1]
    _, skipped = built.step(built.prepare(batch), 0.1)
    assert skipped


@pytest.mark.parametrize("engine", ["native", "torchrec"])
def test_on_two_ranks(engine: str, tmp_path: Path) -> None:
    if engine == "torchrec":
        pytest.importorskip("torchrec")
    rank_processes.run(on_ranks, tmp_path, engine, world=2)
