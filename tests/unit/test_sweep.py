"""`sweep`: a grid or a search, of runs that fail, are stopped, are killed, or are ended early."""

import dataclasses
import html
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import small
from tests.unit.refusals import refused
from tests.unit.results import make_result
from trainmark import metrics
from trainmark.cli import main
from trainmark.errors import InputError
from trainmark.report.sweep_page import SweptField, SweptRun, importance
from trainmark.run.result import Best, Evaluation
from trainmark.verbs import attempt, sweep_trials
from trainmark.verbs.sweep_space import Field, grid, label, parse_over, words

RUN = [
    *("--synthetic-rows", "3000", "--synthetic-ids", "planted", "--device", "cpu"),
    *("--model.embedding-dim", "4", "--model.bottom-mlp", "8", "4", "--model.top-mlp", "8", "1"),
    *("--model.table-rows", "50", "7", "3", "--checkpoint-every", "never", "--warmup-clock", "1"),
    *("--global-batch", "256"),
]


def sweep_of(output: Path, *flags: str) -> int:
    return main(["sweep", "dlrm-demo", *RUN, "--output", str(output), *flags])


def known(output: Path) -> list[dict[str, Any]]:
    trials: list[dict[str, Any]] = json.loads((output / "sweep.json").read_text())["trials"]
    return trials


# --- what to vary


def test_over() -> None:
    assert parse_over(["micro_batch=1,2, 2"]) == [Field(name="micro-batch", choices=("1", "2"))]
    ranges = parse_over(["lr=1e-3..1:log", "epochs=1..10", "model.top_mlp=64 1,32 16 1"])
    assert ranges[0] == Field(name="lr", low=1e-3, high=1.0, log=True)
    assert ranges[1] == Field(name="epochs", low=1, high=10, whole=True)
    assert ranges[2].choices == ("64 1", "32 16 1")
    assert words({"model.top-mlp": "64 1", "lr": "0.1"}) == [
        "--model.top-mlp",
        "64",
        "1",
        "--lr",
        "0.1",
    ]
    for bad in ([], [""], ["parallel"], ["=1"], ["parallel="]):
        with pytest.raises(InputError, match="--over must be FIELD=V1,V2"):
            parse_over(bad)
    for wrong in ("lr=1..0.1", "lr=0..1:log", "lr=1..1e400"):
        with pytest.raises(InputError, match="from a smaller number to a larger one"):
            parse_over([wrong])
    with pytest.raises(InputError, match="names lr twice"):
        parse_over(["lr=1,2", "lr=3"])


def test_numbers_of_a_range_are_short_and_within_it() -> None:
    (field,) = parse_over(["lr=0.001234567..0.1234567"])
    for value in np.random.default_rng(0).uniform(field.low, field.high, 200):
        assert field.low <= float(field.text(value)) <= field.high
        assert float(field.text(value)) == pytest.approx(value, rel=1e-3)
    assert [float(end) for end in field.ends] == pytest.approx([field.low, field.high], rel=1e-3)


def test_a_grid_has_every_combination() -> None:
    found = grid(parse_over(["lr=1,2", "seed=0,1,2"]))
    assert [label(values) for values in found] == [
        f"lr={lr},seed={seed}" for lr in "12" for seed in "012"
    ]
    with pytest.raises(InputError, match="a range is for a search"):
        grid(parse_over(["lr=1..2"]))


def test_a_sweep_needs_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--over", "micro_batch=4", "--devices", "0", "--output", str(tmp_path / "s")]
    assert main(["sweep", "llama3-demo", *flags]) == 2
    assert "devices must be at least 1. Received: 0." in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_a_dry_sweep_marks_what_does_not_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    splits = "parallel=PP2DP4TP1,PP1DP8TP1,PP3DP1TP1"
    flags = ["--dry-run", "--cluster", "a100-80gx1x8"]
    assert main(["sweep", "llama3-8b", "--over", splits, *flags]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[1]: line for line in out.splitlines() if line.startswith("│")}
    assert "/80" in rows["PP2DP4TP1"]
    assert "OOM" not in rows["PP2DP4TP1"]
    assert "OOM" in rows["PP1DP8TP1"]  # as published
    assert rows["PP3DP1TP1"].count(" / ") == 5
    reason = " ".join(out.split("└")[1].split())
    assert "parallel PP3DP1TP1: parallel PP3DP1TP1 needs 3 x 1 x 1 = 3 devices" in reason


def test_a_sweep_goes_on_after_a_failure_and_after_a_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    started = []

    def start(command: list[str], log: Path) -> subprocess.CompletedProcess[str]:
        """`train` in this process; a micro-batch of 8 does not fit."""
        arguments = command[command.index("train") :]
        started.append(arguments[arguments.index("--micro-batch") + 1])
        if started[-1] == "8":
            sentence = "trainmark: Out of memory (CUDA out of memory). Use a smaller micro_batch."
            return subprocess.CompletedProcess(command, 2, sentence)
        if started[-1] == "2":
            return subprocess.CompletedProcess(command, 1, "[rank0]: the cause\n======")
        said = "step 1\ntrainmark: 2 problems:\n- [5] is odd\n- it is\ntrainmark: rank 0 ended"
        return subprocess.CompletedProcess(command, main(arguments), said)

    monkeypatch.setattr(attempt, "_start", start)
    flags = ["--max-steps", "2", "--device", "cpu", "--evals-per-epoch", "0", "--warmup-clock", "0"]
    flags += ["--checkpoint-every", "never", "--output", str(tmp_path / "s"), "--isolate"]
    assert main(["sweep", "llama3-demo", "--over", "micro_batch=4,8", *flags]) == 0
    capsys.readouterr()
    assert main(["sweep", "llama3-demo", "--over", "micro_batch=4,8,16,5,2", *flags]) == 0
    assert started == ["4", "8", "16", "5", "2"]  # what is known is not run again
    out = capsys.readouterr().out
    table = {line.split()[1]: line for line in out.splitlines() if line.startswith("│")}
    outcomes = {value: table[value].split()[3] for value in started}
    assert outcomes == {"4": "done", "8": "OOM", "16": "done", "5": "failed", "2": "failed"}
    assert "llama3-demo" in table["16"]
    assert "micro-batch 5: 2 problems:\n- [5] is odd\n- it is\n" in out
    log = tmp_path / "s" / "micro-batch=2.log"
    assert f"micro-batch 2: ended with exit code 1, see {log}" in out
    assert main(["sweep", "llama3-demo", "--over", "lr=1", *flags]) == 2


# --- in one process


def test_a_grid_in_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    output = tmp_path / "grid"
    over = ("--over", "lr=0.1,1e9", "optimizer.name=sgd,adagrad")
    assert sweep_of(output, *over, "--log-every", "1") == 0
    printed = capsys.readouterr().out
    trials = {trial["folder"]: trial for trial in known(output)}
    assert set(trials) == {
        f"lr={lr},optimizer.name={n}" for lr in ("0.1", "1e9") for n in ("sgd", "adagrad")
    }
    alone = tmp_path / "alone"
    assert main(["train", "dlrm-demo", *RUN, "--lr", "0.1", "--output", str(alone)]) == 0
    found = small.result(output / "lr=0.1,optimizer.name=adagrad")
    assert found["loss"] == small.result(alone)["loss"]
    validation = [e for e in small.result(alone)["evaluations"] if e["split"] == "validation"]
    assert trials["lr=0.1,optimizer.name=adagrad"]["value"] == validation[-1]["metrics"]["auc"]
    # With such a rate a run diverges: it alone fails, and below the table stands why.
    words_printed = " ".join(printed.split())
    for name, trial in trials.items():
        assert trial["outcome"] == ("failed" if "1e9" in name else "done")
        told = name.replace("=", " ").replace(",", ", ")
        assert (f"{told}: {' '.join(trial['reason'].split())}" in words_printed) == ("1e9" in name)
        assert ("not finite" in trial["reason"]) == ("1e9" in name)
    table = [line.split() for line in printed.splitlines() if " done " in line]
    values = [float(row[3]) for row in table]
    assert len(values) == 2
    assert values == sorted(values, reverse=True)
    page = (output / "sweep.html").read_text()
    assert page.count("<figure>") == 4  # a chart for each field, and two of the best runs' learning
    for word in ("Best runs", "Each field", "optimizer.name", "lr 0.1, optimizer.name adagrad"):
        assert word in page
    over = ("--over", "lr=0.1", "optimizer.name=sgd,adagrad")
    assert sweep_of(output, *over, "--log-every", "1") == 0
    again = (output / "sweep.html").read_text()
    assert again.count("<figure>") == 3  # lr has one value now, which is no chart
    best = max((t["value"], t["folder"]) for t in trials.values() if t["outcome"] == "done")[1]
    estimate = small.result(output / best)["assessments"]["validation"]["auc"]
    between = re.search(r"best run's (\S+) may be (\S+) to (\S+) \(95 %\)", html.unescape(page))
    assert between is not None
    told = [float(number) for number in between.groups()]
    assert told == pytest.approx([estimate[key] for key in ("value", "low", "high")], abs=5e-3)


def test_one_bad_value_is_refused_before_the_first_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--output", str(tmp_path / "s")]
    for over, message in (
        (["--over", "lr=0.1,red"], "red"),
        (["--over", "learning=0.1"], "--learning"),
        (["--over", "lr=0.1..1"], "a range is for a search"),
        (["--over", "lr=0.1", "--repeats", "2"], "sweep over seed=0,1,2 instead"),
        (["--over", "lr=0.1", "--trials", "0"], "trials must be at least 1"),
    ):
        refused(capsys, ["sweep", "dlrm-demo", *RUN, *output, *over], message, lines=None)
    assert not (tmp_path / "s").exists()


# --- a search

SEARCH = (
    *("--over", "lr=0.001..1:log", "optimizer.name=sgd,adagrad", "global_batch=64..512:log"),
    *("--trials", "6", "--evals-per-epoch", "4"),
)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("optuna")
    output = tmp_path_factory.mktemp("search") / "s"
    assert sweep_of(output, *SEARCH) == 0
    return output


def test_a_search_tries_values_of_its_space_and_ends_the_poor_ones(searched: Path) -> None:
    trials = known(searched)
    assert [trial["folder"] for trial in trials] == [f"trial-{n:03d}" for n in range(6)]
    for number, trial in enumerate(trials):
        values, folder = trial["values"], searched / trial["folder"]
        assert 0.001 <= float(values["lr"]) <= 1
        assert 64 <= int(values["global-batch"]) <= 512
        assert values["optimizer.name"] in ("sgd", "adagrad")
        if trial["outcome"] == "done":
            config = small.result(folder)["config"]
            assert config["lr"] == float(values["lr"])
            assert config["global_batch"] == int(values["global-batch"])
            continue
        # Its last evaluation is below the median of those before it at the same place.
        assert trial["outcome"] == "pruned"
        assert number >= 4
        place = len(trial["evaluations"]) - 1
        others = [t["evaluations"][place] for t in trials[:number] if len(t["evaluations"]) > place]
        best = max(trial["evaluations"])
        assert best < np.median(others)
        assert not (folder / "result.json").exists()
    assert len({json.dumps(trial["values"]) for trial in trials}) == 6
    assert "pruned" in {trial["outcome"] for trial in trials}


@pytest.mark.usefixtures("searched")
def test_the_same_search_does_nothing_and_more_trials_go_on(
    searched: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (searched / "sweep.json").read_text()
    assert sweep_of(searched, *SEARCH) == 0
    assert (searched / "sweep.json").read_text() == before
    command = ["sweep", "dlrm-demo", *RUN, "--output", str(searched)]
    refused(capsys, [*command, "--over", "lr=0.001..2:log", "--trials", "3"], "holds another sweep")
    assert (searched / "sweep.json").read_text() == before
    (searched / "sweep.json").write_text(before.replace("trial-000", "trial-009", 1))
    refused(capsys, [*command, *SEARCH], "sweep.json is not as it was written")
    (searched / "sweep.json").write_text(before)


KILLED = """
import os, signal, sys
from trainmark.cli import main
from trainmark.verbs import sweep_trials

def write(output, identity, trials, write=sweep_trials.write):
    write(output, identity, trials)
    if len(trials) == 3:
        os.kill(os.getpid(), signal.SIGKILL)

sweep_trials.write = write
main(sys.argv[1:])
"""


def test_a_killed_search_goes_on_as_it_would_have(searched: Path, tmp_path: Path) -> None:
    output = tmp_path / "killed"
    command = [sys.executable, "-c", KILLED, "sweep", "dlrm-demo", *RUN, *SEARCH]
    ended = subprocess.run([*command, "--output", str(output)], capture_output=True)
    assert ended.returncode == -signal.SIGKILL
    assert len(known(output)) == 3
    assert sweep_of(output, *SEARCH) == 0
    assert known(output) == known(searched)


def test_a_search_without_optuna(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainmark.errors.find_spec", lambda name: None)
    command = ["sweep", "dlrm-demo", *RUN, *SEARCH, "--output", str(tmp_path / "s")]
    refused(capsys, command, "pip install 'trainmark[search]'")
    assert not (tmp_path / "s").exists()


# --- what is compared, and what mattered


def test_runs_are_compared_on_validation_where_there_is_one() -> None:
    both = make_result()
    assert sweep_trials.judged_split(both) == "validation"
    assert sweep_trials.judged(both) == both.evaluations[-1].metrics["auc"]
    test = dataclasses.replace(both, evaluations=both.evaluations[::2])
    assert sweep_trials.judged_split(test) == "test"
    assert sweep_trials.judged(test) == test.evaluations[-1].metrics["auc"]
    assert len(sweep_trials.during(both)) == 9  # the last is after the last step
    at = both.evaluations[3]
    best = Best(step=1, at_sample=at.at_sample, split="validation", metric="auc", value=0.7)
    chosen = dataclasses.replace(both, best=best)
    assert sweep_trials.judged(chosen) == at.metrics["auc"]
    undefined = Evaluation(at_sample=5, split="test", metrics={"auc": None}, seconds=1)
    assert sweep_trials.values_of([undefined], "auc") == []


def test_the_explained_share_is_that_of_an_analysis_of_variance() -> None:
    from scipy.stats import f_oneway

    random = np.random.default_rng(1)
    groups = [list(random.normal(mean, 1, count)) for mean, count in ((0, 8), (1, 5), (3, 6))]
    found, between, within = f_oneway(*groups).statistic, 2, 16
    eta = found * between / (found * between + within)
    expected = 1 - (1 - eta) * (between + within) / within
    assert metrics.explained_share(groups) == pytest.approx(expected)
    assert metrics.explained_share([[1.0], [2.0]]) is None
    assert metrics.explained_share([[1.0, 2.0]]) is None
    assert metrics.explained_share([[1.0, 1.0], [1.0]]) == 0


def test_what_mattered() -> None:
    random = np.random.default_rng(0)
    rates = 10 ** random.uniform(-3, 0, 40)
    names = random.choice(["sgd", "adagrad"], 40)
    runs = [
        SweptRun(
            folder=Path("x"),
            values={"lr": str(rate), "optimizer": name},
            outcome="done",
            value=0.7 + 0.02 * np.log10(rate) + 0.002 * random.normal(),
        )
        for rate, name in zip(rates, names, strict=True)
    ]
    rate, name = (
        SweptField(name="lr", log=True),
        SweptField(name="optimizer", choices=("sgd", "adagrad")),
    )
    assert importance(rate, runs) == pytest.approx(0.9, abs=0.1)
    assert importance(name, runs) == pytest.approx(0, abs=0.15)
    assert importance(rate, runs[:8]) is None  # too few to tell
