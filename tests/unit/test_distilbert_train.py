"""Whole runs of a small DistilBERT: results, checkpoints, the saved model."""

import json
from pathlib import Path

import pytest
import torch

from tests.small import curve, newest, result, saved
from tests.small_distilbert import FLAGS, config, trainer
from trainmark.cli import main
from trainmark.hardware import devices
from trainmark.workloads.distilbert.data import build_data
from trainmark.workloads.distilbert.step import evaluate


def train(output: Path, *flags: str) -> int:
    return main(["train", "distilbert-demo", *FLAGS, "--output", str(output), *flags])


@pytest.mark.parametrize("mode", ["padded", "packed"])
def test_a_run_and_its_result(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", "--mode", mode) == 0
    found = result(tmp_path / "run")
    assert found["samples"] == 100
    assert found["steps"]["all"] == 7
    assert found["tokens"] > 700
    assert found["quality"]["metric"] == "accuracy"
    assert found["quality"]["split"] == "validation"
    assert any(note.startswith(mode.capitalize()) for note in found["notes"])
    assert any("from scratch" in note for note in found["notes"])
    assert ("mode" in found["changed"]) == (mode == "packed")
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["dim"] == 16
    capsys.readouterr()
    assert main(["export", str(tmp_path / "run")]) == 2
    assert "run/model is its trained model" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    evaluation = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert evaluation["splits"]["validation"]["accuracy"] == found["quality"]["value"]


def test_a_continued_run_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    """With dropout on: which tokens drop is a function of the position, not of the process."""
    assert train(tmp_path / "whole") == 0
    assert train(tmp_path / "parts", "--max-steps", "3") == 0
    assert train(tmp_path / "parts") == 0
    assert saved(newest(tmp_path / "parts")) == saved(newest(tmp_path / "whole"))


def test_seeds_differ(tmp_path: Path) -> None:
    assert train(tmp_path / "a") == 0
    assert train(tmp_path / "b", "--seed", "1") == 0
    assert saved(newest(tmp_path / "a")) != saved(newest(tmp_path / "b"))


def test_tf32_is_a_setting_of_the_run_not_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a CPU taken for an H200: it may compute as in fp32, but torch was told what to do."""
    assert train(tmp_path / "cpu", "--precision", "tf32") == 2
    assert "tf32 needs a GPU" in capsys.readouterr().err
    monkeypatch.setattr(
        devices,
        "identify",
        lambda device: devices.Device(key="h200", name="NVIDIA H200", memory_bytes=141 * 2**30),
    )
    before = torch.get_float32_matmul_precision()
    try:
        for precision, products in (("tf32", "high"), ("fp32", "highest")):
            flags = ("--precision", precision, "--no-compile")
            assert train(tmp_path / precision, *flags) == 0
            assert torch.get_float32_matmul_precision() == products
    finally:
        torch.set_float32_matmul_precision(before)
    found = {precision: result(tmp_path / precision) for precision in ("tf32", "fp32")}
    assert found["tf32"]["precision"] == "tf32"
    assert {row["peak_flops"] for row in found["tf32"]["mfu"]} == {495e12}
    assert "precision" not in found["tf32"]["changed"]
    losses = [[loss for *_, loss in curve(tmp_path / precision)] for precision in found]
    assert len(losses[0]) == 7
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_evaluation_counts_every_sentence_once() -> None:
    """With batches that do not divide the split, and with stand-ins."""
    found = []
    for eval_batch in (2048, 100, 7):
        cfg = config(eval_batch=eval_batch)
        found.append(evaluate(trainer(cfg), build_data(cfg, "validation", 0, 1)))
    for other in found[1:]:
        assert other["accuracy"] == found[0]["accuracy"]
        assert other["loss"] == pytest.approx(found[0]["loss"], rel=1e-5)


def test_dry_run_needs_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--dry-run", "--cluster", "a100-40gx2x8"]
    assert main(["train", "distilbert-sst2", *flags]) == 0
    assert "activations" in capsys.readouterr().out
