"""Tables narrower than others: the model is that of full rows whose last columns are zeros."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.small import config, newest, saved, train, trainer
from tests.unit.refusals import refused, small
from trainmark.embeddings.placement.placement import Options
from trainmark.embeddings.placement.strategies import by_strategy
from trainmark.embeddings.sharded import ShardedEngine
from trainmark.workloads.dlrm.data import build_data
from trainmark.workloads.dlrm.runs import DlrmRun, Model, Optimizer, Sharding
from trainmark.workloads.dlrm.sharding import plan_devices
from trainmark.workloads.dlrm.sizes import sizes, table_bytes
from trainmark.workloads.dlrm.step import DlrmTrainer, predict

WIDTHS = (8, 2, 5)
FLAGS = ("--model.table-widths", "8", "2", "5")
ROWS = (50, 7, 3)


def narrow(**changes: Any) -> DlrmRun:
    return config(model=dataclasses.replace(config().model, table_widths=WIDTHS), **changes)


def table(built: DlrmTrainer, number: int) -> Tensor:
    held: Any = built.weights()[f"tables.{number}.weight"]
    if isinstance(held, Tensor):
        return held
    (shard,) = held.shards
    rows: Tensor = shard.tensor
    return rows


def without_their_last_columns(full: DlrmTrainer) -> None:
    for number, width in enumerate(WIDTHS):
        table(full, number)[:, width:] = 0


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "in order"])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("sgd", {}),
        ("adagrad", {}),
        ("adam", {}),
        ("adagrad", {"micro_batch": 128}),
        ("adagrad", {"sharding": Sharding(host_tables=(0, 1))}),
        ("sgd", {"precision": "bf16"}),
    ],
    ids=str,
)
def test_steps_are_those_of_zeros_in_full_rows(
    name: Any, changes: dict[str, Any], in_place: bool
) -> None:
    optimizer = Optimizer(name=name, weight_decay=0.1)
    ours = trainer(narrow(optimizer=optimizer, **changes))
    full = trainer(config(optimizer=optimizer, **changes))
    assert isinstance(ours.model.tables, ShardedEngine)
    ours.model.tables._reads_in_place &= in_place
    without_their_last_columns(full)
    for number, width in enumerate(WIDTHS):
        assert table(ours, number).shape == (ROWS[number], width)
        table(ours, number).copy_(table(full, number)[:, :width])
    close = 2e-2 if "precision" in changes else 1e-4
    for batch in list(build_data(full.cfg, "train", 0, 1))[-3:]:
        losses = [built.step(built.prepare(batch), 0.2)[0].item() for built in (ours, full)]
        assert losses[0] == pytest.approx(losses[1], rel=close)
        without_their_last_columns(full)
    for number, width in enumerate(WIDTHS):
        expected = table(full, number)[:, :width]
        torch.testing.assert_close(table(ours, number), expected, rtol=close, atol=close / 10)
    held_out = build_data(full.cfg, "test", 0, 1)
    torch.testing.assert_close(
        predict(ours, held_out).logits, predict(full, held_out).logits, rtol=close, atol=close
    )


def test_row_wise_adagrad_takes_the_mean_over_a_tables_own_columns() -> None:
    """The state of a row is the mean square of its gradient, which SGD shows."""
    by_sgd = trainer(narrow(optimizer=Optimizer(name="sgd")))
    ours = trainer(narrow(optimizer=Optimizer(name="rowwise_adagrad")))
    batch = next(iter(build_data(ours.cfg, "train", 0, 1)))
    before = [table(by_sgd, number).clone() for number in range(3)]
    for built in (by_sgd, ours):
        built.step(built.prepare(batch), 1.0)
    for number in range(3):
        gradient = before[number] - table(by_sgd, number)
        state: Any = ours.state_dict()[f"tables.{number}.sum"]
        expected = gradient.square().mean(1)
        torch.testing.assert_close(state.shards[0].tensor, expected, rtol=1e-3, atol=1e-9)


def test_bytes_are_those_that_were_planned() -> None:
    for optimizer in ("sgd", "rowwise_adagrad", "adagrad"):
        cfg = narrow(optimizer=Optimizer(name=optimizer))
        (plan,), held = plan_devices(cfg), trainer(cfg).device_bytes()
        assert (plan.weights, plan.optimizer) == (held.weights, held.optimizer)
    elements = 50 * 8 + 7 * 2 + 3 * 5
    assert table_bytes(cfg) == 4 * elements
    assert sizes(config())["parameters"] - sizes(cfg)["parameters"] == 60 * 8 - elements


def test_widths_by_rule() -> None:
    model = Model(table_rows=(1, 4, 100, 10_000, 10**6, 10**9), table_widths="auto")
    assert model.widths == (8, 8, 16, 64, 128, 128)
    assert dataclasses.replace(model, embedding_dim=48).widths[2:] == (16, 48, 48, 48)
    assert dataclasses.replace(model, table_widths=None).widths == (128,) * 6


def test_a_run_is_continued_and_evaluated(tmp_path: Path) -> None:
    assert train(tmp_path / "whole", *FLAGS) == 0
    assert train(tmp_path / "parts", *FLAGS, "--max-steps", "3") == 0
    assert train(tmp_path / "parts", *FLAGS) == 0
    assert saved(newest(tmp_path / "whole")) == saved(newest(tmp_path / "parts"))


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("8", "2"), ("a width for each of the 3 tables", "Received: 8 2.")),
        (("8", "0", "3"), ("between 1 and model.embedding_dim (8)", "Received: 8 0 3.")),
        (("9", "8", "8"), ("between 1 and model.embedding_dim (8)",)),
        (("8", "4", "8", "--engine", "torchrec"), ("whole on one device", "--engine torchrec")),
        (
            ("8", "4", "8", "--data-parallel-threshold", "50"),
            ("whole on one device", "--data-parallel-threshold"),
        ),
        (
            ("8", "4", "8", "--table-precision", "int8", "--fp32-up-to-rows", "5"),
            ("are fp32", "--table-precision int8"),
        ),
    ],
    ids=str,
)
def test_what_is_refused(
    flags: tuple[str, ...], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, small("--model.table-widths", *flags), *parts)


def test_devices_get_whole_tables_by_their_bytes() -> None:
    placed = by_strategy(
        "memory_optimized", (10, 100, 30, 7), (8, 1, 2, 4), 2, Options(host_tables=[3])
    )
    found = [(t.table, t.memory, [(s.device, s.columns) for s in t.shards]) for t in placed.tables]
    assert found == [
        (0, "device", [(1, (0, 8))]),
        (1, "device", [(0, (0, 1))]),
        (2, "device", [(1, (0, 2))]),
        (3, "host", [(0, (0, 4))]),
    ]
