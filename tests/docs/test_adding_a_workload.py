"""The toy workload of `docs/adding_a_workload.md` trains through the loop, and goes the whole road
by the registry alone: shared code has never heard of it."""

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.commands import ROOT
from tests.unit.refusals import refused
from trainmark import workloads
from trainmark.cli import main
from trainmark.contract import Definition, Workload
from trainmark.distributed import mesh
from trainmark.run.loop import Training
from trainmark.workloads import dlrm

PAGE = (ROOT / "docs" / "adding_a_workload.md").read_text()
(CODE,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)


@pytest.fixture
def toy(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The page's code as a module, and registered."""
    path = tmp_path_factory.mktemp("toy") / "toy_of_the_docs.py"
    path.write_text(CODE)  # a file, in which tyro looks for the docstrings of fields
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)  # dataclasses look it up there
    spec.loader.exec_module(module)
    monkeypatch.setitem(workloads.DEFINITIONS, module.DEFINITION.name, module.DEFINITION)
    return module


def run(toy: Any, folder: Path, **settings: Any) -> Training:
    cfg = dataclasses.replace(toy.line_demo(), micro_batch=64, eval_batch=64, **settings)
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


@pytest.mark.usefixtures("toy")
def test_every_verb_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(["list"]) == 0
    assert main(["show", "line-demo"]) == 0
    assert main(["plan", "line-demo", "--cluster", "h200x1x1"]) == 0
    assert main(["train", "line-demo", "--dry-run"]) == 0
    assert main(["train", "line-demo", "--device", "cpu", "--output", str(run)]) == 0
    assert main(["evaluate", str(run), "--device", "cpu"]) == 0
    assert main(["infer", str(run), "--device", "cpu", "--steps", "3"]) == 0
    assert main(["report", str(run)]) == 0
    said = capsys.readouterr().out
    assert "A straight line" in said
    assert "No time is predicted: line has no prediction of times." in said
    found = json.loads((run / "result.json").read_text())
    assert found["quality"]["reached"], found["quality"]
    assert found["quality"]["metric"] == "error"
    evaluated = json.loads((run / "evaluation.json").read_text())
    assert evaluated["splits"]["test"]["error"] == found["quality"]["value"]


@pytest.mark.usefixtures("toy")
def test_what_it_has_not_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    refused(capsys, ["train", "line-demo", "--rows", "0"], "rows must be at least 1")
    flags = ["--device", "cpu", "--max-steps", "2", "--output", str(run)]
    assert main(["train", "line-demo", *flags]) == 0
    refused(capsys, ["serve", str(run)], "no model to score rows")
    refused(capsys, ["export", str(run)], "no safetensors layout")
    refused(capsys, ["plan", "line-demo", "--json", str(tmp_path / "p.json")], "has no tables")


def test_mypy_checks_the_toy(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(CODE)
    wrong = CODE.replace("def state_dict(self)", "def state_dict_(self)")
    (tmp_path / "wrong.py").write_text(wrong)
    # With the options of `make lint`, whose cache it then finds.
    command = [sys.executable, "-m", "mypy", *(str(tmp_path / n) for n in ("toy.py", "wrong.py"))]
    told = subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout
    assert wrong != CODE
    assert "toy.py:" not in told, told
    assert '"Trainer' in told, told


def test_the_page_lists_the_contract() -> None:
    """Every part of the contract is described, and no other file is expected of a workload."""
    for field in [*dataclasses.fields(Workload), *dataclasses.fields(Definition)]:
        assert re.search(rf"`{field.name}\b", PAGE), field.name
    described = set(re.findall(r"^\| `(\w+\.py)` \|", PAGE, re.M))
    own = set(re.findall(r"\b\w+\.py\b", dlrm.__doc__ or ""))  # which its docstring names
    present = {p.name for p in (ROOT / "trainmark" / "workloads" / "dlrm").glob("*.py")}
    assert present - own == described
