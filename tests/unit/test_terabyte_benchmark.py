"""benchmarks/terabyte.py: its commands can be typed, and precisions are compared row by row."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks import terabyte
from tests.small import train
from trainmark.cli import main
from trainmark.contract import Predictions
from trainmark.run.assessment import scored_splits, write_scores


@pytest.mark.parametrize("name", terabyte.RUNS)
def test_commands(name: str) -> None:
    words = shlex.split(terabyte.command(name))[1:]
    assert main([*words, "--dry-run", "--cluster", "h200x1x1"]) == 0


def test_one_of_a_rows_comparisons_has_one_cause_and_one_is_to_tf32() -> None:
    def settings(name: str) -> dict[str, str]:
        _, *words = terabyte.RUNS[name].split()
        return dict(zip(words[::2], words[1::2], strict=True))

    for name, others in terabyte.PAIRS.items():
        causes = [dict(settings(name).items() ^ settings(other).items()) for other in others]
        assert min(map(len, causes)) == 1
        assert "small-tf32" in others


def placements(scores: NDArray[np.float32], labels: NDArray[np.bool_]) -> list[NDArray[np.float64]]:
    """Of every positive and of every other, from all pairs: DeLong's structural components."""
    positives, others = scores[labels][:, None], scores[~labels][None, :]
    above = (positives > others) + 0.5 * (positives == others)
    return [above.mean(1), above.mean(0)]


def test_differences_are_those_of_all_pairs(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels = rng.random(600) < 0.2
    hard = rng.normal(size=600) + labels
    scores = {}
    for name in terabyte.PAIRS | {"small-tf32": []}:
        logits = torch.from_numpy((hard + 0.3 * rng.normal(size=600)).round(1)).float()
        (tmp_path / name).mkdir()
        made = Predictions(logits=logits, labels=torch.from_numpy(labels))
        write_scores(tmp_path / name, {"test": made}, most=600, samples=1, data=None)
        scores[name] = logits.numpy()
    terabyte.compare(tmp_path)
    for name, others in terabyte.PAIRS.items():
        found = json.loads((tmp_path / name / terabyte.DIFFERENCES).read_text())
        assert list(found) == others
        for other in others:
            a, b = (placements(scores[row], labels) for row in (other, name))
            assert found[other]["auc_difference"] == pytest.approx(b[0].mean() - a[0].mean())
            variance = sum(np.var(y - x, ddof=1) / len(x) for x, y in zip(a, b, strict=True))
            assert found[other]["standard_error"] == pytest.approx(variance**0.5)
            assert found[other]["rows"] == 600


def test_scores_are_kept_of_splits_that_are_not_too_large(tmp_path: Path) -> None:
    flags = ("--synthetic-rows", "200", "--max-steps", "1", "--checkpoint-every", "never")
    assert train(tmp_path / "any", *flags) == 0
    found = json.loads((tmp_path / "any" / "result.json").read_text())["assessments"]
    assert scored_splits(tmp_path / "any") == sorted(found)
    rows = found["test"]["rows"]
    for most, splits in ((rows, sorted(found)), (rows - 1, [])):
        assert train(tmp_path / str(most), *flags, "--keep-scores", str(most)) == 0
        assert scored_splits(tmp_path / str(most)) == splits
