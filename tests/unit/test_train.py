"""Whole runs through the command line, in this process: where they end, and what they train on."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.small import STEPS, curve, newest, result, saved, train, write_dataset
from trainmark import workloads
from trainmark.checkpoint import checkpoints, folders
from trainmark.cli import main
from trainmark.config import TrainOptions, to_plain
from trainmark.run import result as results
from trainmark.run.run_folder import parse_config
from trainmark.verbs.flags import parse_run

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


# --- settings


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

    older = result(finished)  # of a version that knew no other end of the bottom MLP
    assert older["config"]["model"].pop("bottom_output") == "relu"
    del older["checksum"]
    assert workloads.named_run("dlrm-demo").model.bottom_output == "linear"
    path = tmp_path / "older.json"
    for content in (older, older["config"]):  # result.json and config.json
        path.write_text(json.dumps(content))
        run, _ = parse_run("train", ["dlrm-demo", "--config", str(path)], TrainOptions)
        assert to_plain(run) == result(finished)["config"]
    assert to_plain(parse_config(older["config"], path)) == result(finished)["config"]


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


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_runs(tmp_path: Path, precision: str) -> None:
    assert train(tmp_path / "run", "--precision", precision) == 0
    found = result(tmp_path / "run")
    assert found["precision"] == precision
    assert found["loss"]["last"] < 1


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


# --- numbers that are not finite


@pytest.mark.parametrize(("row", "step"), [(0, 1), (530, 6), (999, 10)])
def test_nan_in_the_data_stops_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: int, step: int
) -> None:
    folder = write_dataset(tmp_path / "data")
    set_number(folder / "train", row, np.nan)
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
    kept = folders.all_checkpoints(output / "checkpoints")
    assert [path.name for path in kept] == (["step-00000005"] if step > 5 else [])
    assert (f"the last checkpoint is {kept[0]}" if kept else "no checkpoint yet") in message
    for path in kept:
        checkpoints.verify(path)
    # Once the row is mended, the same command goes on and ends where it would have ended.
    set_number(folder / "train", row, 0.5)
    assert train(output, *flags, "--checkpoint-every", "5 steps") == 0
    assert train(tmp_path / "undisturbed", *flags) == 0
    assert saved(newest(output)) == saved(newest(tmp_path / "undisturbed"))
    assert curve(output) == curve(tmp_path / "undisturbed")


def set_number(split: Path, row: int, value: float) -> None:
    """The second of a row's three numbers."""
    numerical = np.fromfile(split / "numerical.bin", np.float16).reshape(-1, 3)
    numerical[row, 1] = value
    numerical.tofile(split / "numerical.bin")


def test_nan_in_held_out_data_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_dataset(tmp_path / "data")
    set_number(folder / "test", 123, np.inf)
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
