"""Commands of every kind go on after kills; `python -m tests.kills` tries a thousand."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_killed_commands_go_on_and_end_as_if_nothing_had_been(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "tests.kills", "--kills", "48", "--folder", str(tmp_path)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    tried, lost, differing, ends = map(int, done.stdout.split("\nall ")[1].split()[:4])
    assert tried >= 48
    assert (lost, differing) == (0, 0)
    assert ends > 0
