"""The toy workload of `docs/adding_a_workload.md` trains through the loop."""

import dataclasses
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.docs.commands import ROOT
from trainmark.contract import Definition, Workload
from trainmark.distributed import mesh
from trainmark.run.loop import Training
from trainmark.workloads import dlrm

PAGE = (ROOT / "docs" / "adding_a_workload.md").read_text()
(CODE,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The page's code as a module."""
    module = ModuleType("toy_of_the_docs")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look it up there
    exec(compile(CODE, "adding_a_workload.md", "exec"), module.__dict__)
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


def test_mypy_checks_the_toy(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(CODE)
    wrong = CODE.replace("def host_state(self)", "def host_state_(self)")
    (tmp_path / "wrong.py").write_text(wrong)
    # With the options of `make lint`, whose cache it then finds.
    command = [sys.executable, "-m", "mypy"]
    right, bad = (
        subprocess.run([*command, str(tmp_path / name)], capture_output=True, text=True, cwd=ROOT)
        for name in ("toy.py", "wrong.py")
    )
    assert wrong != CODE
    assert right.returncode == 0, right.stdout
    assert bad.returncode == 1
    assert '"Trainer' in bad.stdout, bad.stdout


def test_the_page_lists_the_contract() -> None:
    """Every part of the contract is described, and no other file is expected of a workload."""
    for field in [*dataclasses.fields(Workload), *dataclasses.fields(Definition)]:
        assert re.search(rf"`{field.name}\b", PAGE), field.name
    described = set(re.findall(r"^\| `(\w+\.py)` \|", PAGE, re.M))
    own = set(re.findall(r"\b\w+\.py\b", dlrm.__doc__ or ""))  # which its docstring names
    present = {p.name for p in (ROOT / "trainmark" / "workloads" / "dlrm").glob("*.py")}
    assert present - own == described
