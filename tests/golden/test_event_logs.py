"""Log lines of published systems, against what their own writers make.

`flagperf_perf.log` has the form of FlagPerf's `PerfLogger`, and the names that the FINISHED events
of its DLRM and DistilBERT carry.
"""

import dataclasses
import json
import re
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.unit.results import make_result
from trainmark import workloads
from trainmark.errors import InputError
from trainmark.hardware.devices import Cluster
from trainmark.run.curves import Step, Stretch
from trainmark.run.result import Evaluation, Quality, Result, Throughput
from trainmark.run.runlog import RunLog

GOLDEN = Path(__file__).parent / "flagperf_perf.log"


def evaluation(**metrics: float | None) -> Evaluation:
    return Evaluation(at_sample=1, split="test", metrics=dict(metrics), seconds=1.5)


def trained(metric: str, value: float) -> Result:
    plain = make_result()
    quality = replace(plain.quality, metric=metric, value=value)
    return make_result(
        quality=quality,
        throughput=Throughput(p_whole=18000.0, p_train=20000.0, p_core=22500.0),
        evaluations=[
            evaluation(auc=0.8, log_loss=0.45, accuracy=0.9),
            evaluation(auc=0.79, log_loss=0.4, accuracy=0.915),
            Evaluation(at_sample=1, split="validation", metrics={"auc": 0.9}, seconds=1.0),
        ],
    )


def logged(folder: Path, results: list[Result], **changes: Any) -> None:
    """A short run: what the loop tells its log."""
    cfg = dataclasses.replace(workloads.named_run("dlrm-demo"), **changes)
    with RunLog(folder, cfg, workloads.load(cfg.workload), started=0.0) as log:
        log.training_starts(
            step=0, total_steps=264, samples=0, train_samples=67349, eval_samples=872
        )
        log.evaluated(replace(evaluation(accuracy=0.5), seconds=1.25), 0)
        step = Step(step=264, samples=67584, loss=0.25, lr=5e-5)
        log.looked([step], Stretch(time_s=1.0, samples_per_s=None, power_w=None))
        log.evaluated(evaluation(accuracy=0.915), 264)
        log.training_ends()
    for result in results:
        log.finished(result)


def test_flagperfs_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1.7e9)
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    logged(tmp_path, [trained("auc", 0.79), trained("accuracy", 0.915)])
    text = (tmp_path / "perf.log").read_text()
    places = re.findall(r'"file": "([^"]*)", "lineno": (\d+)', text)
    assert {file for file, _ in places} == {__file__}
    lines = Path(__file__).read_text().splitlines()
    assert all("log" in lines[int(number) - 1] for _, number in places)
    text = re.sub(r'"file": "[^"]*", "lineno": \d+', '"file": "FILE", "lineno": 0', text)
    assert text == GOLDEN.read_text()


def test_dlloggers_lines(tmp_path: Path) -> None:
    logged(tmp_path, [trained("auc", 0.79)], dllogger=True)
    lines = (tmp_path / "dllogger.json").read_text().splitlines()
    assert all(line.startswith("DLLL ") for line in lines)
    records = [json.loads(line.removeprefix("DLLL ")) for line in lines]
    for record in records:
        # As dllogger's JSONStreamBackend: numbers as text, the same moment twice.
        assert float(record["timestamp"]) == datetime.fromisoformat(record["datetime"]).timestamp()
        assert float(record["elapsedtime"]) > 0
    units = {r["metric"]: r["metadata"] for r in records if r["type"] == "METADATA"}
    assert units["throughput"] == {"unit": "samples/s"}
    logs = [record for record in records if record["type"] == "LOG"]
    assert set(logs[0]) == {"timestamp", "datetime", "elapsedtime", "type", "step", "data"}
    assert [log["step"] for log in logs] == ["PARAMETER", 0, 264, 264, []]
    assert logs[0]["data"]["name"] == "dlrm-demo"
    assert logs[2]["data"] == {"loss": 0.25, "learning_rate": 5e-5, "samples": 67584}
    assert logs[-1]["data"] == {
        "throughput": 20000.0,
        "mean_step_time_ms": 50.0,
        "auc": 0.8,
        "validation_loss": 0.4,
        "train_loss": 0.41,
    }


def test_dllogger_is_only_written_on_demand(tmp_path: Path) -> None:
    logged(tmp_path, [trained("auc", 0.79)])
    assert not (tmp_path / "dllogger.json").exists()


def test_a_metric_that_is_undefined_has_no_best_value(tmp_path: Path) -> None:
    undefined = Quality(
        metric="auc", split="test", value=None, target=None, better="higher", reached=None
    )
    logged(tmp_path, [make_result(quality=undefined, evaluations=[evaluation(auc=None)])])
    last = json.loads((tmp_path / "perf.log").read_text().splitlines()[-1].split(" ", 1)[1])
    assert (last["value"]["final_auc"], last["value"]["best_auc"]) == (None, None)
    assert "best_validation_loss" not in last["value"]


def test_mlperfs_keys(tmp_path: Path) -> None:
    """What ruleset 6.0.0 (training, open division) wants of every benchmark, and how often."""
    logged(tmp_path, [trained("auc", 0.79)], submission="Example Ltd,2 cores")
    lines = (tmp_path / "mlperf.log").read_text().splitlines()
    records = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
    values: dict[str, list[object]] = {}
    for record in records:
        values.setdefault(record["key"], []).append(record["value"])
    assert values["submission_org"] == ["Example Ltd"]
    assert values["submission_platform"] == ["2 cores"]
    assert values["submission_division"] == ["open"]
    assert values["submission_benchmark"] == ["dlrm"]  # not one of theirs any more
    assert (values["train_samples"], values["eval_samples"]) == ([67349], [872])
    for once in ("init_start", "init_stop", "run_start", "run_stop"):
        assert len(values[once]) == 1
    assert "cache_clear" in values
    # Intervals that begin also end, one after another.
    for kind in ("block", "eval"):
        found = [r for r in records if r["key"] in (f"{kind}_start", f"{kind}_stop")]
        assert [r["key"] for r in found] == [f"{kind}_start", f"{kind}_stop"] * (len(found) // 2)
        assert len(found) == 4
        assert all("samples_count" in r["metadata"] for r in found)
    (last,) = (r for r in records if r["key"] == "run_stop")
    assert last["metadata"]["status"] == "success"


@pytest.mark.parametrize("submission", ["", "me", ",cpu", "me,"])
def test_a_submission_names_both(submission: str) -> None:
    cfg = dataclasses.replace(workloads.named_run("dlrm-demo"), submission=submission)
    with pytest.raises(InputError, match="ORG,PLATFORM"):
        workloads.resolve(cfg, Cluster.parse("cpux1x1"))


def test_a_continued_run_is_one_run_for_mlperf(tmp_path: Path) -> None:
    for _ in range(2):  # the second time longer, in the same folder
        logged(tmp_path, [trained("auc", 0.79)])
    lines = (tmp_path / "mlperf.log").read_text().splitlines()
    records = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
    keys = [record["key"] for record in records]
    once = ("init_start", "init_stop", "run_start", "seed", "global_batch_size", "run_stop")
    assert [keys.count(key) for key in once] == [1] * len(once)
    assert keys[-1] == "run_stop"
    assert keys.count("train_loss") == 2
    # dlrm's quality is the AUC: an accuracy has a name of its own.
    assert "eval_accuracy" not in keys
    assert keys.count("test_accuracy") == 4
