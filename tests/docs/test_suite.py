"""The cases in `docs/launching.md` are cases."""

from pathlib import Path

import pytest

from tests.docs.test_readme import blocks, trainmark_commands
from trainmark import cli
from trainmark.hardware import devices


def test_the_cases_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where there is no accelerator, and none of the data."""
    (text,) = blocks("docs/launching.md", "toml")
    commands = [words for words in trainmark_commands("docs/launching.md") if words[0] == "suite"]
    assert [words[1:] for words in commands] == [
        ["cases.toml", "--dry-run"],
        ["cases.toml", "--output", "runs/suite"],
    ]
    (tmp_path / "cases.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(devices, "accelerators", list)
    assert cli.main(commands[0]) == 0
    out = capsys.readouterr().out
    rows = [line.strip("│ ").split() for line in out.splitlines() if line.startswith("│")]
    assert [(row[0], row[6]) for row in rows] == [
        ("dlrm-demo-cpux1x1", "run"),
        ("small-fp16", "skip"),
        ("llama3-8b-h100x1x8", "skip"),
        ("llama3-8b-h100x2x8", "skip"),
    ]
    fits = {"small-fp16": "/141", "llama3-8b-h100x1x8": "/80", "llama3-8b-h100x2x8": "/80"}
    for row in rows[1:]:
        assert row[-1].endswith(fits[row[0]]), row
    assert "mem is of the run's own sizes, because criteo/data is not here." in out
    assert "trainmark launch --on slurm -j 2x8 train llama3-8b --data tokens" in out
