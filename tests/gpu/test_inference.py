"""`trainmark infer` on a GPU: the scores of a CPU and of the evaluation; nothing sorted for it."""

import dataclasses
from pathlib import Path

import pytest
import torch

from tests import small, small_distilbert
from trainmark.cli import main
from trainmark.inference import figures
from trainmark.metrics import binary_metrics
from trainmark.run import evaluation, runner
from trainmark.training.precision import compute_dtype

pytestmark = pytest.mark.gpu

WAYS = {
    "fused": (),
    "compiled": ("--compile",),
    "exchange with oneself": ("--force-exchange",),
    "host memory": ("--host-tables", "0", "2"),
    "int8 tables": ("--table-precision", "int8", "--fp32-up-to-rows", "5"),
    "bf16": ("--precision", "bf16"),
    "fp16": ("--precision", "fp16"),
}


def scores(folder: Path, device: str, batch: int) -> torch.Tensor:
    with runner.loaded(folder, device=device) as model:
        cfg = dataclasses.replace(model.cfg, eval_batch=batch)
        split = model.workload.held_out_splits(cfg)[0]
        assert model.workload.build_predictor is not None
        predict = model.workload.build_predictor(model.trainer)
        found = torch.cat([predict(b) for b in model.workload.build_data(cfg, split, 0, 1)])
    assert found.device.type == "cpu"
    return found


@pytest.mark.parametrize("way", WAYS)
def test_clicks(way: str, tmp_path: Path) -> None:
    flags = ("--device", "cuda", "--optimizer.name", "sgd", *WAYS[way], "--eval-batch", "700")
    assert small.train(tmp_path, *flags) == 0
    arguments = ["infer", str(tmp_path), "--batches", "1,37", "--steps", "3", "--device", "cuda"]
    assert main(arguments) == 0
    found = figures.read(tmp_path)
    assert found is not None
    assert [row.samples for row in found.rows] == [3, 111]
    assert not found.case.startswith("cpu")
    with runner.loaded(tmp_path, device="cuda") as model:
        labels = torch.cat([b.labels for b in model.workload.build_data(model.cfg, "test", 0, 1)])
    expected = evaluation.evaluate(tmp_path, data=None, device="cuda")["splits"]["test"]
    logits = scores(tmp_path, "cuda", 700)
    assert binary_metrics(logits, labels) == pytest.approx(expected, rel=1e-5)
    near = 3e-2 if compute_dtype(found.precision) != torch.float32 else 1e-3
    for device, batch in (("cuda", 37), ("cpu", 700)):
        torch.testing.assert_close(scores(tmp_path, device, batch), logits, rtol=0, atol=near)


@pytest.mark.parametrize("engine", [(), ("--force-exchange",)])
def test_nothing_is_sorted(
    engine: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert small.train(tmp_path, "--device", "cuda", "--optimizer.name", "sgd", *engine) == 0
    expected = scores(tmp_path, "cuda", 64)

    def refuse(*arguments: object) -> None:
        raise AssertionError("rows were sorted for an update that does not come")

    monkeypatch.setattr("trainmark.embeddings.fused.sort_rows", refuse)
    monkeypatch.setattr("trainmark.embeddings.tables.row_update.sort_rows", refuse)
    assert torch.equal(scores(tmp_path, "cuda", 64), expected)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sentences(precision: str, tmp_path: Path) -> None:
    flags = [*small_distilbert.FLAGS, "--device", "cuda", "--precision", precision]
    flags += ["--model.hidden", "32"]  # attention in 16 bits has heads of 8 numbers at least
    assert main(["train", "distilbert-demo", *flags, "--output", str(tmp_path)]) == 0
    assert main(["infer", str(tmp_path), "--batches", "1,8", "--steps", "3"]) == 0
    found = figures.read(tmp_path)
    assert found is not None
    assert [row.samples for row in found.rows] == [3, 24]
    near = 3e-2 if precision == "bf16" else 1e-3
    on_gpu, on_cpu = scores(tmp_path, "cuda", 8), scores(tmp_path, "cpu", 5)
    torch.testing.assert_close(on_gpu, on_cpu, rtol=0, atol=near)
