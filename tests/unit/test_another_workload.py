"""A workload that shared code has never heard of goes the whole road, by the registry alone."""

import json
from pathlib import Path

import pytest

from tests.images import IMAGES
from tests.unit.refusals import refused
from trainmark import cli, workloads


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(workloads.DEFINITIONS, IMAGES.name, IMAGES)


def test_every_verb_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert cli.main(["list"]) == 0
    assert cli.main(["show", "images-demo"]) == 0
    assert cli.main(["plan", "images-demo", "--cluster", "h200x1x1"]) == 0
    assert cli.main(["train", "images-demo", "--dry-run"]) == 0
    assert cli.main(["train", "images-demo", "--device", "cpu", "--output", str(run)]) == 0
    assert cli.main(["evaluate", str(run), "--device", "cpu"]) == 0
    assert cli.main(["infer", str(run), "--device", "cpu", "--steps", "3"]) == 0
    assert cli.main(["report", str(run)]) == 0
    said = capsys.readouterr().out
    assert "Bright squares" in said
    assert "No time is predicted for images." in said
    found = json.loads((run / "result.json").read_text())
    assert found["quality"]["reached"], found["quality"]
    assert found["quality"]["metric"] == "accuracy"
    evaluated = json.loads((run / "evaluation.json").read_text())
    assert evaluated["splits"]["test"]["accuracy"] == found["quality"]["value"]


def test_what_it_has_not_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    refused(capsys, ["train", "images-demo", "--hidden", "0"], "hidden must be at least 1")
    flags = ["--device", "cpu", "--max-steps", "2", "--output", str(run)]
    assert cli.main(["train", "images-demo", *flags]) == 0
    refused(capsys, ["serve", str(run)], "no model to score rows")
    refused(capsys, ["export", str(run)], "no safetensors layout")
    refused(capsys, ["plan", "images-demo", "--json", str(tmp_path / "p.json")], "has no tables")
