"""The planted Terabyte's rows, made on a GPU, against numpy's."""

import json
from pathlib import Path

import pytest
import torch

from tests.unit.test_terabyte import PLACES, check_kernel
from trainmark.cli import main
from trainmark.clickdata import terabyte
from trainmark.clickdata.best_auc import BinCounts
from trainmark.kernels.terabyte_rows import RowsOnDevice, make_rows
from trainmark.workloads.dlrm.terabyte import on_device

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("first", PLACES)
def test_the_same_bits(first: int) -> None:
    check_kernel(first, "cuda")


def test_the_best_auc_of_whole_splits() -> None:
    tables = on_device(terabyte.THRESHOLD_15, torch.device("cuda"))
    made, levels = RowsOnDevice.empty(1 << 20, tables), terabyte.LEVELS
    assert made.levels is not None
    for (start, stop), best in terabyte.BEST_AUC.items():
        counts = torch.zeros(2 * levels, dtype=torch.int64, device="cuda")
        for first in range(start, stop, 1 << 20):
            make_rows(tables, first, made)
            kinds = made.levels + levels * ~made.labels
            counts += torch.bincount(kinds[: stop - first], minlength=2 * levels)
        clicks, others = counts.cpu().numpy().reshape(2, levels)
        assert BinCounts(clicks, others).auc == best


def test_a_run_makes_its_rows_on_the_gpu(tmp_path: Path) -> None:
    flags = ("--data", "terabyte", "--synthetic-rows", "200000", "--device", "cuda")
    assert main(["train", "dlrm-demo", *flags, "--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["samples"] == 200_000
    assert any("made from their numbers by the GPU" in note for note in result["notes"])
    assert result["quality"]["value"] > 0.6
