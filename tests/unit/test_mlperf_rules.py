"""MLCommons' own programs judge mlperf.log: the compliance checker, and the summariser."""

import csv
import dataclasses
import io
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.results import make_result
from trainmark import cli, workloads
from trainmark.run.mlperf import MlperfLog
from trainmark.run.result import Evaluation

pytest.importorskip("mlperf_logging")

NETWORK = ["--model.interaction", "dcn", "--model.cross-layers", "2", "--model.cross-rank", "8"]
SHORT = ["--max-steps", "6", "--synthetic-rows", "12000", "--evals-per-epoch", "2"]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a short run that reaches its target."""
    output = tmp_path_factory.mktemp("mlperf") / "run"
    flags = [*NETWORK, *SHORT, "--target", "0.1", "--no-stop-at-target"]
    named = ["--submission", "Somebody,a machine", "--output", str(output)]
    assert cli.main(["train", "dlrm-demo", *flags, *named]) == 0
    return output / "mlperf.log"


def told_by(program: str, *words: object, cwd: Path) -> str:
    command = [sys.executable, "-m", f"mlperf_logging.{program}", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    return done.stdout + done.stderr


def judged(log: Path) -> str:
    """What the checker says; it leaves a file where it runs."""
    rules = ["--usage", "training", "--ruleset", "6.0.0"]
    return told_by("compliance_checker", *rules, log, cwd=log.parent)


def test_the_checker_passes_a_run_and_not_a_cut_one(log: Path, tmp_path: Path) -> None:
    assert "SUCCESS" in judged(log)
    cut = tmp_path / "cut.log"
    cut.write_text("".join(log.read_text().splitlines(True)[:-1]))
    assert "SUCCESS" not in judged(cut)


def test_the_closed_divisions_settings_are_logged(log: Path) -> None:
    events = [json.loads(line.partition("MLLOG ")[2]) for line in log.read_text().splitlines()]
    values = {event["key"]: event["value"] for event in events}
    optimizer = workloads.named_run("dlrm-demo").optimizer
    assert (values["opt_name"], values["opt_adagrad_epsilon"]) == (optimizer.name, optimizer.eps)
    assert values["opt_learning_rate_decay_start_step"] is not None
    for key in ("opt_weight_decay", "opt_adagrad_initial_accumulator_value", "eval_samples"):
        assert [event["key"] for event in events].count(key) == 1


def test_the_summariser_reads_ten_runs(log: Path, tmp_path: Path) -> None:
    results = tmp_path / "org" / "results" / "machine" / "dlrm_dcnv2"
    results.mkdir(parents=True)
    for number in range(10):  # as many as a submission has
        shutil.copy(log, results / f"result_{number}.txt")
    keys = (
        "submitter division status system_name number_of_nodes host_processors_per_node "
        "host_processor_model_name accelerators_per_node accelerator_model_name framework "
        "host_processor_core_count hw_notes sw_notes"
    )
    system = dict.fromkeys(keys.split(), "1") | {"division": "open", "submitter": "Somebody"}
    (tmp_path / "org" / "systems").mkdir()
    (tmp_path / "org" / "systems" / "machine.json").write_text(json.dumps(system))
    table = tmp_path / "table.csv"
    said = told_by(
        "result_summarizer", tmp_path / "org", "training", "6.0.0", "--csv", table, cwd=tmp_path
    )
    assert table.exists(), said
    (row,) = csv.DictReader(io.StringIO(table.read_text()))
    assert row["submitter"] == "Somebody"
    assert float(row["dlrm_dcnv2"]) > 0, said


def test_llama_as_far_as_the_rules_allow(tmp_path: Path) -> None:
    """They want an `eval_accuracy` below 1.0, where it is a loss that is to reach 3.3."""
    cfg = dataclasses.replace(
        workloads.named_run("llama3-8b"), global_batch=32, accumulate=4, submission="Somebody,x"
    )
    path = tmp_path / "mlperf.log"
    workload = workloads.load("llama3")
    with open(path, "w") as stream:
        log = MlperfLog(stream, cfg, workload, goes_on=False)
        log.init_starts(time.time())
        log.training_starts(0, train_samples=1000, eval_samples=1024)
        log.looked(10, 320, 3.5)
        log.evaluated(
            Evaluation(at_sample=320, split="test", metrics={cfg.metric: 3.2}, seconds=0.1)
        )
        log.training_ends()
        log.finished(make_result())
    complaints = [line for line in judged(path).splitlines() if "Failed" in line]
    assert len(complaints) == 1, complaints
    path.write_text(path.read_text().replace('"value": 3.2', '"value": 0.32'))
    assert "SUCCESS" in judged(path)
