"""`train --from` onto data that extend a run's: old rows are taken over, new ones begin as new."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import small
from tests.unit.refusals import refused
from trainmark import workloads
from trainmark.checkpoint import checkpoints
from trainmark.checkpoint.local_shards import LocalShard, LocalShards, first_rows
from trainmark.checkpoint.run_tensors import stored_tensors
from trainmark.cli import main
from trainmark.config import TrainOptions
from trainmark.distributed.mesh import single
from trainmark.run import start
from trainmark.run.loop import Training
from trainmark.run.run_folder import find_checkpoint, parse_config
from trainmark.verbs.flags import parse_run

ROWS = 12000
COLUMNS = "label=click numerical=age categorical=user,item"
FLAGS = [
    *("--device", "cpu", "--global-batch", "64", "--evals-per-epoch", "0", "--log-every", "1000"),
    *("--model.embedding-dim", "8", "--model.bottom-mlp", "16", "8", "--model.top-mlp", "32", "1"),
]


def write_weeks(folder: Path, rows: int, seed: int) -> None:
    """Clicks of users on items, by effects of both and a product of hidden vectors. The second week
    has users and items that the first has not, and lacks others; the third is like the second."""
    random = np.random.default_rng(seed)
    users, items = rows // 80, rows // 200
    effects = [random.normal(0, 0.8, count) for count in (users, items)]
    vectors = [random.normal(0, 0.6, (count, 3)) for count in (users, items)]
    for week, (first, last) in enumerate([(0.0, 0.8), (0.2, 1.0), (0.2, 1.0)], 1):
        user, item = (
            (count * (first + (last - first) * random.power(2, rows))).astype(int)
            for count in (users, items)
        )
        age = random.normal(0, 1, rows)
        logit = effects[0][user] + effects[1][item] + (vectors[0][user] * vectors[1][item]).sum(1)
        click = random.random(rows) < 1 / (1 + np.exp(1 - logit - age / 2))
        lines = [
            f"{int(c)},{a:.3f},u{u},i{i}" for c, a, u, i in zip(click, age, user, item, strict=True)
        ]
        (folder / f"{week}.csv").write_text("\n".join(["click,age,user,item", *lines]) + "\n")


def prepare(folder: Path, name: str, files: str, *flags: str) -> None:
    inputs = [str(folder / f"{week}.csv") for week in files]
    shared = ["--output", str(folder / name), "--vocabulary-from", "train"]
    assert main(["prepare", "csv", "--input", *inputs, *shared, *flags]) == 0


@pytest.fixture(scope="module")
def weeks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Datasets week1, week2 (which extends it) and both, all with the third week held out; and the
    run of week1."""
    folder = tmp_path_factory.mktemp("weeks")
    write_weeks(folder, ROWS, seed=0)
    prepare(folder, "week1", "13", "--columns", COLUMNS)
    prepare(folder, "week2", "23", "--vocabulary", str(folder / "week1"), "--grow")
    prepare(folder, "both", "123", "--columns", COLUMNS)
    train(folder, "run1", "week1")
    return folder


def train(folder: Path, name: str, data: str, *flags: str) -> float:
    """The AUC on the third week."""
    words = [*FLAGS, "--data", str(folder / data), "--output", str(folder / name), *flags]
    assert main(["train", "dlrm-demo", *words]) == 0
    value: float = small.result(folder / name)["quality"]["value"]
    return value


def test_two_weeks_one_after_the_other_teach_what_both_at_once_do(weeks: Path) -> None:
    taken = ["--from", str(weeks / "run1"), "--with-optimizer"]
    then = train(weeks, "then", "week2", *taken)
    assert then >= train(weeks, "at once", "both") - 0.002
    assert then > train(weeks, "alone", "week2") + 0.004
    (note,) = [n for n in small.result(weeks / "then")["notes"] if "Started from" in n]
    assert note.startswith("Started from the weights and optimiser state of ")
    assert note.endswith(", and new rows in 2 tables.")


def test_a_run_that_is_taken_on_is_one_that_never_ended(weeks: Path) -> None:
    """Two epochs in one run, or a run each: where the schedule is flat, the same weights, bit for
    bit. So what two weeks lack that both at once have is for the schedule, which ends twice."""
    flat = ["--schedule.warmup-steps", "0", "--schedule.decay-start", "9999"]
    flat += ["--schedule.decay-steps", "1"]
    train(weeks, "whole", "week1", *flat, "--epochs", "2")
    train(weeks, "first half", "week1", *flat)
    taken = ["--from", str(weeks / "first half"), "--with-optimizer"]
    train(weeks, "second half", "week1", *flat, *taken)
    whole, parts = (
        {name: array for name, array in small.saved(small.newest(weeks / run)).items()
         if name.startswith(("model.", "trainer."))}
        for run in ("whole", "second half")
    )  # fmt: skip
    assert len(whole) > 10
    assert whole == parts
    assert whole != small.saved(small.newest(weeks / "first half"))


def test_the_weights_to_begin_with_may_stay_the_best(
    weeks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then the run ends with them, or says that they were better; it goes on from them, and if they
    are gone."""
    first = tmp_path / "first"
    shutil.copytree(weeks / "run1", first)
    onto = ["--from", str(first), "--lr", "9", "--max-steps", "12", "--evals-per-epoch", "40"]
    patient = [*onto, "--patience", "3", "--target", "0.6"]
    train(weeks, "kept", "week2", *patient)
    kept, curve = small.result(weeks / "kept"), small.curve(weeks / "kept")
    shutil.rmtree(small.newest(weeks / "kept"))  # as one that was killed before its first step
    (weeks / "kept" / "result.json").unlink()
    train(weeks, "kept", "week2", *patient)
    assert small.curve(weeks / "kept") == curve
    assert small.result(weeks / "kept")["best"] == kept["best"]
    assert kept["quality"]["reached"]
    assert kept["best"]["at_sample"] == 0
    assert kept["quality"]["value"] > 0.6
    assert find_checkpoint(weeks / "kept").name == "step-00000000"
    assert "No step improved the weights" in "".join(kept["warnings"])
    last = train(weeks, "last", "week2", *onto, "--target", "0.6")
    assert not small.result(weeks / "last")["quality"]["reached"]  # but by what it began with
    (before, *_) = [e for e in small.result(weeks / "last")["evaluations"] if e["split"] == "test"]
    assert before["at_sample"] == 0
    assert before["metrics"]["auc"] == pytest.approx(kept["quality"]["value"])
    assert before["metrics"]["auc"] > last
    assert "that the run began with were better" in "".join(
        small.result(weeks / "last")["warnings"]
    )
    first.rename(tmp_path / "moved")
    train(weeks, "last", "week2", *onto, "--max-steps", "15")
    assert small.result(weeks / "last")["steps"]["all"] == 15
    assert any(n.startswith("Started from ") for n in small.result(weeks / "last")["notes"])
    shared = [*FLAGS, "--data", str(weeks / "week2"), "--output", str(weeks / "last"), *onto]
    other = ["train", "dlrm-demo", *shared, "--from", str(tmp_path / "other")]
    refused(capsys, other, "other does not exist")


# --- what a run begins with


def begun(weeks: Path, tmp_path: Path, *flags: str, taken: Path | None) -> Training:
    """A run on week 2, before its first step."""
    words = ["dlrm-demo", *FLAGS, "--data", str(weeks / "week2"), *flags]
    cfg, _ = parse_run("train", words, TrainOptions)
    cfg = workloads.resolve(cfg, small.ONE_CPU)
    options = TrainOptions(weights_from=taken, with_optimizer=taken is not None)
    training = Training(
        cfg,
        workloads.load("dlrm"),
        single(small.CPU),
        tmp_path / "run",
        started=time.perf_counter(),
        start=start.find(options, cfg, tmp_path / "run"),
    )
    training.set_up()
    return training


def tensors(training: Training) -> dict[str, Tensor]:
    """Weights and optimiser state, whole."""
    found: dict[str, Any] = stored_tensors(training.trainer)
    return {
        name: torch.cat([shard.tensor for shard in tensor.shards])
        if isinstance(tensor, LocalShards)
        else tensor
        for name, tensor in found.items()
    }


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--optimizer.name", "adam"),
        ("--force-exchange",),
        ("--table-precision", "int8", "--fp32-up-to-rows", "0"),
    ],
    ids=lambda flags: " ".join(flags) or "default",
)
def test_old_rows_are_taken_over_and_new_ones_begin_as_new(
    weeks: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    first = weeks / "run1"
    if flags:
        first = weeks / "_".join(["run1", *flags]).replace("-", "")
        train(weeks, first.name, "week1", "--max-steps", "3", *flags)
    stored = checkpoints.read(small.newest(first), checkpoints.names(small.newest(first)))
    fresh = tensors(begun(weeks, tmp_path, *flags, taken=None))
    found = tensors(begun(weeks, tmp_path, *flags, taken=first))
    assert found.keys() == fresh.keys() == stored.keys()
    grown = 0
    for name, tensor in found.items():
        before = stored[name]
        if tensor.dim() == 0 or len(tensor) == len(before):
            assert torch.equal(tensor, before), name
            continue
        grown += 1
        assert name.split(".")[1] == "tables"
        assert len(tensor) > len(before)
        assert torch.equal(tensor[: len(before)], before), name
        assert torch.equal(tensor[len(before) :], fresh[name][len(before) :]), name
        assert not torch.equal(tensor, fresh[name])
    assert grown >= 4  # weights and state of two tables


def test_the_first_rows_of_local_shards() -> None:
    whole = torch.arange(24.0).view(6, 4)
    shards = [
        LocalShard(offsets=(0, 0), tensor=whole[:2]),
        LocalShard(offsets=(2, 2), tensor=whole[2:5, 2:]),
        LocalShard(offsets=(5, 0), tensor=whole[5:]),
    ]
    cut = first_rows(LocalShards((6, 4), shards), 3)
    assert cut.shape == (3, 4)
    assert [shard.offsets for shard in cut.shards] == [(0, 0), (2, 2)]
    assert torch.equal(cut.shards[1].tensor, whole[2:3, 2:])
    cut.shards[1].tensor.zero_()
    assert whole[2, 2:].tolist() == [0, 0]  # the same memory
    assert first_rows(LocalShards((6, 4), shards[2:]), 3) is None


# --- refusals


def test_what_does_not_go_together(
    weeks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "dlrm-demo", *FLAGS, "--output", str(tmp_path / "run")]
    first, second = str(weeks / "week1"), str(weeks / "week2")
    onto = [*command, "--data", second, "--from", str(weeks / "run1")]
    refused(capsys, [*command, "--data", second, "--with-optimizer"], "needs --from RUN")
    message = refused(capsys, [*onto, "--with-optimizer", "--optimizer.name", "adam"])
    assert "was trained with another optimiser or precision; it has no trainer." in message
    refused(capsys, [*onto, "--model.bottom-mlp", "32", "8"], "tensor 'model.bottom.0", lines=None)
    message = (
        "The weights to begin with were trained with model.bottom_output linear. Received: relu."
    )
    refused(capsys, [*onto, "--model.bottom-output", "relu"], message)
    other = [*command, "--data", str(weeks / "both"), "--from", str(weeks / "run1")]
    refused(capsys, other, "both is not what the model was trained on: its ")
    if not (weeks / "run2").exists():
        train(weeks, "run2", "week2", "--max-steps", "2")
    back = [*command, "--data", first, "--from", str(weeks / "run2")]
    refused(capsys, back, "its categorical column 'user' has another vocabulary")
    assert not (tmp_path / "run").exists()


def test_a_run_of_unknown_data_does_not_grow(
    weeks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one of an earlier version: its ids may stand for anything."""
    path = small.newest(weeks / "run1")
    state = json.loads((path / "manifest.json").read_text())["state"]
    cfg = parse_config({**state["config"], "dataset": []}, path)
    assert workloads.definition(cfg).grown_tables(cfg, str(weeks / "week2")) == {}
