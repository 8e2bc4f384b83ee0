"""Models that tests serve, and how they ask them."""

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
from fastapi.testclient import TestClient

from tests.unit.criteo_oracle import random_lines, write_day
from trainmark.cli import main
from trainmark.inference import server, serving
from trainmark.inference.options import ServeOptions

NETWORK = (
    *("--model.embedding-dim", "8", "--model.bottom-mlp", "16", "8", "--model.top-mlp", "16", "1"),
    *("--global-batch", "64", "--device", "cpu", "--warmup-clock", "2", "--evals-per-epoch", "1"),
)
LINES = random_lines(random.Random(1), 600)
TEST_LINES = LINES[400:500]
"""The first half of the last day."""


def train(data: Path, run: Path, *flags: str) -> Path:
    flags = ("--data", str(data), "--output", str(run), *NETWORK, *flags)
    assert main(["train", "dlrm-demo", *flags]) == 0
    return run


def train_on_clicks(folder: Path) -> Path:
    """Write `data` in Criteo's format, and `run`, which was trained on it, into a folder."""
    write_day(folder / "day_0", LINES[:400])
    write_day(folder / "day_1", LINES[400:])
    source, data = str(folder / "day_*"), str(folder / "data")
    flags = ["--frequency-threshold", "2", "--vocabulary-from", "train"]
    assert main(["prepare", "criteo", "--input", source, "--output", data, *flags]) == 0
    train(folder / "data", folder / "run")
    return folder


def served(folder: Path, **options: Any) -> TestClient:
    scorer = serving.load(ServeOptions(folder=folder, device="cpu", **options))
    return TestClient(server.build_app(scorer), raise_server_exceptions=False)
