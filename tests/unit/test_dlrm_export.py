"""An exported DLRM, loaded by its own code without Trainmark, scores as its evaluation did."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from tests import small
from trainmark.cli import main
from trainmark.interop import model_folder
from trainmark.run import evaluation

FEW = ("--fp32-up-to-rows", "5")
SCORE = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from model import load
numerical, ids = torch.load(sys.argv[2])
torch.save(load(sys.argv[1])(numerical, ids), sys.argv[3])
assert not any(name.startswith("trainmark") for name in sys.modules)
"""


def scored_by_itself(folder: Path, numerical: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    given, found = folder.parent / "given.pt", folder.parent / "found.pt"
    torch.save((numerical, ids), given)
    command = [sys.executable, "-I", "-c", SCORE, str(folder), str(given), str(found)]
    subprocess.run(command, check=True, cwd=folder.parent)
    clicks: torch.Tensor = torch.load(found)
    return clicks


@pytest.mark.parametrize(
    ("flags", "shard_bytes"),
    [
        ((), 10**9),
        (("--model.numerical-features", "0"), 10**9),
        (("--model.table-widths", "8", "2", "5", "--model.bottom-output", "linear"), 10**9),
        (("--table-precision", "int8", *FEW, "--positive-weight", "5"), 10**9),
        (("--table-precision", "bf16", *FEW), 700),
    ],
    ids=[
        "fp32",
        "no numerical features",
        "three widths, a linear output",
        "int8",
        "bf16 in several files",
    ],
)
def test_scores_are_those_of_the_evaluation(
    flags: tuple[str, ...], shard_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_folder, "SHARD_BYTES", shard_bytes)
    run, target = tmp_path / "run", tmp_path / "run" / "export"
    learned = ("--model.init", "nvidia_tf2", "--optimizer.eps", "1e-8")  # no scores that are equal
    assert small.train(run, *flags, *learned) == 0
    assert main(["export", str(run)]) == 0
    assert len(list(target.glob("*.safetensors"))) == (1 if shard_bytes == 10**9 else 7)

    labels, numerical, ids = small.click_samples(run)
    clicks = scored_by_itself(target, numerical, ids).double()

    expected = evaluation.evaluate(run, data=None, device="cpu")["splits"]["test"]
    assert roc_auc_score(labels, clicks) == pytest.approx(expected["auc"], abs=1e-6)
    assert log_loss(labels, clicks) == pytest.approx(expected["log_loss"], abs=1e-6)


def test_the_description_names_features_in_their_order(tmp_path: Path) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    small.write_dataset(data)
    assert small.train(run, "--data", str(data), "--model.table-rows", "50", "7", "3") == 0
    assert main(["export", str(run), "--output", str(tmp_path / "out")]) == 0
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described["categorical"] == ["cat_0.bin", "cat_1.bin", "cat_2.bin"]
    assert described["table_rows"] == list(small.TABLE_ROWS)
    (tmp_path / "any").touch()
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert modes == {(tmp_path / "any").stat().st_mode}  # who serves it may be another user
