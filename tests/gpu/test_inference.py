"""`trainmark infer` on a GPU: the scores of a CPU and of the evaluation; nothing sorted for it."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import small, small_distilbert
from trainmark import workloads
from trainmark.cli import main
from trainmark.distributed.mesh import single
from trainmark.inference import figures
from trainmark.kernels import fp8_mlp, graph
from trainmark.metrics import binary_metrics
from trainmark.run import evaluation, trained
from trainmark.run.loop import build_trainer
from trainmark.training.precision import compute_dtype, set_matmul_precision
from trainmark.workloads.dlrm import graphed_prediction, standalone
from trainmark.workloads.dlrm.data import ClickBatch, build_data
from trainmark.workloads.dlrm.description import description
from trainmark.workloads.dlrm.runs import Optimizer, TableFormat
from trainmark.workloads.dlrm.step import DlrmTrainer, build_predictor

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
GPU = torch.device("cuda", 0)
WIDE = dataclasses.replace(small.config().model, top_mlp=(32, 48, 16, 1))
BAGS = dataclasses.replace(WIDE, hotness=(3, 1, 2))
SGD = {"optimizer": Optimizer(name="sgd")}
GRAPHED: dict[str, dict[str, Any]] = {
    "fp32": {},
    "tf32": {"precision": "tf32"},
    "fp16": {"precision": "fp16"},
    "bf16": {"precision": "bf16"},
    "fp8": {"precision": "fp8", "model": WIDE},
    "bf16 tables": {"table_format": TableFormat(table_precision="bf16", fp32_up_to_rows=5)},
    "int8 tables": {"table_format": TableFormat(table_precision="int8", fp32_up_to_rows=5)},
    "bags": {"model": BAGS, "multi_hot": "uniform"},
    "means of bags": {
        "model": dataclasses.replace(BAGS, pooling="mean"),
        "multi_hot": "uniform",
    },
    "three widths": {"model": dataclasses.replace(WIDE, table_widths=(8, 2, 4))},
    "a cross network": {"model": dataclasses.replace(WIDE, interaction="dcn")},
    "no numbers": {"model": dataclasses.replace(WIDE, numerical_features=0)},
}


def scores(folder: Path, device: str, batch: int) -> torch.Tensor:
    with trained.loaded(folder, device=device) as model:
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
    with trained.loaded(tmp_path, device="cuda") as model:
        labels = torch.cat([b.labels for b in model.workload.build_data(model.cfg, "test", 0, 1)])
    expected = evaluation.evaluate(tmp_path, data=None, device="cuda")["splits"]["test"]
    logits = scores(tmp_path, "cuda", 700)
    # Of 16 bits, GEMMs of another size round otherwise, and clicks change places.
    is_rounded = compute_dtype(found.precision) != torch.float32
    near, alike = (3e-2, 1e-2) if is_rounded else (1e-3, 1e-5)
    assert binary_metrics(logits, labels) == pytest.approx(expected, rel=alike)
    for device, batch in (("cuda", 37), ("cpu", 700)):
        torch.testing.assert_close(scores(tmp_path, device, batch), logits, rtol=0, atol=near)


def test_crossed_ids(tmp_path: Path) -> None:
    """In training and in requests of few samples and many; ids are of two types, in their order."""
    data = small.write_dataset(tmp_path / "data", cardinalities=(50, 7, 70_000))
    flags = ["--data", str(data), "--model.crosses", "0x1", "0x2", "--global-batch", "250"]
    flags += ["--warmup-clock", "1", "--device", "cuda", "--output", str(tmp_path / "run")]
    assert main(["train", "dlrm-demo", *flags]) == 0
    expected = scores(tmp_path / "run", "cpu", 50)
    for batch in (5, 50, 300, 5):
        found = scores(tmp_path / "run", "cuda", batch)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


def trainer_on_gpu(case: str) -> DlrmTrainer:
    changes = SGD | GRAPHED[case]
    # As it is resolved on a CPU, which has no tf32.
    precision = changes.pop("precision", "fp32")
    resolved_as = "fp32" if precision == "tf32" else precision
    cfg = dataclasses.replace(small.config(precision=resolved_as, **changes), precision=precision)
    set_matmul_precision(cfg.precision)
    built = build_trainer(cfg, workloads.load("dlrm"), single(GPU))
    assert isinstance(built, DlrmTrainer)
    return built


def requests(trainer: DlrmTrainer, size: int, *, pinned: bool) -> list[ClickBatch]:
    cfg = dataclasses.replace(trainer.cfg, eval_batch=size, device="cuda" if pinned else "cpu")
    found = list(islice(build_data(cfg, "test", 0, 1), 3))
    assert [batch.samples for batch in found] == [size] * 3
    assert found[0].groups[0].ids.is_pinned() == pinned
    return found


@pytest.mark.parametrize("case", GRAPHED)
def test_graphs_are_the_model_itself(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large requests, those of 700, are cut in two."""
    monkeypatch.setattr(fp8_mlp, "SMALL_LAYER", 100)
    monkeypatch.setattr(graphed_prediction, "CUT", 600)
    plain, trainer = trainer_on_gpu(case), trainer_on_gpu(case)
    assert trainer.uses_graphs
    predict = build_predictor(trainer)
    assert predict.__module__ == graphed_prediction.__name__
    near = 1e-3 if compute_dtype(plain.cfg.precision) == torch.float32 else 3e-2
    for size in (1, 100, 8, 37, 64, 65, 700, 512):
        for number, batch in enumerate(requests(plain, size, pinned=size % 2 == 0)):
            expected = plain.predict(plain.prepare_to_predict(batch, size)).cpu()
            found = predict(batch)
            assert found.device.type == "cpu"
            # fp8 scales by the largest of the samples, in which zeros take part.
            wide = 2 * near if case == "fp8" else near
            message = f"request {number} of {size}"
            torch.testing.assert_close(found, expected, rtol=wide, atol=wide, msg=message)
            assert torch.equal(predict(batch), found)


@pytest.mark.parametrize("case", ["fp32", "fp16", "fp8", "int8 tables", "three widths", "bags"])
@pytest.mark.parametrize("size", [5, 700])
def test_requests_in_flight_do_not_mix(
    case: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_mlp, "SMALL_LAYER", 100)
    monkeypatch.setattr(graphed_prediction, "CUT", 600)
    trainer = trainer_on_gpu(case)
    given = requests(trainer, size, pinned=True)
    clients: list[Any] = [build_predictor(trainer) for _ in range(4)]
    alone = [clients[0](batch) for batch in given]

    def many(predict: Any) -> list[torch.Tensor]:
        return [predict(batch) for _ in range(30) for batch in given]

    for predict in clients:  # captured one after another, as `infer` does
        predict(given[0])
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(many, clients))
    for _ in range(10):
        waiting = [predict.begin(batch) for predict, batch in zip(clients, given, strict=False)]
        answers.append([wait() for wait in waiting] * 30)
    for found in answers:
        for ours, expected in zip(found, alone * 30, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_old_graphs_are_not_destroyed_while_one_is_captured() -> None:
    numbers = torch.zeros(8, device=GPU)

    def add() -> None:
        for _ in range(5):
            numbers.add_(1)
            assert [[] for _ in range(2000)]  # so many new objects that garbage is looked for

    for _ in range(20):
        old: list[Any] = [graph.captured(add)]
        old.append(old)  # which only the collector frees
        del old
    last = graph.captured(add)
    last.replay()
    assert numbers.tolist() == [5] * 8


def test_clients(tmp_path: Path) -> None:
    assert small.train(tmp_path, "--device", "cuda", "--optimizer.name", "sgd") == 0
    line = ["infer", str(tmp_path), "--batches", "1,64,700", "--steps", "40", "--device", "cuda"]
    assert main([*line, "--clients", "4"]) == 0
    found = figures.read(tmp_path)
    assert found is not None
    assert [(row.batch, row.clients, row.requests) for row in found.rows] == [
        (1, 4, 40),
        (64, 4, 40),
        (700, 4, 40),
    ]


@pytest.mark.parametrize(
    "case", ["fp32", "int8 tables", "bags", "means of bags", "a cross network"]
)
def test_an_exported_model_as_graphs(case: str) -> None:
    """As `serve` computes on a GPU."""
    trainer = trainer_on_gpu(case)
    model = standalone.Dlrm(description(trainer.cfg), trainer.weights()).eval()
    logits = graphed_prediction.of_exported(model, GPU)
    for size in (3000, 1, 9, 64, 200):
        random = np.random.default_rng(size)
        numbers = random.standard_normal((size, 13)).astype(np.float32)
        counts = trainer.cfg.model.hotness or (1, 1, 1)
        ids = np.concatenate(
            [
                random.integers(0, rows, (size, count))
                for rows, count in zip(small.TABLE_ROWS, counts, strict=True)
            ],
            axis=1,
        )
        with torch.inference_mode():
            on_gpu = torch.from_numpy(numbers).to(GPU), torch.from_numpy(ids).to(GPU)
            expected = model.logits(*on_gpu).cpu().numpy()
        np.testing.assert_allclose(logits(numbers, ids), expected, rtol=1e-4, atol=1e-4)


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
