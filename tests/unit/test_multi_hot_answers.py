"""Models of several ids per feature: from TorchRec's files to exports and answers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from tests import bags, small
from tests.bags import ids_of
from tests.unit.test_export_formats import exported, run_onnx, run_programs
from trainmark.cli import main
from trainmark.run import evaluation, run_folder
from trainmark.scoring import Served
from trainmark.workloads.dlrm import serving, standalone
from trainmark.workloads.dlrm.data import build_data

DIMENSIONS = (
    *("--model.embedding-dim", "8", "--model.bottom-mlp", "16", "8", "--model.top-mlp", "16", "1"),
    *("--global-batch", "256", "--device", "cpu", "--warmup-clock", "2", "--evals-per-epoch", "1"),
)


def train(data: Path, output: Path, *flags: str) -> Path:
    command = ["train", "dlrm-demo", "--data", str(data), "--output", str(output)]
    assert main([*command, *DIMENSIONS, *flags]) == 0
    return output


CASES: dict[str, tuple[str, ...]] = {
    "sum": ("--model.interaction", "dcn", "--model.cross-rank", "5"),
    "mean": ("--model.pooling", "mean"),
    "int8": ("--table-precision", "int8", "--fp32-up-to-rows", "5", "--model.pooling", "mean"),
}


@pytest.mark.parametrize("case", ["sum", pytest.param("mean", marks=pytest.mark.slow), "int8"])
def test_exports_and_answers_are_those_of_the_evaluation(case: str, tmp_path: Path) -> None:
    run = train(bags.write_dataset(tmp_path / "data", rows=1000), tmp_path / "run", *CASES[case])
    expected = evaluation.evaluate(run, data=None, device="cpu")["splits"]["test"]
    (batch,) = build_data(run_folder.read_config(run), "test", 0, 1)
    numerical, ids = batch.numerical.float(), torch.cat(ids_of(batch), dim=1)
    assert (ids[:, :4] < 0).all(1).any()  # some bag is empty

    plain = standalone.load(exported(run, "safetensors"))(numerical, ids).double()
    assert roc_auc_score(batch.labels, plain) == pytest.approx(expected["auc"], abs=1e-4)
    assert log_loss(batch.labels, plain) == pytest.approx(expected["log_loss"], abs=1e-6)
    path = exported(run, "onnx") / "model.onnx"
    in_onnx = run_onnx(path, numerical=numerical, categorical=ids).double()
    torch.testing.assert_close(in_onnx, plain, rtol=1e-5, atol=1e-6)
    in_torch = exported(run, "torch") / "model.pt2"
    ((program,),) = run_programs([(in_torch, [(numerical, ids)])], tmp_path)
    torch.testing.assert_close(program.double(), plain, rtol=1e-5, atol=1e-6)
    check_answers(run, numerical, ids, plain.tolist())


def check_answers(run: Path, numerical: Any, ids: Any, expected: list[float]) -> None:
    """A request has a list of each feature; where it has one id, that will do."""
    scorer = serving.load(Served(folder=run / "safetensors", device="cpu"))
    bags_of_rows = [row.split([4, 1, 9]) for row in ids]
    rows = [[[i for i in bag.tolist() if i >= 0] for bag in row] for row in bags_of_rows]
    body = {"numerical": numerical.tolist(), "categorical": rows}
    found = scorer.score([scorer.read(body)])
    assert found == pytest.approx(expected, rel=1e-4)
    assert scorer.facts["expects"]["cat_0.bin"] == "a list of at most 4 whole numbers from 0 to 49"
    assert scorer.score([scorer.read(scorer.example)])
    one = {"numerical": [[1, 1, 1]], "categorical": [[[3], 2, [1, 1]]]}
    same = {"numerical": [[1, 1, 1]], "categorical": [[3, [2], [1, 1]]]}
    assert scorer.score([scorer.read(one)]) == scorer.score([scorer.read(same)])
    for wrong in ([1, 2, 3, 4, 5], [50], ["a"], [[1]], None, 1.5):
        body = {"numerical": [[1, 1, 1]], "categorical": [[wrong, 2, [1]]]}
        with pytest.raises(
            Exception, match=r"Row 0: cat_0.bin is .*, expected a list of at most 4"
        ):
            scorer.score([scorer.read(body)])


def test_torchrecs_multi_hot_files_are_trained_on(tmp_path: Path) -> None:
    """`prepare npy` of MLPerf's materialised files, and then `train`."""
    random = np.random.default_rng(1)
    rows = 600
    for day in range(2):
        np.save(tmp_path / f"day_{day}_dense.npy", random.random((rows, 3), np.float32))
        labels = (random.random((rows, 1)) < 0.3).astype(np.int32)
        np.save(tmp_path / f"day_{day}_labels.npy", labels)
        ids: dict[str, Any] = {
            str(feature): random.integers(0, size, (rows, hot)).astype(np.int32)
            for feature, (size, hot) in enumerate(zip((50, 7, 3), (4, 1, 9), strict=True))
        }
        np.savez(tmp_path / f"day_{day}_sparse_multi_hot.npz", **ids)
    data = tmp_path / "data"
    assert main(["prepare", "npy", "--input", str(tmp_path), "--output", str(data)]) == 0
    run = train(data, tmp_path / "run")
    cfg = run_folder.read_config(run)
    assert cfg.model.hotness == (4, 1, 9)
    assert not cfg.model.varies
    assert small.result(run)["samples"] == rows
    (batch,) = build_data(cfg, "test", 0, 1)
    last = ids["0"][rows // 2 :]
    assert torch.equal(ids_of(batch)[0], torch.from_numpy(last).long())
