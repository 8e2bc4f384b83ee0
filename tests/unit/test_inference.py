"""`trainmark infer`: what is timed, what is counted, and that the scores are the evaluation's."""

import dataclasses
import itertools
import json
import shutil
import statistics
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import small, small_distilbert
from tests.unit.refusals import refused
from tests.waiting import PATIENCE_S
from trainmark import metrics
from trainmark.cli import main
from trainmark.embeddings import sharded
from trainmark.embeddings.tables.store import TableStore
from trainmark.hardware.memory import MemoryPlan
from trainmark.inference import figures, latency
from trainmark.metrics import binary_metrics
from trainmark.report.reports import report
from trainmark.report.tables import milliseconds
from trainmark.run import evaluation, memory, run_folder, trained
from trainmark.workloads.dlrm.data import build_data
from trainmark.workloads.dlrm.runs import Sharding, TableFormat
from trainmark.workloads.dlrm.step import DlrmTrainer


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the small DistilBERT, in bf16."""
    folder = tmp_path_factory.mktemp("runs") / "sentences"
    flags = (*small_distilbert.FLAGS, "--precision", "bf16", "--eval-batch", "24")
    assert main(["train", "distilbert-demo", *flags, "--output", str(folder)]) == 0
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, of which nothing was measured yet."""
    copy = shutil.copytree(finished, tmp_path / "run")
    (copy / "inference.json").unlink(missing_ok=True)
    return copy


def measured(folder: Path) -> figures.Inference:
    """What `inference.json` holds."""
    found = figures.read(folder)
    assert found is not None
    return found


# --- formulas


@pytest.mark.parametrize("requests", [2, 7, 200, 1001])
def test_latencies_are_those_of_the_standard_library(requests: int) -> None:
    seconds = torch.rand(requests, dtype=torch.float64, generator=torch.Generator()).tolist()
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    expected = {f"p{percent}_ms": 1e3 * cuts[percent - 1] for percent in (90, 95, 99)}
    expected["mean_ms"] = 1e3 * statistics.fmean(seconds)
    expected["median_ms"] = 1e3 * statistics.median(seconds)
    assert metrics.latency_ms(seconds) == pytest.approx(expected, rel=1e-12)


# --- what is timed


class Clock:
    """A device whose requests take as long as they say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.served: list[int] = []
        monkeypatch.setattr(latency.time, "perf_counter", lambda: self.now)

    def predict(self, request: Any) -> None:
        self.served.append(request.samples)
        self.now += 100.0 if len(self.served) <= latency.DROPPED else request.samples / 1e3


def test_the_first_ten_are_dropped_and_samples_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    said: list[str] = []
    batches = [SimpleNamespace(samples=samples) for samples in (1, 2, 3)]
    found = latency.measure_size([clock.predict], 2, batches, 7, said.append)
    expected = list(itertools.islice(itertools.cycle([1, 2, 3]), 10 + 7))
    assert clock.served == expected
    assert found.requests == 7
    assert found.samples == sum(expected[10:])
    assert found.mean_ms == pytest.approx(sum(expected[10:]) / 7)
    assert found.median_ms == pytest.approx(2.0)
    assert found.samples_per_s == pytest.approx(1000.0)  # each sample took a millisecond
    assert said == ["batch 2: 7 requests take about 1,500 s"]


def test_what_is_quick_is_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency.time, "perf_counter", itertools.count(0, 1e-3).__next__)
    said: list[str] = []
    batches = [SimpleNamespace(samples=5)]
    found = latency.measure_size([lambda batch: None], 5, batches, 4, said.append)
    assert (found.mean_ms, found.samples_per_s) == (pytest.approx(1.0), pytest.approx(5000.0))
    assert said == []


def test_clients_wait_for_their_own_answers_alone() -> None:
    """Three at a time: each call waits until all three are there, else nobody would come on."""
    together, threads = Barrier(3, timeout=PATIENCE_S), set()

    def client(name: str) -> Any:
        def predict(request: Any) -> None:
            if len(served) >= 3 * latency.DROPPED:  # those before come one by one
                threads.add(name)
                together.wait()
            served.append(request.samples)

        return predict

    served: list[int] = []
    batches = [SimpleNamespace(samples=5)] * 2
    clients = [client(name) for name in "abc"]
    found = latency.measure_size(clients, 5, batches, 12, print)
    assert threads == {"a", "b", "c"}
    assert len(served) == 3 * latency.DROPPED + 12
    assert (found.clients, found.requests, found.samples) == (3, 12, 60)
    # Three requests fit into the time of one: what three clients get done adds up.
    assert 0 < found.samples_per_s <= 3.001 * 5 / (found.mean_ms / 1e3)


def test_too_little_memory_is_a_sentence() -> None:
    def predict(batch: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nand much more")

    with pytest.raises(latency.InputError, match=r"^Out of memory at batch 4,096 \(CUDA out of "):
        latency.measure_size([predict], 4096, [SimpleNamespace(samples=4096)], 1, print)


# --- the verb


def test_table_and_file(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["infer", str(finished), "--batches", "3,1,3,64", "--steps", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{small.newest(finished)} (last)"
    assert "cpux1x1, fp32, 5 requests of each size" in lines[1]
    assert lines[-1] == str(finished / "inference.json")
    written = json.loads((finished / "inference.json").read_text())
    assert next(iter(written)) == "schema"
    assert written["schema"] == "trainmark.inference/1"
    del written["checksum"]
    found = measured(finished)
    assert json.loads(json.dumps(dataclasses.asdict(found))) == written
    counts = [(row.batch, row.requests, row.samples) for row in found.rows]
    assert counts == [(3, 5, 15), (1, 5, 5), (64, 5, 320)]  # as asked for, each once
    for row in found.rows:
        assert row.samples_per_s * row.mean_ms / 1e3 == pytest.approx(row.batch)
        assert 0 < row.median_ms <= row.p90_ms <= row.p95_ms <= row.p99_ms
        assert any(milliseconds(row.mean_ms) in line for line in lines)
    assert (found.run, found.split, found.data) == ("dlrm-demo", "test", "synthetic")
    assert (found.step, found.samples, found.dropped) == (small.STEPS, 4000, 10)
    assert found.hardware["cpu_cores"] > 0
    assert found.software["torch"] == torch.__version__


def test_another_dataset_precision_and_the_sizes_that_it_has_samples_for(
    run: Path, tmp_path: Path
) -> None:
    data = small.write_dataset(tmp_path / "data", test_rows=300, num_numerical=13)
    arguments = ["infer", str(run), "--data", str(data), "--steps", "2", "--precision", "bf16"]
    assert main(arguments) == 0
    found = measured(run)
    assert (found.data, found.precision) == (str(data), "bf16")
    assert [row.batch for row in found.rows] == [1, 64]


def test_a_file_keeps_a_row_for_each_batch_and_precision(run: Path, tmp_path: Path) -> None:
    def infer(batches: str, *flags: str) -> list[tuple[Any, ...]]:
        assert main(["infer", str(run), "--batches", batches, "--steps", "2", *flags]) == 0
        return [(*row.key, row.requests) for row in measured(run).rows]

    assert infer("1,3") == [(1, "fp32", "fp32", 1, 2), (3, "fp32", "fp32", 1, 2)]
    # As an earlier version wrote it: rows do not say their precision.
    old = json.loads((run / "inference.json").read_text())
    for row in old["rows"]:
        for name in ("precision", "tables_precision", "clients"):
            del row[name]
    del old["checksum"]
    (run / "inference.json").write_text(json.dumps(old))
    assert infer("3", "--precision", "bf16") == [
        (1, "fp32", None, 1, 2),
        (3, "fp32", None, 1, 2),
        (3, "bf16", "fp32", 1, 2),
    ]
    again = infer("3", "--precision", "bf16", "--steps", "4")
    assert again[-1] == (3, "bf16", "fp32", 1, 4)
    assert len(again) == 3
    page = report([run]).read_text()
    assert "fp32 or bf16" in page
    assert page.count("<td>bf16</td>") == 1
    data = small.write_dataset(tmp_path / "data", test_rows=300, num_numerical=13)
    assert infer("1", "--data", str(data)) == [(1, "fp32", "fp32", 1, 2)]  # something else


def test_clients_have_a_row_of_their_own(run: Path) -> None:
    line = ["infer", str(run), "--batches", "1,37", "--steps", "6"]
    assert main(line) == 0
    assert main([*line, "--clients", "3"]) == 0
    found = measured(run)
    kinds = [(row.batch, row.clients, row.requests, row.samples) for row in found.rows]
    assert kinds == [(1, 1, 6, 6), (37, 1, 6, 222), (1, 3, 6, 6), (37, 3, 6, 222)]


def test_sentences(sentences: Path) -> None:
    assert main(["infer", str(sentences), "--steps", "2", "--batches", "1,5"]) == 0
    found = measured(sentences)
    assert (found.workload, found.split, found.precision) == ("distilbert", "validation", "bf16")
    assert [row.samples for row in found.rows] == [2, 10]


def test_the_page_shows_it(run: Path, finished: Path, tmp_path: Path) -> None:
    assert "<h2>Inference</h2>" not in report([run]).read_text()
    assert main(["infer", str(run), "--batches", "21", "--steps", "3"]) == 0
    found = measured(run)
    alone = report([run]).read_text()
    for expected in ("<h2>Inference</h2>", "3 requests of each batch size", "p99 ms"):
        assert alone.count(expected) == 1, expected
    for cell in ("21", milliseconds(found.rows[0].p99_ms)):
        assert f'<td class="num">{cell}</td>' in alone
    both = report([run, finished], tmp_path / "both.html").read_text()
    assert both.count("<h2>Inference</h2>") == 1
    assert "<h3>dlrm-demo (run)</h3>" in both


# --- scores


@pytest.mark.parametrize(
    "flags",
    [
        ("--precision", "fp32"),
        ("--precision", "bf16"),
        ("--table-precision", "int8", "--fp32-up-to-rows", "5"),
        ("--force-exchange",),
    ],
    ids=["fp32", "bf16", "int8 tables", "exchange"],
)
def test_scores_are_those_of_the_evaluation(flags: tuple[str, ...], tmp_path: Path) -> None:
    assert small.train(tmp_path, *flags, "--eval-batch", "700") == 0
    expected = evaluation.evaluate(tmp_path, data=None, device="cpu")["splits"]["test"]
    with trained.loaded(tmp_path, device="cpu") as model:
        assert model.workload.build_predictor is not None
        predict = model.workload.build_predictor(model.trainer)
        batches = list(build_data(model.cfg, "test", 0, 1))
        labels = torch.cat([batch.labels for batch in batches])
        scores = torch.cat([predict(batch) for batch in batches])
        odd = dataclasses.replace(model.cfg, eval_batch=37)
        by_odd_batches = torch.cat([predict(batch) for batch in build_data(odd, "test", 0, 1)])
    # A CPU's one pass over fp32 adds up in another order than the evaluation.
    assert binary_metrics(scores, labels) == pytest.approx(expected, rel=1e-5)
    rough = "bf16" in flags
    torch.testing.assert_close(by_odd_batches, scores, rtol=0, atol=2e-2 if rough else 1e-5)


def test_classes_are_those_of_the_evaluation(sentences: Path) -> None:
    expected = evaluation.evaluate(sentences, data=None, device="cpu")["splits"]["validation"]
    with trained.loaded(sentences, device="cpu") as model:
        assert model.workload.build_predictor is not None
        predict = model.workload.build_predictor(model.trainer)
        batches = list(model.workload.build_data(model.cfg, "validation", 0, 1))
        logits_SC = torch.cat([predict(batch) for batch in batches])
    labels_S = torch.cat([batch.labels_KS.flatten()[: batch.samples] for batch in batches])
    assert batches[-1].samples < batches[0].samples  # stand-ins are left out of the last
    assert len(logits_SC) == len(labels_S) == sum(batch.samples for batch in batches)
    losses = torch.nn.functional.cross_entropy(logits_SC.double(), labels_S)
    assert (logits_SC.argmax(1) == labels_S).double().mean().item() == expected["accuracy"]
    assert losses.item() == pytest.approx(expected["loss"], rel=1e-6)


def test_activations_of_training_need_no_room(
    sentences: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    huge = MemoryPlan(weights=1, gradients=1, optimizer=1, activations=2**60)
    monkeypatch.setattr(memory, "plan_memory", lambda *arguments: huge)
    assert main(["infer", str(sentences), "--steps", "1", "--batches", "1"]) == 0
    flags = [*small_distilbert.FLAGS, "--micro-batch", "16", "--output", "/nonexistent/never"]
    refused(capsys, ["train", "distilbert-demo", *flags], "does not fit")


def test_the_optimiser_has_no_state(finished: Path) -> None:
    cfg = run_folder.read_config(finished)
    assert cfg.optimizer.name == "adagrad"
    assert small.trainer(cfg).device_bytes().optimizer > 4 * sum(small.TABLE_ROWS) * 8
    with trained.loaded(finished, device="cpu") as model:
        assert isinstance(model.trainer, DlrmTrainer)
        assert model.trainer.device_bytes().optimizer == 0


def test_nothing_is_sorted_for_an_update() -> None:
    stored = TableFormat(table_precision="bf16", fp32_up_to_rows=5)
    cfg = small.config(table_format=stored, optimizer=small.Optimizer(name="sgd"))
    trainer, batch = small.trainer(cfg), next(iter(build_data(cfg, "test", 0, 1)))
    (to_train,) = trainer.prepare(batch, batch.samples).micro_batches
    (to_predict,) = trainer.prepare_to_predict(batch, batch.samples).micro_batches
    assert len(to_train.lookup.batches) == 2
    assert to_predict.lookup.batches == []
    assert torch.equal(to_predict.lookup.ids_BF, to_train.lookup.ids_BF)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One word for each update that is planned."""
    planned: list[str] = []
    for where in (sharded, TableStore):
        monkeypatch.setattr(where, "plan_update", lambda *arguments: planned.append("one"))
    return planned


@pytest.mark.usefixtures("no_process_group_is_left")
def test_nor_is_one_planned_where_rows_are_exchanged(plans: list[str]) -> None:
    cfg = small.config(sharding=Sharding(force_exchange=True))
    trainer, batch = small.trainer(cfg), next(iter(build_data(cfg, "test", 0, 1)))
    scores = trainer.predict(trainer.prepare_to_predict(batch, batch.samples))
    assert (len(scores), plans) == (batch.samples, [])
    trainer.prepare(batch)
    assert plans  # of replicas, if of nothing else


# --- refusals


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--batches", "0"], ["--batches must be sizes of at least 1", "'0'"]),
        (["--batches", "1,-64"], ["'1,-64'"]),
        (["--batches", "1,,64"], ["'1,,64'"]),
        (["--batches", ""], ["--batches is empty"]),
        (["--batches", "many"], ["such as 1,64,4096", "'many'"]),
        (["--batches", "1.5"], ["'1.5'"]),
        (["--batches", "²"], ["'²'"]),
        (["--batches", "1,5000"], ["--batches 5000: the test split of synthetic has 4,000"]),
        (["--batches", "9" * 30], ["samples. Give smaller ones"]),
        (["--steps", "0"], ["--steps must be at least 1. Received: 0."]),
        (["--steps", "few"], ["--steps", "few"]),
        (["--clients", "0"], ["--clients must be at least 1 and at most --steps, 200", ": 0."]),
        (["--clients", "6", "--steps", "5"], ["at most --steps, 5. Received: 6."]),
        (["--device", "cuda"], ["--device cuda"]),
        (["--precision", "tf32"], ["tf32 needs a GPU"]),
        (["--precision", "fp12"], ["--precision", "fp12"]),
        (["--data", "/nonexistent"], ["/nonexistent does not exist"]),
    ],
)
def test_flags(
    finished: Path, capsys: pytest.CaptureFixture[str], flags: list[str], parts: list[str]
) -> None:
    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    refused(capsys, ["infer", str(finished), *flags], *parts)


def test_folders(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, ["infer"], "Missing from trainmark infer: PATH")
    refused(capsys, ["infer", str(tmp_path)], "is not the folder of a run")
    shutil.rmtree(run / "checkpoints")
    refused(capsys, ["infer", str(run)], f"{run} has no complete checkpoint")


def test_a_language_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    flags = ["--max-steps", "1", "--device", "cpu", "--output", str(run)]
    assert main(["train", "llama3-demo", *flags]) == 0
    refused(
        capsys, ["infer", str(run)], "llama3-demo has no latency to measure", "trainmark export"
    )


def test_what_is_launched_is_looked_at_first(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("infer", "evaluate"):
        launch = ["launch", "--on", "torchrun", "-j", "1x2", verb, "run", "--bathces", "3"]
        refused(capsys, launch, "Unrecognized options: --bathces")


@pytest.mark.parametrize("text", ["{", '{"rows": 3}', "[]"])
def test_a_damaged_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "inference.json").write_text(text)
    with pytest.raises(figures.InputError, match=r"inference\.json"):
        figures.read(tmp_path)


def test_no_file(tmp_path: Path) -> None:
    assert figures.read(tmp_path) is None
