"""Whole runs through the command line, in this process: counts, results, ends, continuations."""

import csv
import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.small import (
    STEPS,
    config,
    newest,
    result,
    saved,
    snapshot,
    train,
    write_dataset,
)
from trainmark import checkpoint
from trainmark import result as results
from trainmark.cli import main
from trainmark.report.alignment import read_curve
from trainmark.result import Evaluation
from trainmark.runlog import RunLog


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of 8 steps, with everything that a run can write."""
    output = tmp_path_factory.mktemp("runs") / "small"
    assert train(output, "--tensorboard", "--log-every", "3") == 0
    return output


def curve(output: Path) -> list[tuple[int, int, float]]:
    with open(output / "loss.csv", newline="") as file:
        return [(int(r["step"]), int(r["samples"]), float(r["loss"])) for r in csv.DictReader(file)]


def perf_events(output: Path) -> list[dict[str, Any]]:
    lines = (output / "perf.log").read_text().splitlines()
    assert all(line.startswith("[PerfLog] ") for line in lines)
    return [json.loads(line.removeprefix("[PerfLog] ")) for line in lines]


# --- identities


def test_samples_are_the_rows_that_were_read(finished: Path) -> None:
    found = result(finished)
    assert found["samples"] == 4000
    assert found["steps"] == {"all": STEPS, "warmup": 2, "skipped": 0}
    assert found["samples_measured"] == 4000 - 2 * 512
    assert any("1 step(s) had fewer samples" in note for note in found["notes"])
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
    from trainmark.loop import Training

    called_s = []
    for slow in ("_evaluate", "_save"):
        original = getattr(Training, slow)

        def slowly(self: Training, *args: Any, original: Any = original) -> Any:
            called_s.append(time.perf_counter())
            time.sleep(0.5)
            return original(self, *args)

        monkeypatch.setattr(Training, slow, slowly)
    began = time.perf_counter()
    assert train(tmp_path / "run") == 0
    time_s = result(tmp_path / "run")["time_s"]
    assert len(called_s) == 3  # two splits and a checkpoint
    assert time_s["whole"] < called_s[0] - began
    assert time_s["e2e"] > 1.5
    assert time_s["evaluation"] == time_s["checkpoint"] == 0


def test_the_result_reads_back(finished: Path) -> None:
    read = results.read(finished)
    assert read == results.read(finished / "result.json")
    copy = finished.parent / "copy"
    copy.mkdir()
    read.write(copy)
    assert (copy / "result.json").read_bytes() == (finished / "result.json").read_bytes()
    assert read.case == "cpux1x1"
    assert read.config == json.loads((finished / "config.json").read_text())
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


def test_perf_log(finished: Path) -> None:
    events = perf_events(finished)
    names = [event["event"] for event in events]
    assert names == [
        *("INIT_START", "INIT_END", "TRAIN_START", "TRAIN_END"),
        *("EVALUATE", "EVALUATE", "CHECKPOINT", "FINISHED"),
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
    assert set(value["metrics"]) == {"auc", "log_loss", "accuracy", "calibration"}
    assert {"e2e_time", "init_time", "converged", "mem_gib"} <= set(value)


def test_mlperf_log(finished: Path) -> None:
    lines = (finished / "mlperf.log").read_text().splitlines()
    records = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
    keys = [record["key"] for record in records]
    assert keys[:2] == ["init_start", "init_stop"]
    assert keys[-1] == "run_stop"
    assert {"seed", "global_batch_size", "eval_accuracy", "run_start"} <= set(keys)
    losses = {step: loss for step, _, loss in curve(finished)}
    assert read_curve(finished / "mlperf.log") == {step: losses[step] for step in (3, 6, STEPS)}


def test_the_live_rate_is_that_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    said: list[str] = []
    with RunLog(tmp_path, config(), started=0.0) as log:
        monkeypatch.setattr(log, "say", said.append)
        log.training_starts(step=0, total_steps=9)
        for step in (1, 2, 3):
            now += 2.0
            log.looked([(step, 100 * step, 0.5)], lr=0.1)
            now += 30.0
            log.checkpointed(tmp_path)
            undefined = {"auc": None}
            log.evaluated(Evaluation(at_sample=0, split="t", metrics=undefined, seconds=30.0), step)
    assert said[1] == "t after 0 samples: auc undefined"
    assert [line.split("  ")[2] for line in said if "step" in line] == [
        *("-", "50 samples/s", "50 samples/s"),
    ]


def test_tensorboard_events(finished: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished / "tensorboard"))
    events.Reload()
    losses = [(event.step, event.value) for event in events.Scalars("loss")]
    assert losses == [(step, pytest.approx(loss)) for step, _, loss in curve(finished)]
    (point,) = events.Scalars("test/auc")
    assert point.step == STEPS


def test_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "run")
    printed = capsys.readouterr()
    headline = json.loads(printed.out.splitlines()[-1])
    assert headline["result"] == str(tmp_path / "run" / "result.json")
    assert headline["auc"] == result(tmp_path / "run")["quality"]["value"]
    for column in ("precision", "fix_hp", "e2e_time", "p_whole", "p_train", "p_core", "mem"):
        assert column in printed.out
    assert "step 8" in printed.err


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


# --- where a run ends


@pytest.mark.parametrize("max_steps", [1, 5, 8, 100])
def test_max_steps_is_exact(tmp_path: Path, max_steps: int) -> None:
    assert train(tmp_path / "run", "--max-steps", str(max_steps)) == 0
    found, steps = result(tmp_path / "run"), min(max_steps, STEPS)
    assert found["steps"]["all"] == steps == len(curve(tmp_path / "run"))
    assert found["samples"] == min(512 * steps, 4000)
    assert newest(tmp_path / "run").name == f"step-{steps:08d}"


def test_max_steps_over_epochs(tmp_path: Path) -> None:
    assert train(tmp_path / "run", "--epochs", "3", "--max-steps", "17") == 0
    assert result(tmp_path / "run")["samples"] == 2 * 4000 + 512


@pytest.mark.parametrize(
    ("evals", "points"), [(0, []), (1, []), (2, [2560]), (4, [1536, 2560, 3072])]
)
def test_evaluation_points(tmp_path: Path, evals: int, points: list[int]) -> None:
    assert train(tmp_path / "run", "--evals-per-epoch", str(evals)) == 0
    found = [(e["split"], e["at_sample"]) for e in result(tmp_path / "run")["evaluations"]]
    assert found == [*(("test", at) for at in points), ("test", 4000), ("validation", 4000)]


def test_evaluation_at_the_end_of_each_epoch(tmp_path: Path) -> None:
    flags = ("--epochs", "2", "--initial-evaluation", "--eval-batch", "512")
    assert train(tmp_path / "run", *flags) == 0
    found = [(e["split"], e["at_sample"]) for e in result(tmp_path / "run")["evaluations"]]
    assert found == [("test", 0), ("test", 4000), ("test", 8000), ("validation", 8000)]


def test_early_stop_at_the_target(tmp_path: Path) -> None:
    flags = ("--evals-per-epoch", "4", "--target", "0.01", "--stop-at-target")
    assert train(tmp_path / "stops", *flags) == 0
    found = result(tmp_path / "stops")
    assert found["samples"] == 1536
    quality = found["quality"]
    assert (quality["reached"], quality["at_sample"], quality["target"]) == (True, 1536, 0.01)
    assert found["time_s"]["init"] < quality["at_s"] <= found["time_s"]["e2e"]
    assert train(tmp_path / "goes on", *flags, "--no-stop-at-target") == 0
    found = result(tmp_path / "goes on")
    assert found["samples"] == 4000
    assert found["quality"]["at_sample"] == 1536
    assert train(tmp_path / "misses", "--target", "0.9999") == 0
    quality = result(tmp_path / "misses")["quality"]
    assert (quality["reached"], quality["at_sample"], quality["at_s"]) == (False, None, None)


def test_the_quality_split_decides(tmp_path: Path) -> None:
    assert train(tmp_path / "run", "--quality-split", "validation", "--evals-per-epoch", "2") == 0
    found = result(tmp_path / "run")
    splits = [e["split"] for e in found["evaluations"]]
    assert splits == ["validation", "test", "validation"]
    assert found["quality"]["value"] == found["evaluations"][-1]["metrics"]["auc"]


# --- the same folder again


def test_the_same_command_on_a_finished_run_changes_nothing(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(finished)
    assert train(finished, "--tensorboard", "--log-every", "3") == 0
    printed = capsys.readouterr()
    assert "finished already" in printed.err
    assert json.loads(printed.out.splitlines()[-1])["auc"] == result(finished)["quality"]["value"]
    assert snapshot(finished) == before


@pytest.mark.parametrize("flags", [(), ("--checkpoint-every", "2 steps")])
def test_a_finished_run_can_be_extended(
    finished: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    output = tmp_path / "run"
    assert train(output, "--max-steps", "3", *flags) == 0
    assert train(output, "--max-steps", "5", *flags) == 0
    assert train(output, *flags) == 0
    assert saved(newest(output)) == saved(newest(finished))
    assert curve(output) == curve(finished)
    found = result(output)
    assert (found["samples"], found["steps"]["all"]) == (4000, STEPS)
    assert found["quality"]["value"] == result(finished)["quality"]["value"]
    assert any("Continued 2 time(s)" in note for note in found["notes"])
    assert found["loss"] == result(finished)["loss"]


def test_a_raised_target_goes_on_and_forgets_when_the_old_one_was_reached(tmp_path: Path) -> None:
    output, flags = tmp_path / "run", ("--evals-per-epoch", "4", "--stop-at-target")
    for target, samples, reached in (("0.01", 1536, True), ("0.9999", 4000, False)):
        assert train(output, *flags, "--target", target) == 0
        found = result(output)
        assert (found["samples"], found["quality"]["reached"]) == (samples, reached)
        assert (found["quality"]["at_s"] is None) != reached
    # All steps are done, but the target is another: judged anew, with what was measured.
    assert train(output, *flags, "--target", "0.02") == 0
    again = result(output)
    assert (again["quality"]["reached"], again["quality"]["at_sample"]) == (True, 1536)
    assert again["samples"] == 4000
    assert again["time_s"]["train"] == pytest.approx(found["time_s"]["train"], abs=0.05)


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        (("--lr", "0.2"), ["lr"]),
        (("--seed", "1", "--optimizer.eps", "1e-6"), ["optimizer.eps", "seed"]),
        (("--global-batch", "256"), ["global_batch"]),  # how it is laid out may change
    ],
)
def test_another_configuration_is_refused(
    finished: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], fields: list[str]
) -> None:
    before = snapshot(finished)
    assert train(finished, *flags) == 2
    message = capsys.readouterr().err
    assert "another configuration" in message
    assert f"(other {', '.join(fields)})" in message
    assert snapshot(finished) == before


def test_fresh(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(finished)
    assert train(finished, "--fresh") == 2
    assert "--fresh" in capsys.readouterr().err
    assert snapshot(finished) == before
    assert train(tmp_path / "new", "--fresh", "--max-steps", "1") == 0


def test_a_folder_with_other_things_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    assert train(tmp_path) == 2
    assert snapshot(tmp_path) == {"precious.txt": b"mine"}
    assert train(tmp_path / "precious.txt") == 2


# --- weights, files, seeds, traces


def test_a_full_disk_is_noticed_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        assert train(tmp_path / "run") == 2
        message = capsys.readouterr().err
        assert len(message.splitlines()) == 1
        assert "needs" in message
        assert "free. Free some space" in message
        assert train(tmp_path / "unsaved", "--checkpoint-every", "never") == 0
    assert train(tmp_path / "run") == 0


def test_from_takes_the_weights_only(finished: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    assert train(output, "--from", str(finished), "--max-steps", "1", "--lr", "0") == 0
    started, source = saved(newest(output)), saved(newest(finished))
    weights = {name for name in source if name.startswith("model.")}
    assert {name: started[name] for name in weights} == {name: source[name] for name in weights}
    assert started["trainer.top.0.weight.sum"] != source["trainer.top.0.weight.sum"]
    found = result(output)
    assert found["samples"] == 512
    assert any(str(newest(finished)) in note for note in found["notes"])
    again = train(output, "--from", str(finished), "--max-steps", "2", "--lr", "0")
    assert again == 2  # there is something to continue already


def test_from_another_model_leaves_no_trace(finished: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    assert train(output, "--from", str(finished), "--model.table-rows", "50", "7", "4") == 2
    assert train(output, "--from", str(tmp_path / "nowhere")) == 2
    assert not output.exists()


def test_repeats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "runs"
    assert train(output, "--repeats", "3", "--seed", "5") == 0
    printed = capsys.readouterr().out
    assert "3 repeats" in printed
    assert len([line for line in printed.splitlines() if line.startswith("{")]) == 3
    found = [result(output / str(repeat)) for repeat in range(3)]
    assert [r["config"]["seed"] for r in found] == [5, 6, 7]
    assert len({r["loss"]["last"] for r in found}) == 3
    assert train(tmp_path / "alone", "--seed", "6") == 0
    assert result(tmp_path / "alone")["loss"] == found[1]["loss"]


def test_repeats_of_planted_data_have_their_own_targets(tmp_path: Path) -> None:
    output = tmp_path / "runs"
    assert train(output, "--repeats", "2", "--max-steps", "1", "--synthetic-ids", "planted") == 0
    targets = [result(output / str(repeat))["quality"]["target"] for repeat in range(2)]
    assert targets[0] != targets[1]


def test_configuration_files(finished: Path, tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(
        'max_steps = 2\nlr = 0.3\n[optimizer]\nname = "sgd"\n[model]\ninit="torchrec"\n'
    )
    assert train(tmp_path / "toml", "--config", str(toml), "--lr", "0.4") == 0
    cfg = result(tmp_path / "toml")["config"]
    assert (cfg["max_steps"], cfg["lr"]) == (2, 0.4)  # the flag wins over the file
    assert (cfg["optimizer"]["name"], cfg["model"]["init"]) == ("sgd", "torchrec")
    assert cfg["optimizer"]["beta1"] == 0.9  # what the file leaves out stays

    again = ["train", "dlrm-demo", "--config", str(finished / "result.json")]
    assert main([*again, "--output", str(tmp_path / "again")]) == 0
    assert result(tmp_path / "again")["config"] == result(finished)["config"]
    assert saved(newest(tmp_path / "again")) == saved(newest(finished))


def test_profile(tmp_path: Path) -> None:
    assert train(tmp_path / "run", "--profile", "2:4") == 0
    trace = json.loads((tmp_path / "run" / "profile.json").read_text())
    steps = [
        e for e in trace["traceEvents"] if e.get("name") == "aten::binary_cross_entropy_with_logits"
    ]
    assert len(steps) == 2
    assert any("torch.profiler" in note for note in result(tmp_path / "run")["notes"])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_runs(tmp_path: Path, precision: str) -> None:
    assert train(tmp_path / "run", "--precision", precision) == 0
    found = result(tmp_path / "run")
    assert found["precision"] == precision
    assert found["loss"]["last"] < 1


def test_skipped_steps_are_counted(tmp_path: Path) -> None:
    assert train(tmp_path / "run", "--precision", "fp16", "--loss-scale", "1e9") == 0
    found = result(tmp_path / "run")
    assert found["steps"] == {"all": STEPS, "warmup": 2, "skipped": STEPS}
    assert found["samples"] == 4000
    assert any(f"{STEPS} step(s) were skipped" in note for note in found["notes"])


def test_checkpoints_are_kept_and_dropped(tmp_path: Path) -> None:
    flags = ("--checkpoint-every", "2 steps", "--keep-checkpoints", "3")
    assert train(tmp_path / "run", *flags) == 0
    kept = checkpoint.all_checkpoints(tmp_path / "run" / "checkpoints")
    assert [path.name[-2:] for path in kept] == ["04", "06", "08"]
    assert train(tmp_path / "never", "--checkpoint-every", "never") == 0
    assert not (tmp_path / "never" / "checkpoints").exists()
    assert main(["evaluate", str(tmp_path / "never")]) == 2


def test_changed_fields_make_a_run_open(tmp_path: Path) -> None:
    assert train(tmp_path / "run", "--max-steps", "1", "--schedule.warmup-steps", "5") == 0
    found = result(tmp_path / "run")
    assert found["division"] == "open"
    assert {"max_steps", "schedule.warmup_steps", "global_batch"} <= set(found["changed"])
    assert "warmup_clock" not in found["changed"]


@pytest.mark.parametrize(
    "flags",
    [
        ("--synthetic-rows", "1"),
        ("--synthetic-rows", "1", "--synthetic-ids", "planted"),
        ("--model.table-rows",),
        ("--model.numerical-features", "0"),
        ("--model.embedding-dim", "1", "--model.bottom-mlp", "1"),
        ("--model.top-mlp", "1"),
        ("--shuffle", "rows", "--shuffle-window", "1"),
        ("--micro-batch", "7", "--global-batch", "490"),
    ],
    ids=" ".join,
)
def test_odd_sizes_train(tmp_path: Path, flags: tuple[str, ...]) -> None:
    assert train(tmp_path / "run", *flags) == 0
    found = results.read(tmp_path / "run")
    assert found.samples == found.config["synthetic_rows"]


# --- data on disk


DISK = ("--global-batch", "100", "--log-every", "2")


def test_a_dataset_on_disk(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "data", validation_rows=70)
    assert train(tmp_path / "run", "--data", str(folder), *DISK, "--shuffle", "rows") == 0
    found = result(tmp_path / "run")
    assert found["samples"] == 1000
    assert found["config"]["model"]["numerical_features"] == 3
    assert [e["split"] for e in found["evaluations"]] == ["test", "validation"]
    assert main(["evaluate", str(tmp_path / "run")]) == 0


@pytest.mark.parametrize(("row", "step"), [(0, 1), (530, 6), (999, 10)])
def test_nan_in_the_data_stops_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: int, step: int
) -> None:
    folder = write_dataset(tmp_path / "data")
    path = folder / "train/numerical.bin"
    numerical = np.fromfile(path, np.float16).reshape(-1, 3)
    numerical[row, 1] = np.nan
    numerical.tofile(path)
    output = tmp_path / "run"
    flags = ("--data", str(folder), "--global-batch", "100", "--log-every", "4")
    assert train(output, *flags, "--checkpoint-every", "5 steps") == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert f"The loss of step {step} is not finite" in message
    first, last = row // 100 * 100, row // 100 * 100 + 99
    assert f"between global rows {first} and {last}" in message
    assert not (output / "result.json").exists()
    # The losses before it are kept, and so is the last checkpoint.
    assert [at for at, _, _ in curve(output)] == list(range(1, step))
    kept = checkpoint.all_checkpoints(output / "checkpoints")
    assert [path.name for path in kept] == (["step-00000005"] if step > 5 else [])
    assert (f"the last checkpoint is {kept[0]}" if kept else "no checkpoint yet") in message
    for path in kept:
        checkpoint.verify(path)
    # Once the row is mended, the same command goes on and ends where it would have ended.
    numerical[row, 1] = 0.5
    numerical.tofile(folder / "train/numerical.bin")
    assert train(output, *flags, "--checkpoint-every", "5 steps") == 0
    assert train(tmp_path / "undisturbed", *flags) == 0
    assert saved(newest(output)) == saved(newest(tmp_path / "undisturbed"))
    assert curve(output) == curve(tmp_path / "undisturbed")


def test_nan_in_held_out_data_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_dataset(tmp_path / "data")
    path = folder / "test/numerical.bin"
    numerical = np.fromfile(path, np.float16).reshape(-1, 3)
    numerical[123, 0] = np.inf
    numerical.tofile(path)
    assert train(tmp_path / "run", "--data", str(folder), *DISK) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert (
        "1 of 300 predictions for the test split are not finite, the first for row 123" in message
    )


def test_weights_that_explode_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--optimizer.name", "sgd", "--lr", "1e30", "--log-every", "3")
    assert train(tmp_path / "run", *flags) == 2
    assert "not finite" in capsys.readouterr().err
