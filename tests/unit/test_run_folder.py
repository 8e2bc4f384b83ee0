"""The folder of a run: used again, refused, continued, started from, full."""

import fcntl
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from tests.small import STEPS, curve, newest, result, saved, snapshot, train, write_dataset
from trainmark.checkpoint import checkpoints, folders
from trainmark.cli import main

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


def test_one_process_at_a_time_trains_in_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    assert train(output, "--max-steps", "2") == 0
    with (output / ".lock").open("w") as another:
        fcntl.flock(another, fcntl.LOCK_EX)
        before = snapshot(output)
        assert train(output, "--max-steps", "3") == 2
        assert f"Another process trains in {output} now" in capsys.readouterr().err
        assert snapshot(output) == before
    assert train(output, "--max-steps", "3") == 0


def test_a_lock_that_was_left_alone_is_no_run(tmp_path: Path) -> None:
    output = tmp_path / "run"
    output.mkdir()
    (output / ".lock").touch()
    assert train(output, "--max-steps", "2", "--fresh") == 0


def test_data_that_are_newer_than_the_checkpoint_are_mentioned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = write_dataset(tmp_path / "data", train_rows=600), tmp_path / "run"
    flags = ["train", "dlrm-demo", "--data", str(data), "--output", str(output)]
    flags += ["--global-batch", "100", "--max-steps"]
    assert main([*flags, "2"]) == 0
    assert main([*flags, "3"]) == 0
    assert "is newer than" not in capsys.readouterr().err
    os.utime(data / "train" / "label.bin", (time.time() + 60,) * 2)
    assert main([*flags, "4"]) == 0
    assert "label.bin is newer than" in capsys.readouterr().err


def test_an_evaluation_that_fails_costs_no_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = write_dataset(tmp_path / "data", train_rows=600), tmp_path / "run"
    flags = ["train", "dlrm-demo", "--data", str(data), "--global-batch", "100"]
    flags += ["--evals-per-epoch", "0", "--output"]
    file = data / "test" / "numerical.bin"
    good = file.read_bytes()
    file.write_bytes(good[:20] + b"\xff\x7f" + good[22:])  # a NaN
    assert main([*flags, str(output)]) == 2
    assert "are not finite" in capsys.readouterr().err
    assert newest(output).name == "step-00000006"
    losses = curve(output)
    file.write_bytes(good)
    assert main([*flags, str(output)]) == 0
    assert main([*flags, str(tmp_path / "undisturbed")]) == 0
    assert curve(output) == losses == curve(tmp_path / "undisturbed")
    assert saved(newest(output)) == saved(newest(tmp_path / "undisturbed"))
    assert (
        result(output)["quality"]["value"] == result(tmp_path / "undisturbed")["quality"]["value"]
    )


def test_the_last_evaluations_are_in_the_last_checkpoint(finished: Path) -> None:
    checkpoints.verify(newest(finished))
    state = folders.read_state(newest(finished))
    kept = state["progress"]["evaluations"]
    assert kept == result(finished)["evaluations"]
    assert kept[-1]["at_sample"] == state["data"]["samples"] == 4000


def test_a_run_that_has_lost_its_checkpoints_does_not_begin_again(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(output / "checkpoints")
    (output / "checkpoints").mkdir()  # where a disk is mounted
    before = snapshot(output)
    assert train(output, "--tensorboard", "--log-every", "3") == 2
    assert "a disk that is not mounted" in capsys.readouterr().err
    assert snapshot(output) == before


def test_a_run_that_ended_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    output = tmp_path / "run"
    assert train(output, "--max-steps", "2", "--checkpoint-every", "never") == 0
    (output / "checkpoints").mkdir()
    assert train(output, "--max-steps", "3") == 0
    assert [step for step, _, _ in curve(output)] == [1, 2, 3]


def test_steps_without_a_learning_rate_are_noted(tmp_path: Path) -> None:
    schedule = {"warmup-steps": "0", "decay-start": "1", "decay-steps": "2"}
    flags = [word for name, value in schedule.items() for word in (f"--schedule.{name}", value)]
    assert train(tmp_path / "run", *flags) == 0
    (note,) = [n for n in result(tmp_path / "run")["notes"] if "learning rate" in n]
    assert note.startswith(f"The learning rate was 0 in {STEPS - 3} of {STEPS} steps")


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
    began = time.perf_counter()
    assert train(output, *flags, "--target", "0.02") == 0
    more_s, again = time.perf_counter() - began, result(output)
    assert (again["quality"]["reached"], again["quality"]["at_sample"]) == (True, 1536)
    assert again["samples"] == 4000
    trained_s = found["time_s"]["train"]
    assert trained_s <= again["time_s"]["train"] <= trained_s + more_s


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        (("--lr", "0.2"), ["lr"]),
        (("--seed", "1", "--optimizer.eps", "1e-6"), ["optimizer.eps", "seed"]),
        (("--global-batch", "256"), ["global_batch"]),  # how it is laid out may change
        (("--model.bottom-output", "linear"), ["model.bottom_output"]),
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


# --- another run's weights


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


def test_the_same_command_continues_a_run_from_another(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, command = tmp_path / "run", ["--from", str(finished), "--max-steps", "1", "--lr", "0"]
    assert train(output, *command) == 0
    assert train(output, *command) == 0
    assert "is finished already" in capsys.readouterr().err
    command[3] = "2"
    assert train(output, *command, "--with-optimizer") == 2
    assert "Leave --from out to continue it" in capsys.readouterr().err
    assert train(output, *command) == 0
    assert result(output)["samples"] == 1024
    assert any(str(newest(finished)) in note for note in result(output)["notes"])
    assert train(output, *command[2:]) == 0  # without --from, too


def test_from_another_model_leaves_no_trace(finished: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    assert train(output, "--from", str(finished), "--model.table-rows", "50", "7", "4") == 2
    assert train(output, "--from", str(tmp_path / "nowhere")) == 2
    assert not output.exists()


# --- checkpoints in it


def test_checkpoints_are_kept_and_dropped(tmp_path: Path) -> None:
    flags = ("--checkpoint-every", "2 steps", "--keep-checkpoints", "3")
    assert train(tmp_path / "run", *flags) == 0
    kept = folders.all_checkpoints(tmp_path / "run" / "checkpoints")
    assert [path.name[-2:] for path in kept] == ["04", "06", "08"]
    assert train(tmp_path / "never", "--checkpoint-every", "never") == 0
    assert not (tmp_path / "never" / "checkpoints").exists()
    assert main(["evaluate", str(tmp_path / "never")]) == 2


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
