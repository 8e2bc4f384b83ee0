"""Clicks that count several times, negatives that were left out, and scores that take both back."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from tests.small import config, train, trainer, write_dataset
from tests.unit.refusals import refused
from trainmark.clickdata.negatives import negative_rate
from trainmark.errors import InputError
from trainmark.run import evaluation
from trainmark.run.run_folder import read_config
from trainmark.workloads.dlrm.data import build_data
from trainmark.workloads.dlrm.runs import score_offset


def data(folder: Path, rate: float | None, *, kept: float = 1.0) -> Path:
    """Rows of whose clicks, three in ten, no feature tells; of the others, a share is kept."""
    write_dataset(folder, train_rows=4000, test_rows=4000)
    if kept < 1:
        labels = np.fromfile(folder / "train" / "label.bin", np.bool_)
        random = np.random.default_rng(5)
        (random.random(len(labels)) < 0.3 / (0.3 + 0.7 * kept)).tofile(folder / "train/label.bin")
    if rate is not None:
        (folder / "prepare.json").write_text(json.dumps({"negative_rate": rate}))
    return folder


def evaluated(run: Path, on: Path | None = None) -> dict[str, float]:
    found = evaluation.evaluate(run, data=str(on) if on else None, device="cpu")
    test: dict[str, float] = found["splits"]["test"]
    return test


FLAGS = (
    "--lr",
    "0.1",
    "--model.table-rows",
    "50",
    "7",
    "3",
    "--epochs",
    "5",
    "--global-batch",
    "200",
)
ENTROPY = -0.3 * math.log(0.3) - 0.7 * math.log(0.7)


def test_scores_have_the_logs_own_click_rate(tmp_path: Path) -> None:
    """Whatever was learned: clicks counted 5 times, among one in four of the other rows."""
    sampled, whole = data(tmp_path / "sampled", 0.25, kept=0.25), data(tmp_path / "whole", None)
    run = tmp_path / "run"
    flags = ("--data", str(sampled), "--positive-weight", "5", *FLAGS)
    assert train(run, *flags) == 0
    cfg = read_config(run)
    assert cfg.negative_rate == 0.25
    assert score_offset(cfg) == pytest.approx(math.log(0.25 / 5))
    found = evaluated(run)
    assert found["calibration"] == pytest.approx(1, abs=0.1)
    assert found["log_loss"] == pytest.approx(ENTROPY, abs=0.05)
    # Rows of a dataset that left none out get the same scores.
    assert evaluated(run, whole) == found


@pytest.mark.parametrize("rate", [0, -1, 1.5, "0.5", True, None])
def test_rates_that_are_none(
    rate: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = data(tmp_path / "data", None)
    (folder / "prepare.json").write_text(json.dumps({"negative_rate": rate}))
    flags = ["train", "dlrm-demo", "--data", str(folder), "--output", str(tmp_path / "run")]
    refused(
        capsys, flags, f"negative_rate must be a number above 0 and up to 1. Received: {rate!r}"
    )


def test_datasets_without_a_rate_have_all_rows(tmp_path: Path) -> None:
    assert negative_rate(data(tmp_path / "data", None)) == 1
    (tmp_path / "data" / "prepare.json").write_text("{}")
    assert negative_rate(tmp_path / "data") == 1


@pytest.mark.parametrize("fused", [torch.float32, None])
def test_the_loss_and_its_step_are_torchs(fused: torch.dtype | None) -> None:
    built, batch_of = trainer(config(positive_weight=3.0)), build_data(config(), "train", 0, 1)
    built.model.bottom.fused_dtype = built.model.top.fused_dtype = fused
    batch = next(iter(batch_of))
    labels, logits = batch.labels.float(), built.predict(built.prepare(batch)) + math.log(3)
    expected = binary_cross_entropy_with_logits(logits, labels, pos_weight=torch.tensor(3.0))
    # The output's bias has the mean of the logits' gradients.
    gradient = ((1 + 2 * labels) * (logits.sigmoid() - labels)).mean()
    loss, _ = built.step(built.prepare(batch), 0.0)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    bias = dict(built.model.named_parameters())["top.2.bias"].grad
    assert bias is not None
    assert bias.item() == pytest.approx(gradient.item(), rel=1e-4)


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan])
def test_weights_that_are_none(weight: float) -> None:
    with pytest.raises(InputError, match=r"positive_weight must be (above 0|a finite number)"):
        config(positive_weight=weight)
