"""The sharded engine on one GPU and the fused step: the host waits for nothing, losses agree."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import small
from trainmark import workloads
from trainmark.distributed.mesh import single
from trainmark.embeddings.placement.placement import (
    Placement,
    Shard,
    TablePlacement,
    even_ranges,
    to_json,
)
from trainmark.embeddings.tables.batch import IdGroup
from trainmark.run.loop import build_trainer
from trainmark.training.transfer import wait_for
from trainmark.workloads.dlrm.data import ClickBatch
from trainmark.workloads.dlrm.runs import Optimizer, Sharding
from trainmark.workloads.dlrm.step import DlrmTrainer

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
SAMPLES, STEPS, SETTLED = 512, 12, 8  # by then CUDA graphs are captured
WAYS = {
    "exchange": Sharding(force_exchange=True),
    "host memory": Sharding(host_tables=(0, 2)),
    "both": Sharding(host_tables=(0,), force_exchange=True),
}


def in_parts(kind: str, folder: Path) -> Sharding:
    """Every table in two parts, by rows or columns, both on this GPU."""
    tables = []
    for table, rows in enumerate(small.TABLE_ROWS):
        halves = even_ranges(rows if kind == "row_wise" else 8, 2)
        shards = tuple(
            Shard(device=0, rows=half, columns=(0, 8))
            if kind == "row_wise"
            else Shard(device=0, rows=(0, rows), columns=half)
            for half in halves
        )
        tables.append(TablePlacement(table=table, sharding=kind, shards=shards))  # type: ignore[arg-type]
    path = folder / "placement.json"
    path.write_text(to_json(Placement(devices=1, tables=tuple(tables))))
    return Sharding(force_exchange=True, placement=str(path))


def batches() -> list[ClickBatch]:
    random = torch.Generator().manual_seed(5)
    found = []
    for _ in range(STEPS):
        ids = [torch.randint(0, rows, (SAMPLES,), generator=random) for rows in small.TABLE_ROWS]
        found.append(
            ClickBatch(
                numerical=torch.randn(SAMPLES, 13, generator=random).half().to(GPU),
                labels=(torch.rand(SAMPLES, generator=random) < 0.3).to(GPU),
                groups=[IdGroup([0, 1, 2], torch.stack(ids).int().to(GPU))],
                samples=SAMPLES,
                global_samples=SAMPLES,
                position=SAMPLES,
                partial=False,
            )
        )
    return found


def trainer(rule: str, sharding: Sharding) -> DlrmTrainer:
    cfg = small.config(optimizer=Optimizer(name=rule), sharding=sharding)  # type: ignore[arg-type]
    built: Any = build_trainer(cfg, workloads.load("dlrm"), single(GPU))
    return built


def train(built: DlrmTrainer, waits_allowed: int) -> Iterator[float]:
    """Losses; behind the first `waits_allowed` steps, a host that waits is an error."""
    losses, of = [], batches()
    torch.accelerator.synchronize()
    ahead = built.prepare(of[0])
    for number, following in enumerate([*of[1:], of[0]]):
        if number == waits_allowed:
            torch.cuda.set_sync_debug_mode("error")
        prepared, ahead = ahead, built.prepare(following)
        wait_for(prepared.ready)
        losses.append(built.step(prepared, 0.1)[0])
    torch.cuda.set_sync_debug_mode("default")
    return (loss.item() for loss in losses)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("way", WAYS)
def test_the_host_waits_for_nothing(way: str, rule: str) -> None:
    """Neither here nor in the fused step."""
    expected = list(train(trainer(rule, Sharding()), SETTLED))
    assert list(train(trainer(rule, WAYS[way]), SETTLED)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "rowwise_adagrad"])
def test_a_fused_run_repeats_bit_for_bit(rule: str) -> None:
    once, again = trainer(rule, Sharding()), trainer(rule, Sharding())
    assert list(train(once, STEPS)) == list(train(again, STEPS))
    for name, tensor in once.weights().items():
        assert torch.equal(tensor, again.weights()[name]), name


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("kind", ["column_wise", "row_wise"])
def test_tables_in_parts(kind: str, rule: str, tmp_path: Path) -> None:
    """Of row-wise tables the host must know how many ids go where."""
    expected = list(train(trainer(rule, Sharding()), STEPS))
    waits = STEPS if kind == "row_wise" else SETTLED
    found = list(train(trainer(rule, in_parts(kind, tmp_path)), waits))
    assert found == pytest.approx(expected, rel=1e-5)


def test_adam_waits_but_learns_the_same() -> None:
    expected = list(train(trainer("adam", Sharding()), STEPS))
    for sharding in WAYS.values():
        assert list(train(trainer("adam", sharding), STEPS)) == pytest.approx(expected, rel=1e-5)
