"""docs/your_own_data.md runs from its first line to its last request."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.commands import ROOT, verb_of
from tests.docs.test_readme import blocks, commands, trainmark_commands
from trainmark.run.result import read

PAGE = "docs/your_own_data.md"


def test_from_a_csv_to_a_served_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi")
    from tests.unit.served import served

    monkeypatch.chdir(tmp_path)
    (script,) = blocks(PAGE, "python")
    subprocess.run([sys.executable, "-c", script], check=True)
    chain = trainmark_commands(PAGE)
    assert [verb_of(words) for words in chain] == [
        "prepare csv", "train", "evaluate", "report", "export", "serve"
    ]  # fmt: skip
    for words in chain[:-1]:  # a server would not end; it is asked below, in this process
        done = subprocess.run(
            [sys.executable, "-m", "trainmark", *words], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    found = read(tmp_path / "shop" / "run")
    assert found.quality.value is not None
    assert found.quality.value > 0.6
    (request,) = [words for words in commands(PAGE) if words[0] == "curl"]
    body = json.loads(request[request.index("-d") + 1])
    answer = served(tmp_path / "shop" / "run").post("/score", json=body)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["scores"]) == 2
    assert all(0 < score < 1 for score in answer.json()["scores"])


def test_the_table_is_that_of_the_results() -> None:
    """Each set's row, with its AUCs, as own_data.json has them."""
    file = ROOT / "benchmarks" / "results" / "own_data.json"
    rows = json.loads(file.read_text())["rows"]
    text = (ROOT / PAGE).read_text()
    shown = {
        cells[0]: cells[1:]
        for line in text.splitlines()
        if (cells := [cell.strip() for cell in line.strip("|").split("|")])[0]
        in {row["data"] for row in rows}
    }
    assert len(rows) >= 10
    for row in rows:
        aucs = [row[name] for name in ("trainmark", "logistic_regression", "gradient_boosting")]
        assert shown[row["data"]][1:4] == [f"{auc:.4f}" for auc in aucs]
