"""The code of docs/inference.md runs what was exported."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import small
from tests.docs.commands import ROOT
from trainmark.cli import main
from trainmark.workloads.dlrm import export, standalone

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


def test_the_code_runs_what_was_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = (ROOT / "docs" / "inference.md").read_text().split("\n## Export\n")[1]
    blocks = re.findall(r"```python\n(.*?)```", section.split("\n## ")[0], re.DOTALL)
    *blocks, of_raw_values = blocks
    assert len(blocks) == 2
    for line in of_raw_values.splitlines():  # tests/unit/test_predict.py runs them
        assert line.split("#")[0].strip() in export.RAW_VALUES or line.startswith("raw_numbers")
    run = tmp_path / "run"
    assert small.train(run) == 0
    numerical, ids = torch.randn(5, 13), torch.randint(0, 3, (5, 3))
    assert main(["export", str(run)]) == 0
    expected = standalone.load(run / "export")(numerical, ids)
    for layout, block in zip(("onnx", "torch"), blocks, strict=True):
        assert main(["export", str(run), "--format", layout]) == 0
        folder = run / f"export-{layout}"
        lines = [line.split("#")[0].strip() for line in block.splitlines()]
        readme = (folder / "README.txt").read_text()
        assert all(line in readme for line in lines)
        monkeypatch.chdir(folder)
        given: dict[str, Any] = {"numerical": numerical, "categorical": ids}
        if layout == "onnx":
            given = {name: tensor.numpy() for name, tensor in given.items()}
        exec(block, given)
        clicks = torch.as_tensor(given["clicks"])
        torch.testing.assert_close(clicks, expected, rtol=0, atol=1e-6)
