"""A step that is replayed as a CUDA graph is the eager step, whatever happens between replays."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import small
from trainmark import workloads
from trainmark.distributed.mesh import single
from trainmark.kernels import fp8_mlp
from trainmark.kernels.fp8_cross import has_fp8
from trainmark.run.loop import build_trainer
from trainmark.training.transfer import wait_for
from trainmark.workloads.dlrm.data import build_data
from trainmark.workloads.dlrm.runs import DlrmRun, Optimizer, TableFormat
from trainmark.workloads.dlrm.step import DlrmTrainer, predict

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
EPOCHS = 4  # of 8 steps, the last of each a partial batch: graphs are replayed from step 7 on
POISONED, EVALUATED = 20, (9, 17)
INT8 = TableFormat(table_precision="int8", fp32_up_to_rows=5)
WIDE = dataclasses.replace(small.config().model, top_mlp=(32, 48, 16, 1))  # three layers for fp8
DROPPING = dataclasses.replace(WIDE, dropout=0.3, interaction_dropout=0.1)
NARROW = dataclasses.replace(small.config().model, table_widths=(8, 2, 4))
CROSSED = dataclasses.replace(WIDE, interaction="dcn")
CROSSED_IN_FP8 = dataclasses.replace(CROSSED, cross_rank=16)  # a whole step, as is their width
PROJECTED = dataclasses.replace(DROPPING, interaction="projection")
BAGS = dataclasses.replace(WIDE, hotness=(3, 1, 2))
MEANS = dataclasses.replace(BAGS, pooling="mean")
DECAYING = Optimizer(name="rowwise_adagrad", weight_decay=0.01)
CASES: dict[str, dict[str, Any]] = {
    "SGD": {"optimizer": Optimizer(name="sgd")},
    "row-wise Adagrad": {"optimizer": Optimizer(name="rowwise_adagrad")},
    "Adagrad": {"optimizer": Optimizer(name="adagrad")},
    "int8 tables": {"optimizer": Optimizer(name="sgd"), "table_format": INT8},
    "dynamic loss scale": {"optimizer": Optimizer(name="sgd"), "precision": "fp16"},
    "fp8": {"optimizer": Optimizer(name="sgd"), "precision": "fp8", "model": WIDE},
    "dropout and decay": {"optimizer": DECAYING, "model": DROPPING, "positive_weight": 3.0},
    "fp8 with dropout": {
        "optimizer": Optimizer(name="sgd"),
        "precision": "fp8",
        "model": DROPPING,
    },
    "three widths": {"optimizer": DECAYING, "model": NARROW},
    "a cross network": {"optimizer": Optimizer(name="adagrad"), "model": CROSSED},
    "a compiled cross network": {
        "optimizer": Optimizer(name="sgd"),
        "precision": "bf16",
        "model": CROSSED,
        "compile": True,
    },
    "a cross network in fp8": {
        "optimizer": Optimizer(name="sgd"),
        "precision": "fp8",
        "model": CROSSED_IN_FP8,
    },
    "projections": {"optimizer": DECAYING, "model": PROJECTED},
    "bags": {"optimizer": DECAYING, "model": BAGS, "multi_hot": "uniform"},
    "means of bags": {"optimizer": DECAYING, "model": MEANS, "multi_hot": "uniform"},
}


def rate(step: int) -> float:
    """Another in every step, and exact in fp32."""
    return 2.0 ** -(step % 5)


def train(cfg: DlrmRun, *, every: int | None = None) -> tuple[DlrmTrainer, Tensor]:
    """The trainer, and of each step the loss, whether it was skipped, and what was observed.

    Each batch is prepared a step ahead, and lies there while others are evaluated. With `every`, so
    many steps apart, one is computed twice.
    """
    built: Any = build_trainer(cfg, workloads.load("dlrm"), single(GPU))
    batches = list(build_data(cfg, "train", 0, 1))
    assert len(batches) == EPOCHS * small.STEPS
    batches[POISONED].numerical[3, 4] = torch.nan
    outcomes, ahead = [], built.prepare(batches[0])
    for step, following in enumerate([*batches[1:], batches[0]]):
        prepared, ahead = ahead, built.prepare(following)
        wait_for(prepared.ready)
        if every is None or step % every:
            outcome = built.step(prepared, rate(step))
        else:
            *outcome, differ = built.checked_step(prepared, rate(step))
            assert not any(torch.stack(list(differ.values())).tolist()), (step, differ)
        outcomes.append(torch.stack([*outcome, *built.observed().values()]))
        if step in EVALUATED:
            predict(built, build_data(cfg, "test", 0, 1))
    return built, torch.stack(outcomes).cpu()


def held(built: DlrmTrainer) -> dict[str, Tensor]:
    """Weights and state; of an engine of many ranks, the only part of each table."""
    found: dict[str, Any] = built.weights() | built.state_dict()
    return {name: t if isinstance(t, Tensor) else t.shards[0].tensor for name, t in found.items()}


@pytest.mark.parametrize("case", CASES)
def test_graphs_are_the_eager_step(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_mlp, "SMALL_LAYER", 100)
    changes = CASES[case] | {"epochs": EPOCHS}
    graphed, found = train(small.config(**changes))
    eager, expected = train(small.config(**changes, eager=True))
    cross = [layer.down.weight for layer in getattr(graphed.model.interaction, "cross", ())]
    assert has_fp8(cross) == (case == "a cross network in fp8")
    assert eager._slots is None
    assert graphed._slots is not None
    assert all(slot._train._graph is not None for slot in graphed._slots._slots)
    assert found[POISONED, 1] == 1
    assert (found[:, 1] == 0).sum() > 3 * small.STEPS
    assert_close((graphed, found), (eager, expected), changes)


def assert_close(
    ours: tuple[DlrmTrainer, Tensor], theirs: tuple[DlrmTrainer, Tensor], changes: dict[str, Any]
) -> None:
    """What two trainers hold, and the outcomes of their steps."""
    close = 1e-2 if "precision" in changes or "table_format" in changes else 1e-4
    found, expected = ours[1], theirs[1]
    assert torch.equal(found[:, 1], expected[:, 1])
    good = found[:, 1] == 0
    for column, times in ((0, 1), (2, 10)):  # losses; norms, in which all that differs adds up
        torch.testing.assert_close(
            found[good, column], expected[good, column], rtol=times * close, atol=times * close
        )
    wanted = held(theirs[0])
    for name, tensor in held(ours[0]).items():
        assert tensor.isfinite().all(), name
        if tensor.dtype == torch.float32 and not name.endswith(".step"):
            torch.testing.assert_close(tensor, wanted[name], rtol=close, atol=close)


@pytest.mark.parametrize(
    "case",
    [
        "SGD", "row-wise Adagrad", "int8 tables", "fp8", "three widths", "a cross network in fp8",
        "bags", "means of bags",
    ],
)  # fmt: skip
def test_checked_steps_are_the_steps(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In graphs of their own; computed twice, they give the same bits."""
    monkeypatch.setattr(fp8_mlp, "SMALL_LAYER", 100)
    changes = CASES[case] | {"epochs": EPOCHS}
    checked, found = train(small.config(**changes), every=3)
    plain, expected = train(small.config(**changes))
    assert checked._slots is not None
    assert any(slot._train_checked._graph is not None for slot in checked._slots._slots)
    assert_close((checked, found), (plain, expected), changes)
