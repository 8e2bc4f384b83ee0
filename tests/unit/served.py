"""Models that tests serve, and how they ask them."""

import json
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httptools")
pytest.importorskip("prometheus_client")
pytest.importorskip("starlette")
from starlette.testclient import TestClient

from tests.unit.criteo_oracle import random_lines, write_day
from tests.waiting import PATIENCE_S
from trainmark.cli import main
from trainmark.errors import InputError
from trainmark.inference import serving
from trainmark.inference.options import ServeOptions
from trainmark.inference.server import batching, own_form
from trainmark.inference.server.limits import Limits
from trainmark.inference.server.metrics import Metrics
from trainmark.inference.server.models import Models, Source
from trainmark.inference.server.web import build_app

NETWORK = (
    *("--model.embedding-dim", "8", "--model.bottom-mlp", "16", "8", "--model.top-mlp", "16", "1"),
    *("--global-batch", "64", "--device", "cpu", "--warmup-clock", "2", "--evals-per-epoch", "1"),
)
LINES = random_lines(random.Random(1), 600)
DEFAULT = Limits()
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
    chosen = options_for(folder, **options)
    return client_of(*serving.sources(chosen), limits=chosen.limits)


def options_for(*folders: Path | str, **options: Any) -> ServeOptions:
    return ServeOptions(folders=tuple(map(str, folders)), device="cpu", **options)


class Doubler:
    """Numbers in, twice the numbers out; with 13, 17 or 19 something goes wrong."""

    answer = "doubled"
    facts = {"name": "doubler", "requests": "Numbers.", "step": None}  # noqa: RUF012
    example: dict[str, Any] = {"numbers": [1]}  # noqa: RUF012
    inputs: Sequence[Any] = ()
    output = None

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []

    def read(self, body: dict[str, Any]) -> list[Any]:
        if "numbers" not in body:
            raise InputError("no numbers")
        return list(body["numbers"])

    def score(self, requests: Sequence[Any]) -> Any:
        rows = [row for request in requests for row in request]
        self.calls.append(rows)
        if 13 in rows:
            raise InputError("thirteen")
        if 17 in rows:
            raise RuntimeError("a bug")
        return np.array([float("nan") if row == 19 else 2 * row for row in rows])


class Stuck(Doubler):
    """Answers when it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on, self.working = threading.Event(), threading.Event()

    def score(self, requests: Sequence[Any]) -> Any:
        self.working.set()
        assert self.go_on.wait(PATIENCE_S)
        return super().score(requests)


def queue_of(scorer: Any, limits: Limits = DEFAULT) -> batching.Queue:
    return batching.Queue(lambda: batching.Loaded(scorer), limits)


def question(body: Any, has_left: bool = False) -> batching.Question:
    return own_form.question(json.dumps(body).encode(), lambda: has_left)


def numbers(*given: float, has_left: bool = False) -> batching.Question:
    return question({"numbers": given}, has_left)


def source_of(scorer: Any, name: str = "doubler") -> Source:
    """A scorer that is there already, as if it were loaded."""
    return Source(name=name, newest=lambda: 1, load=lambda newest: scorer)


def client_of(*sources: Source, limits: Limits = DEFAULT) -> TestClient:
    return TestClient(app_of(*sources, limits=limits), raise_server_exceptions=False)


def app_of(*sources: Source, limits: Limits = DEFAULT, api_keys: tuple[bytes, ...] = ()) -> Any:
    metrics = Metrics()
    models = Models(sources, limits, metrics)
    models.load()
    return build_app(models, limits, metrics, api_keys)


def assert_refused(answer: Any, *parts: str) -> None:
    """With a sentence that has these parts."""
    assert answer.status_code == 422
    for part in parts:
        assert part in answer.json()["detail"]


@contextmanager
def process(
    *words: str, cwd: Path | None = None
) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A server in a process of its own, its address, and the lines that it said before."""
    command = [sys.executable, "-m", "trainmark", "serve", *words, "--port", "0"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command += ["--device", "cpu"]
    with subprocess.Popen(command, cwd=cwd, text=True, **pipes) as running:
        try:
            assert running.stdout is not None
            assert running.stderr is not None
            lines: list[str] = []
            while not lines or "(Ctrl-C stops it)" not in lines[-1]:
                lines.append(running.stdout.readline())
                assert lines[-1], running.stderr.read()
            (url,) = re.findall(r"(https?://\S+) \(", lines[-1])
            yield running, url, lines
        finally:
            running.kill()
