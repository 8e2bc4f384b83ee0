"""`trainmark evaluate` on a log whose clicks are planted, its page, and `compare` row by row."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score

from tests.small import config, result
from tests.unit.logs import prepare_log
from tests.unit.refusals import refused
from tests.unit.results import make_result
from tests.unit.without_torch import run_without_torch
from trainmark.cli import main
from trainmark.contract import Predictions
from trainmark.metrics.binary import assess
from trainmark.report import assessments, paired, reports
from trainmark.run import assessment
from trainmark.run.assessment import read_scores, write_scores
from trainmark.run.result import Result, read
from trainmark.workloads.dlrm import importance

HEADER = "clicked,user,city,price,seen"
COLUMNS = "label=clicked numerical=price categorical=user,city timestamp=seen:unix"
NETWORK = (
    *("--model.embedding-dim", "8", "--model.bottom-mlp", "16", "8", "--model.top-mlp", "16", "1"),
    *("--global-batch", "64", "--device", "cpu", "--evals-per-epoch", "1", "--lr", "0.2"),
)
ROWS = 2800  # of which the last seventh is held out


def lines(rows: int = ROWS, seed: int = 0) -> list[str]:
    """Clicks follow the user and a little the price; the city and the time tell nothing."""
    random = np.random.default_rng(seed)
    users, cities = random.integers(0, 12, rows), random.integers(0, 5, rows)
    prices = random.random(rows)
    clicks = random.random(rows) < 1 / (1 + np.exp(2 - users / 2 - prices))
    columns = zip(clicks, users, cities, prices, strict=True)
    return [
        f"{int(c)},u{u},c{v},{p:.3f},{10**9 + 977 * i}" for i, (c, u, v, p) in enumerate(columns)
    ]


def prepared(folder: Path, columns: str = COLUMNS) -> Path:
    """The folder, with log.csv and what it is prepared to, `data`."""
    (folder / "log.csv").write_text("\n".join([HEADER, *lines()]) + "\n")
    prepare_log(folder / "log.csv", folder / "data", columns=columns)
    return folder


def train(folder: Path, name: str, *flags: str) -> Path:
    given = ["--data", str(folder / "data"), "--output", str(folder / name), *NETWORK, *flags]
    assert main(["train", "dlrm-demo", *given]) == 0
    return folder / name


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with log.csv, `data`, and two runs on it."""
    folder = prepared(tmp_path_factory.mktemp("log"))
    train(folder, "run")
    train(folder, "other", "--epochs", "3")
    return folder


def copy(log: Path, to: Path) -> Path:
    shutil.copytree(log / "run", to / "run")
    return to / "run"


def evaluate(run: Path, *flags: str) -> dict[str, Any]:
    assert main(["evaluate", str(run), "--device", "cpu", *flags]) == 0
    found: dict[str, Any] = json.loads((run / "evaluation.json").read_text())
    return found


def labels(data: Path, split: str) -> np.ndarray:
    return np.fromfile(data / split / "label.bin", np.bool_)


# --- the end of a run


def test_a_result_has_all_metrics_and_the_scores_that_they_are_of(log: Path) -> None:
    found = result(log / "run")
    assert set(found["assessments"]) == {"test", "validation"}
    final = {e["split"]: e["metrics"] for e in found["evaluations"]}
    for split, assessed in found["assessments"].items():
        kept = read_scores(log / "run", split)
        assert (kept.labels == labels(log / "data", split)).all()
        assert assessed["auc"]["value"] == final[split]["auc"]
        assert assessed["log_loss"]["value"] == final[split]["log_loss"]
        assert assessed["auc"]["value"] == pytest.approx(
            roc_auc_score(kept.labels, kept.scores), abs=1e-6
        )
        assert assessed["log_loss"]["value"] == pytest.approx(
            log_loss(kept.labels, kept.scores.astype(np.float64)), abs=1e-6
        )
        assert assessed["pr_auc"] == pytest.approx(
            average_precision_score(kept.labels, kept.scores), abs=1e-6
        )
        assert assessed["rows"] == len(kept.labels) == sum(b["rows"] for b in assessed["bins"])
        assert assessed["group_auc"] is None


def test_with_patience_the_best_weights_are_assessed(log: Path) -> None:
    run = train(log, "patient", "--patience", "1", "--epochs", "8", "--lr", "0.5")
    found = result(run)
    assert found["best"]["at_sample"] < found["samples"]  # else the last ones are the best
    assert found["assessments"]["test"]["auc"]["value"] == found["quality"]["value"]
    assert found["assessments"]["validation"]["auc"]["value"] == found["best"]["value"]
    before = read_scores(run, "validation").scores
    evaluate(run)
    assert np.array_equal(before, read_scores(run, "validation").scores)


def test_results_without_assessments_are_read(tmp_path: Path) -> None:
    written = dataclasses.asdict(make_result())
    del written["assessments"]
    (tmp_path / "result.json").write_text(json.dumps(written))
    found = read(tmp_path)
    assert isinstance(found, Result)
    assert found.assessments == {}
    (tmp_path / "evaluation.json").write_text(  # as earlier versions wrote it
        json.dumps({"run": "x", "step": 1, "samples": 2, "data": "d", "splits": {"test": {}}})
    )
    assert "Predictions" not in reports.report([tmp_path]).read_text()


def test_small_predictions_keep_two_digits() -> None:
    """One click among thousands of rows: 0.0000 in every bin would say nothing."""
    logits = torch.linspace(-12, -6, 3000)
    found = assess(logits, torch.arange(3000) % 1500 == 0)
    assert found is not None
    shown = [row[0] for row in assessments.calibration_grid(found).rows]
    assert len(set(shown)) == len(found.bins) == 15
    for cell, one in zip(shown, found.bins, strict=True):
        assert float(cell) == pytest.approx(one.prediction, rel=0.06)


# --- evaluate


def test_an_evaluation_tells_what_the_run_told(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = evaluate(copy(log, tmp_path))
    assert found["assessments"] == result(log / "run")["assessments"]
    printed = capsys.readouterr().out
    for word in ("95 % interval", "pr_auc", "normalised_entropy", "Calibration on test"):
        assert word in printed
    assert f"{found['assessments']['test']['auc']['value']:.6f}" in printed
    rows, positives = len(labels(log / "data", "test")), int(labels(log / "data", "test").sum())
    assert f"test: {rows:,} rows, {positives:,} of them positive." in printed


def test_groups_of_the_dataset_give_the_auc_within_them(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, data = copy(log, tmp_path), tmp_path / "data"
    shutil.copytree(log / "data", data)
    rows = len(labels(data, "test"))
    groups = np.arange(rows, dtype=np.int32) % 9
    groups.tofile(data / "test" / "group.bin")
    found = evaluate(run, "--data", str(data))["assessments"]
    kept = read_scores(log / "run", "test")
    aucs = [roc_auc_score(kept.labels[groups == g], kept.scores[groups == g]) for g in range(9)]
    expected = np.average(aucs, weights=np.bincount(groups))
    assert found["test"]["group_auc"]["auc"]["value"] == pytest.approx(expected, abs=1e-6)
    assert found["test"]["group_auc"]["groups"] == 9
    assert found["validation"]["group_auc"] is None
    assert "group_auc" in capsys.readouterr().out
    groups[:-1].tofile(data / "test" / "group.bin")
    refused(
        capsys, ["evaluate", str(run), "--data", str(data), "--device", "cpu"], "groups of test"
    )


def test_groups_are_those_of_the_log_and_of_raw_files(log: Path, tmp_path: Path) -> None:
    shutil.copy(log / "log.csv", tmp_path)
    given = ["--input", str(tmp_path / "log.csv"), "--output", str(tmp_path / "data")]
    assert main(["prepare", "csv", *given, "--columns", COLUMNS, "--group", "city"]) == 0
    run = train(tmp_path, "run", "--max-steps", "2")
    held_out = lines()[-ROWS // 7 :]
    (tmp_path / "new.csv").write_text("\n".join([HEADER, *held_out]) + "\n")
    found = evaluate(run, "--input", str(tmp_path / "new.csv"))["assessments"]["input"]
    assert result(run)["assessments"]["test"]["group_auc"]["groups"] == 5
    cities, kept = np.array([line.split(",")[2] for line in held_out]), read_scores(run, "input")
    of = [cities == city for city in np.unique(cities)]
    aucs = [roc_auc_score(kept.labels[rows], kept.scores[rows]) for rows in of]
    expected = np.average(aucs, weights=[rows.sum() for rows in of])
    assert found["group_auc"]["auc"]["value"] == pytest.approx(expected, abs=1e-5)


def test_a_run_that_holds_training_rows_out_has_their_groups_and_takes_raw_files(
    log: Path, tmp_path: Path
) -> None:
    for name, part in (("train", lines()), ("test", lines(300, seed=3))):
        (tmp_path / f"{name}.csv").write_text("\n".join([HEADER, *part]) + "\n")
    files = [f"--{name}={tmp_path / name}.csv" for name in ("train", "test")]
    given = [*files, "--output", str(tmp_path / "data"), "--columns", COLUMNS, "--group", "city"]
    assert main(["prepare", "csv", *given]) == 0
    run = train(tmp_path, "run", "--max-steps", "2", "--validation-share", "0.25")
    groups = np.fromfile(tmp_path / "data" / "train" / "group.bin", np.int32)[-ROWS // 4 :]
    kept = read_scores(run, "validation")
    of = [groups == number for number in np.unique(groups)]
    aucs = [roc_auc_score(kept.labels[rows], kept.scores[rows]) for rows in of]
    expected = np.average(aucs, weights=[rows.sum() for rows in of])
    found = result(run)["assessments"]["validation"]["group_auc"]
    assert found["auc"]["value"] == pytest.approx(expected, abs=1e-5)
    raw = evaluate(run, "--input", str(tmp_path / "test.csv"))
    assert raw["splits"] == {"input": result(run)["evaluations"][-2]["metrics"]}


def test_importance_is_the_auc_that_a_permuted_column_costs(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importance, "REPEATS", 2)
    run = copy(log, tmp_path)
    found = evaluate(run, "--importance")
    drops = {column["column"]: column for column in found["importance"]}
    assert list(drops) == sorted(drops, key=lambda name: -drops[name]["drop"])
    assert set(drops) == {"price", "user", "city", "seen"}  # not the hour and the weekday of a time
    assert drops["user"]["drop"] > 0.1
    assert abs(drops["city"]["drop"]) < 0.03
    assert all(column["error"] for column in found["importance"])  # its formula has a test
    assert "What each column is worth" in capsys.readouterr().out
    # The same, with the column permuted on disk.
    usual = found["assessments"]["test"]["auc"]["value"]
    cost = []
    for repeat in range(2):
        data = tmp_path / f"data{repeat}"
        shutil.copytree(log / "data", data)
        users = np.fromfile(data / "test" / "cat_0.bin", np.int8)
        order = np.random.default_rng((0, repeat)).permutation(len(users))
        users[order].tofile(data / "test" / "cat_0.bin")
        (data / "checksums.json").unlink()
        permuted = evaluate(run, "--data", str(data))
        cost.append(usual - permuted["assessments"]["test"]["auc"]["value"])
    assert drops["user"]["drop"] == pytest.approx(np.mean(cost), abs=1e-12)


def test_importance_on_some_rows_takes_them_from_everywhere(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importance, "REPEATS", 1)
    monkeypatch.setattr(importance, "STRETCHES", 4)
    seen: list[Any] = []
    usual = importance._placements

    def noted(trainer: Any, split: str, rows: Any) -> Any:
        seen.append(rows)
        return usual(trainer, split, rows)

    monkeypatch.setattr(importance, "_placements", noted)
    evaluate(copy(log, tmp_path), "--importance", "--importance-rows", "40")
    all_labels = labels(log / "data", "test")
    starts = [len(all_labels) * part // 4 for part in range(4)]
    expected = np.concatenate([all_labels[start : start + 10] for start in starts])
    assert (seen[0].labels == expected).all()


def test_what_was_made_of_a_column_is_one_column() -> None:
    dataset = (
        "numerical log - - price",
        "numerical standard - 0123456789abcdef age",
        "numerical standard - 0123456789abcdef age.missing",
        "categorical int64 57 8f3c21aa90b1c4de user",
        "categorical bins 11 8f3c21aa90b1c4df age.bin",
        "categorical string 9 8f3c21aa90b1c4d0 odd.bin",
        "categorical timestamp 25 8f3c21aa90b1c4d1 seen.hour",
        "categorical timestamp 8 8f3c21aa90b1c4d2 seen.weekday",
    )
    cfg = dataclasses.replace(config(), dataset=dataset)
    found = {c.name: (c.numerical, c.categorical) for c in importance.model_inputs(cfg)}
    assert found == {
        "price": ([0], []),
        "age": ([1, 2], [1]),
        "user": ([], [0]),
        "odd.bin": ([], [2]),
        "seen": ([], [3, 4]),
    }


def test_few_rows_for_importance_are_refused(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["evaluate", str(log / "run"), "--importance", "--importance-rows", "1"]
    refused(capsys, arguments, "--importance-rows must be at least 2")


# --- raw files


def test_raw_files_are_scored_as_the_rows_that_were_prepared(log: Path, tmp_path: Path) -> None:
    """The held-out rows of the log, in two files, have the scores that they had in the dataset."""
    run, split = (
        copy(log, tmp_path),
        {s: read_scores(log / "run", s) for s in ("test", "validation")},
    )
    held_out = lines()[-ROWS // 7 :]
    half = len(split["test"].labels)
    for name, part in (("day_1.csv", held_out[:half]), ("day_2.csv", held_out[half:])):
        (tmp_path / name).write_text("\n".join([HEADER, *part]) + "\n")
    found = evaluate(run, "--input", str(tmp_path / "day_1.csv"), str(tmp_path / "day_2.csv"))
    kept = read_scores(run, "input")
    np.testing.assert_array_equal(kept.labels, np.concatenate([s.labels for s in split.values()]))
    np.testing.assert_allclose(
        kept.scores, np.concatenate([s.scores for s in split.values()]), rtol=1e-6
    )
    assert found["splits"]["input"]["auc"] == pytest.approx(
        roc_auc_score(kept.labels, kept.scores), abs=1e-6
    )
    assert found["data"] == f"{tmp_path / 'day_1.csv'} {tmp_path / 'day_2.csv'}"
    assert not list(run.glob(".input*"))
    assert (run / "scores" / "test.npy").read_bytes() == (
        log / "run" / "scores" / "test.npy"
    ).read_bytes()


def test_what_the_model_does_not_know_in_raw_files_is_told(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, rows = copy(log, tmp_path), lines(40, seed=5)
    rows[:10] = [row.replace(",u", ",new") for row in rows[:10]]
    (tmp_path / "new.csv").write_text("\n".join([HEADER, *rows]) + "\n")
    found = evaluate(run, "--input", str(tmp_path / "new.csv"))
    assert found["unknown_share"]["user"] == 0.25
    assert found["unknown_share"]["city"] == 0.0
    assert "25.0%" in capsys.readouterr().out


def test_raw_files_that_cannot_be_evaluated_are_refused(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, rows = copy(log, tmp_path), lines(20)
    ask = ["evaluate", str(run), "--device", "cpu", "--input", str(tmp_path / "new.csv")]
    refused(capsys, ask, "No file matches --input")
    (tmp_path / "new.csv").write_text("user,city,price,seen\nu1,c1,0.5,1000000000\n")
    refused(capsys, ask, "no column 'clicked'")
    refused(capsys, [*ask, "--data", str(log / "data")], "--input or --data")
    rows[3] = rows[3].replace(rows[3][:2], ",", 1)
    (tmp_path / "new.csv").write_text("\n".join([HEADER, *rows]) + "\n")
    assert main(ask) == 2
    message = capsys.readouterr().err
    assert "new.csv:5: clicked is missing" in message
    assert "--bad-rows skip" in message
    assert evaluate(run, *ask[4:], "--bad-rows", "skip")["bad_rows"] == 1
    assert len(read_scores(run, "input").labels) == 19


# --- devices


def test_a_full_device_leaves_the_assessment_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Predictions(logits=torch.randn(50), labels=torch.rand(50) < 0.5)
    expected = assess(made.logits, made.labels)
    calls = []

    def on_a_full_device(*rows: Any) -> Any:
        calls.append(rows)
        if len(calls) == 1:
            raise torch.OutOfMemoryError
        return assess(*rows)

    monkeypatch.setattr(assessment, "assess", on_a_full_device)
    assert assessment._assess(made, None) == expected
    assert len(calls) == 2


def test_a_page_is_made_without_torch(log: Path) -> None:
    run_without_torch(["report", str(log / "run")])


# --- the page


def test_the_page_draws_what_was_found(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importance, "REPEATS", 1)
    run = copy(log, tmp_path)
    page = reports.report([run]).read_text()
    assert page.count("<h2>Predictions</h2>") == 1
    assert "share of positives over mean prediction" in page
    assert "What each column is worth" not in page
    evaluate(run, "--importance")
    page = reports.report([run]).read_text()
    assert page.count("<h2>Predictions") == 1  # the same numbers are not shown twice
    assert "<h2>What each column is worth</h2>" in page
    assert ">seen</span>" in page
    (tmp_path / "new.csv").write_text("\n".join([HEADER, *lines(50, seed=6)]) + "\n")
    evaluate(run, "--input", str(tmp_path / "new.csv"))
    assert "new.csv</h2>" in reports.report([run]).read_text()
    several = reports.report([run, log / "other"], tmp_path / "both.html").read_text()
    assert several.count("<td>normalised_entropy</td>") == 2


# --- compare


def rewrite(run: Path, scores: np.ndarray, labels: np.ndarray) -> None:
    """Other scores for a run's test split."""
    logits = torch.logit(torch.from_numpy(scores.copy()))
    made = Predictions(logits=logits, labels=torch.from_numpy(labels))
    write_scores(run, {"test": made}, most=len(labels), samples=1, data=None)


def test_compare_pairs_the_scores_of_every_split(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid, left_out = paired.paired_differences(log / "run", log / "other")
    assert left_out == []
    assert [row[:2] for row in grid.rows] == [
        [split, metric] for split in ("test", "validation") for metric in ("auc", "log_loss")
    ]
    a, b = (read_scores(log / name, "test") for name in ("run", "other"))
    more = roc_auc_score(b.labels, b.scores) - roc_auc_score(a.labels, a.scores)
    assert float(grid.rows[0][2]) == pytest.approx(more, abs=1e-6)
    more = log_loss(b.labels, b.scores.astype(float)) - log_loss(a.labels, a.scores.astype(float))
    assert float(grid.rows[1][2]) == pytest.approx(more, abs=1e-6)
    assert main(["compare", str(log / "run"), str(log / "other")]) == 0
    assert "On the same rows" in capsys.readouterr().out


def test_compare_leaves_out_what_is_not_of_the_same_rows(log: Path, tmp_path: Path) -> None:
    other = copy(log, tmp_path)
    kept = read_scores(other, "test")
    rewrite(other, kept.scores, ~kept.labels)
    (other / "scores" / "validation.json").unlink()
    grid, left_out = paired.paired_differences(log / "run", other)
    assert grid.rows == []
    assert f"{len(kept.labels):,} of {len(kept.labels):,} labels differ" in left_out[0]
    assert "has no scores for it; trainmark evaluate writes them" in left_out[1]


def test_scores_of_0_and_1_have_a_finite_loss(log: Path, tmp_path: Path) -> None:
    other = copy(log, tmp_path)
    labels = read_scores(other, "test").labels
    rewrite(other, labels[::-1].astype(np.float32), labels)
    assert set(read_scores(other, "test").scores) == {0.0, 1.0}
    grid, _ = paired.paired_differences(log / "run", other)
    assert np.isfinite(float(grid.rows[1][2]))
