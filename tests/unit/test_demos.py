"""Each demo as a newcomer types it, not shrunk: it learns, and reaches what it promises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainmark.workloads.llama3.chain import ENTROPY

DEMOS = {
    "dlrm-demo": ("auc", 0.7892, 0.8045),
    "distilbert-demo": ("accuracy", 0.95, 1.0),
    "llama3-demo": ("loss", 1.05 * ENTROPY, ENTROPY),
}
"""What is measured, what is promised, and the best that any model can have."""


@pytest.mark.slow
@pytest.mark.parametrize("name", DEMOS)
def test_a_demo_keeps_its_promise(name: str, tmp_path: Path) -> None:
    metric, promised, best = DEMOS[name]
    words = ["train", name, "--device", "cpu", "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "trainmark", *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["division"], result["changed"]) == ("closed", [])
    quality = result["quality"]
    assert (quality["metric"], quality["reached"]) == (metric, True)
    assert quality["target"] == pytest.approx(promised, abs=1e-4)
    assert min(promised, best) <= quality["value"] <= max(promised, best)
    assert result["loss"]["last"] < result["loss"]["first"]
