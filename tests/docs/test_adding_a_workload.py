"""The toy workload of `docs/adding_a_workload.md` trains through the loop."""

import dataclasses
import re
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.docs.commands import ROOT
from trainmark.contract import Workload
from trainmark.distributed import mesh
from trainmark.run.loop import Training
from trainmark.workloads import dlrm

PAGE = (ROOT / "docs" / "adding_a_workload.md").read_text()


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The page's code as a module."""
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    module = ModuleType("toy_of_the_docs")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look it up there
    exec(compile(code, "adding_a_workload.md", "exec"), module.__dict__)
    return module


def run(toy: Any, folder: Path, **settings: Any) -> Training:
    cfg = toy.LineRun(name="line", global_batch=64, lr=0.5, epochs=4, target=1e-3, **settings)
    one = mesh.single(torch.device("cpu"))
    folder.mkdir(exist_ok=True)
    training = Training(cfg, toy.LINE, one, folder, started=time.perf_counter())
    training.set_up()
    training.run()
    return training


def weight(training: Training) -> torch.Tensor:
    return training.trainer.weights()["weight"]


def test_the_toy_trains(toy: Any, tmp_path: Path) -> None:
    training = run(toy, tmp_path, stop_at_target=False)
    assert training.clocks.totals.samples == 4000
    assert training.clocks.totals.steps_partial == 4
    assert abs(weight(training).item() - 3) < 0.1
    error = training.progress.evaluations[-1].metrics["error"]
    assert error is not None
    assert error < 1e-3


def test_the_toy_continues(toy: Any, tmp_path: Path) -> None:
    """Cut into two sessions, it ends where one session ends."""
    whole = run(toy, tmp_path / "whole", stop_at_target=False)
    run(toy, tmp_path / "cut", stop_at_target=False, max_steps=21)
    cut = run(toy, tmp_path / "cut", stop_at_target=False)
    assert cut.clocks.totals.sessions == 2
    assert torch.equal(weight(cut), weight(whole))


def test_the_page_lists_the_contract() -> None:
    """Every part of the contract is described, and no other file is expected of a workload."""
    fields = dataclasses.fields(Workload)
    for name in [f.name for f in fields if f.default is dataclasses.MISSING]:
        assert f"`{name}(" in PAGE or name in ("metric", "better"), name
    described = set(re.findall(r"^\| `(\w+\.py)` \|", PAGE, re.M))
    own = set(re.findall(r"\b\w+\.py\b", dlrm.__doc__ or ""))  # which its docstring names
    present = {p.name for p in (ROOT / "trainmark" / "workloads" / "dlrm").glob("*.py")}
    assert present - own == described
