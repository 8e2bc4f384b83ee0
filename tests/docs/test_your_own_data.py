"""docs/your_own_data.md: every command of it, to answers of a server; dlrm_auto.md: its table."""

import json
import urllib.request
from pathlib import Path

import pytest

from benchmarks.common import read_rows
from tests.docs.commands import table, verb_of
from tests.docs.test_readme import blocks, trainmark_commands
from tests.unit.served import process
from tests.waiting import PATIENCE_S
from trainmark.cli import main
from trainmark.run.result import read

PAGE = "docs/your_own_data.md"


def scores(url: str, body: str) -> list[float]:
    with urllib.request.urlopen(f"{url}/score", data=body.encode(), timeout=PATIENCE_S) as answer:
        found: list[float] = json.load(answer)["scores"]
    return found


def test_the_whole_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (script,), (request,) = blocks(PAGE, "python"), blocks(PAGE, "json")
    exec(script, {})
    commands = trainmark_commands(PAGE)
    served = [words for words in commands if verb_of(words) == "serve"]
    for words in commands:
        if words not in served:
            assert main(words) == 0, words
    first, second = (read(tmp_path / "my" / name) for name in ("run", "run2"))
    assert first.quality.value is not None
    assert first.quality.value > 0.75  # the best possible is about 0.86
    assert second.quality.value is not None
    assert (tmp_path / "my" / "run" / "report.html").is_file()

    with process(*served[0][1:], cwd=tmp_path) as (running, url, _):
        assert all(0 < score < 1 for score in scores(url, request))
        running.terminate()
        assert running.wait(PATIENCE_S) == 0


def test_the_table_is_that_of_the_results() -> None:
    """Each set's AUCs, as own_data.json has them; and no set that does not hold is left out."""
    rows = read_rows("own_data")
    shown = {data: aucs for data, _, *aucs, _ in table("docs/dlrm_auto.md", "data | rows |")}
    assert len(rows) >= 8
    for row in rows:
        aucs = [row[name] for name in ("trainmark", "logistic_regression", "gradient_boosting")]
        assert shown[row["data"]] == ["-" if auc is None else f"{auc:.4f}" for auc in aucs]
