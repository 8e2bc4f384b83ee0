"""What a run leaves behind: counts, clocks, logs, its result, and an evaluation of it."""

import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.small import STEPS, config, curve, result, snapshot, train
from trainmark import workloads
from trainmark.cli import main
from trainmark.report.alignment_page import read_curve
from trainmark.run import result as results
from trainmark.run.curves import Step, Stretch
from trainmark.run.result import Evaluation
from trainmark.run.runlog import RunLog

# --- the result


def test_samples_are_the_rows_that_were_read(finished: Path) -> None:
    found = result(finished)
    assert found["samples"] == 4000
    assert found["steps"] == {"all": STEPS, "warmup": 2, "skipped": 0}
    assert found["samples_measured"] == 4000 - 2 * 512
    assert any("1 step had fewer samples" in note for note in found["notes"])
    assert [row[:2] for row in curve(finished)] == [
        *((step, 512 * step) for step in range(1, STEPS)),
        (STEPS, 4000),
    ]


def test_times_and_speeds_agree(finished: Path) -> None:
    found = result(finished)
    time, speed = found["time_s"], found["throughput"]
    assert speed["p_whole"] * time["whole"] == pytest.approx(found["samples"])
    assert speed["p_train"] * time["train"] == pytest.approx(found["samples_measured"])
    assert speed["p_core"] * time["core"] == pytest.approx(found["samples_measured"])
    assert speed["p_core"] >= speed["p_train"]
    assert time["e2e"] >= time["whole"] + time["init"]
    parts = time["evaluation"] + time["checkpoint"] + time["warmup"]
    assert time["train"] == pytest.approx(time["whole"] - parts)
    assert time["core"] == pytest.approx(time["train"] - time["input_wait"])
    assert all(value >= 0 for value in time.values())


def test_the_final_evaluation_and_checkpoint_are_not_in_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainmark.run.loop import Training

    called_s = []
    for slow in ("_evaluate", "_save"):
        original = getattr(Training, slow)

        def slowly(self: Training, *args: Any, original: Any = original) -> Any:
            called_s.append(time.perf_counter())
            time.sleep(0.2)
            return original(self, *args)

        monkeypatch.setattr(Training, slow, slowly)
    began = time.perf_counter()
    assert train(tmp_path / "run") == 0
    time_s = result(tmp_path / "run")["time_s"]
    assert len(called_s) == 3  # two splits and a checkpoint
    assert time_s["whole"] < called_s[0] - began
    assert time_s["e2e"] > 0.6
    assert time_s["evaluation"] == time_s["checkpoint"] == 0


def test_the_result_reads_back(finished: Path) -> None:
    read = results.read(finished)
    assert read == results.read(finished / "result.json")
    copy = finished.parent / "copy"
    copy.mkdir()
    read.write(copy)
    assert (copy / "result.json").read_bytes() == (finished / "result.json").read_bytes()
    assert read.case == "cpux1x1"
    config = json.loads((finished / "config.json").read_text())
    assert read.config == {key: value for key, value in config.items() if key != "checksum"}
    assert read.mfu == []
    assert read.mfu_reason
    assert {e.split for e in read.evaluations} == {"test", "validation"}
    assert all(e.at_sample == 4000 for e in read.evaluations)
    assert read.quality.value == read.evaluations[0].metrics["auc"]


def test_loss_and_curve_agree(finished: Path) -> None:
    losses = [loss for _, _, loss in curve(finished)]
    found = result(finished)["loss"]
    assert (found["first"], found["last"]) == (losses[0], losses[-1])
    assert all(map(math.isfinite, losses))


def test_skipped_steps_are_counted(tmp_path: Path) -> None:
    assert train(tmp_path / "run", "--precision", "fp16", "--loss-scale", "1e9") == 0
    found = result(tmp_path / "run")
    assert found["steps"] == {"all": STEPS, "warmup": 2, "skipped": STEPS}
    assert found["samples"] == 4000
    assert any(f"Skipped {STEPS} steps, because" in note for note in found["notes"])


def test_changed_fields_make_a_run_open(tmp_path: Path) -> None:
    assert train(tmp_path / "run", "--max-steps", "1", "--schedule.warmup-steps", "5") == 0
    found = result(tmp_path / "run")
    assert found["division"] == "open"
    assert {"max_steps", "schedule.warmup_steps", "global_batch"} <= set(found["changed"])
    assert "warmup_clock" not in found["changed"]


# --- logs


def test_perf_log(finished: Path) -> None:
    events = perf_events(finished)
    names = [event["event"] for event in events]
    assert names == [
        *("INIT_START", "INIT_END", "TRAIN_START", "TRAIN_END"),
        *("EVALUATE", "EVALUATE", "CHECKPOINT", "FINISHED"),  # it was being written meanwhile
    ]
    stamps = [event["metadata"]["time_ms"] for event in events]
    assert stamps == sorted(stamps)
    value, found = events[-1]["value"], result(finished)
    assert value["num_trained_samples"] == 4000
    assert value["global_steps"] == STEPS
    assert value["train_time"] == found["time_s"]["whole"]
    assert value["train_no_eval_time"] == found["time_s"]["train"]
    assert value["pure_training_computing_time"] == found["time_s"]["core"]
    assert value["throughput(ips)_raw"] == found["throughput"]["p_whole"]
    assert value["throughput(ips)_no_eval"] == found["throughput"]["p_train"]
    assert value["throughput(ips)_pure_compute"] == found["throughput"]["p_core"]
    assert value["final_auc"] == found["quality"]["value"]
    assert value["init_time"] == found["time_s"]["init"]
    for event in events:
        place = event["metadata"]
        line = Path(place["file"]).read_text().splitlines()[place["lineno"] - 1]
        assert "self.log" in line or "training.log" in line, place


def perf_events(output: Path) -> list[dict[str, Any]]:
    lines = (output / "perf.log").read_text().splitlines()
    assert all(line.startswith("[PerfLog] ") for line in lines)
    return [json.loads(line.removeprefix("[PerfLog] ")) for line in lines]


def test_mlperf_log(finished: Path) -> None:
    lines = (finished / "mlperf.log").read_text().splitlines()
    records = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
    keys = [record["key"] for record in records]
    assert keys.index("init_start") + 1 == keys.index("init_stop")
    assert keys[-1] == "run_stop"
    assert {"seed", "global_batch_size", "run_start", "test_log_loss", "validation_auc"} <= set(
        keys
    )
    (accuracy,) = (record for record in records if record["key"] == "eval_accuracy")
    assert accuracy["value"] == result(finished)["quality"]["value"]
    losses = {step: loss for step, _, loss in curve(finished)}
    assert read_curve(finished / "mlperf.log") == {step: losses[step] for step in (3, 6, STEPS)}


def test_what_is_said_while_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with RunLog(tmp_path, config(), workloads.load("dlrm"), started=0.0) as log:
        monkeypatch.setattr(log, "say", said.append)
        log.training_starts(step=0, total_steps=9, samples=0, train_samples=900, eval_samples=100)
        steps = [Step(step=999 + i, samples=1, loss=0.4 + i / 5, lr=0.1) for i in (0, 1)]
        for rate in (5000.4, 0.0312, None):
            log.looked(steps, Stretch(time_s=1.0, samples_per_s=rate, power_w=None))
        log.looked(steps[:1], Stretch(time_s=1.0, samples_per_s=1.0, power_w=None))
        undefined: dict[str, float | None] = {"auc": None}
        log.evaluated(Evaluation(at_sample=0, split="t", metrics=undefined, seconds=30.0), 1)
    assert said == [
        "step 1,000  loss 0.50000  5,000 samples/s  lr 0.1",
        "step 1,000  loss 0.50000  0.0312 samples/s  lr 0.1",
        "step 1,000  loss 0.50000  -  lr 0.1",
        "t after 0 samples: auc undefined",
    ]


def test_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "run")
    printed = capsys.readouterr()
    headline = json.loads(printed.out.splitlines()[-1])
    assert headline["result"] == str(tmp_path / "run" / "result.json")
    assert headline["auc"] == result(tmp_path / "run")["quality"]["value"]
    for column in ("precision", "fix_hp", "e2e_time", "p_whole", "p_train", "p_core", "mem"):
        assert column in printed.out
    assert "step 8" in printed.err


def test_profile(tmp_path: Path) -> None:
    assert train(tmp_path / "run", "--profile", "2:4") == 0
    trace = json.loads((tmp_path / "run" / "profile.json").read_text())
    steps = [
        e for e in trace["traceEvents"] if e.get("name") == "aten::binary_cross_entropy_with_logits"
    ]
    assert len(steps) == 2
    assert any("torch.profiler" in note for note in result(tmp_path / "run")["notes"])


# --- evaluate


def test_evaluate_gives_the_final_metrics_exactly(finished: Path) -> None:
    before = snapshot(finished)
    assert main(["evaluate", str(finished), "--device", "cpu"]) == 0
    after = snapshot(finished)
    evaluation = json.loads(after.pop("evaluation.json"))
    assert after == before
    expected = {e["split"]: e["metrics"] for e in result(finished)["evaluations"]}
    assert evaluation["splits"] == expected
    assert (evaluation["step"], evaluation["samples"]) == (STEPS, 4000)


def test_an_evaluation_that_cannot_be_kept_is_printed(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "evaluation.json").unlink(missing_ok=True)
    (run / "evaluation.json" / "in the way").mkdir(parents=True)
    assert main(["evaluate", str(run), "--device", "cpu"]) != 0
    printed = capsys.readouterr()
    assert f"{result(finished)['quality']['value']:.6f}" in printed.out
    assert "evaluation.json" in printed.err


@pytest.mark.parametrize(("precision", "slow"), [("fp16", True), ("fp32", False)])
def test_who_trains_in_fp16_on_a_cpu_is_told_of_fp32(
    precision: str, slow: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, "--precision", precision, "--max-steps", "1") == 0
    assert ("try --precision fp32" in capsys.readouterr().err) == slow
