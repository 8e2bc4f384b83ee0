"""dlrm-auto: what it chooses by a log's rows, what stays as it was given, and what it learns."""

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import OneHotEncoder

from tests.small import CPU, ONE_CPU, result, write_dataset
from trainmark import checksums, workloads
from trainmark.cli import main
from trainmark.clicklog.engine import summary
from trainmark.config import TrainOptions, to_plain
from trainmark.distributed.mesh import single
from trainmark.errors import InputError
from trainmark.run.result import Best
from trainmark.run.trials import choose, reasons
from trainmark.verbs.flags import parse_run
from trainmark.workloads import resolve
from trainmark.workloads.dlrm import auto
from trainmark.workloads.dlrm.data import build_data, held_out_splits
from trainmark.workloads.dlrm.runs import DlrmRun, Optimizer


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "data", train_rows=6000, validation_rows=300)


def run(data: Path, *flags: str) -> DlrmRun:
    found, _ = parse_run("train", ["dlrm-auto", "--data", str(data), *flags], TrainOptions)
    resolved = resolve(found, ONE_CPU)
    assert isinstance(resolved, DlrmRun)
    return resolved


def test_a_specification_that_breaks_the_rules_is_refused(dataset: Path) -> None:
    path = dataset / "feature_spec.yaml"
    path.write_text(path.read_text().replace("float16", "float8"))
    (dataset / checksums.FILE_NAME).unlink(missing_ok=True)
    with pytest.raises(InputError, match="'float8', which numpy does not know"):
        run(dataset)


@pytest.mark.parametrize(
    ("rows", "batch", "epochs"),
    [(1, 64, 40), (400, 64, 40), (7000, 64, 12), (30_000, 256, 6), (100_000, 1024, 3),
     (1_000_000, 2048, 2), (5_000_000, 2048, 1), (4_000_000_000, 2048, 1)],
)  # fmt: skip
def test_batch_and_epochs_follow_from_the_rows(rows: int, batch: int, epochs: int) -> None:
    assert (auto.batch(rows), auto.epochs(rows)) == (batch, epochs)


@pytest.mark.parametrize(
    ("clicks", "lr"), [(0, 0.02), (1000, 0.02), (2000, 0.04), (2500, 0.05), (10**9, 0.05)]
)
def test_the_learning_rate_follows_from_the_clicks(clicks: int, lr: float) -> None:
    assert auto.lr(clicks) == pytest.approx(lr)


def told(data: Path, click_rate: object) -> None:
    """As if preparation had counted the clicks."""
    facts = {"click_rate": {"train": click_rate, "test": 0.9}}
    (data / "prepare.json").write_text(json.dumps(facts))


@pytest.mark.parametrize(("click_rate", "clicks"), [(0.4, 2400), (0.8, 1200), (1, 0), (0, 0)])
def test_the_rarer_label_counts(click_rate: float, clicks: int, dataset: Path) -> None:
    """Whichever it is."""
    told(dataset, click_rate)
    cfg = run(dataset)
    assert (cfg.auto_clicks, cfg.lr) == (clicks, pytest.approx(auto.lr(clicks)))


@pytest.mark.parametrize("click_rate", [0, 1])
def test_a_log_of_one_label_is_refused(
    click_rate: int, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is trained or written."""
    told(dataset, click_rate)
    output = tmp_path / "run"
    assert main(["train", "dlrm-auto", "--data", str(dataset), "--output", str(output)]) == 2
    assert "have the same label, so there is nothing to learn" in capsys.readouterr().err
    assert not output.exists()


def test_one_trial_shows_that_there_is_no_metric(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Validation rows of one label have no AUC, so that further trials would be for nothing."""
    data = write_dataset(tmp_path / "data", train_rows=1500, validation_rows=300)
    (data / "validation" / "label.bin").write_bytes(bytes(300))
    command = ["train", "dlrm-auto", "--data", str(data), "--epochs", "1"]
    assert main([*command, "--output", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().err
    assert told.count("\nTrial ") + told.startswith("Trial ") == 1
    assert "Trial 1 of 2, to choose settings by: --model.interaction dot\n" in told
    assert "Took --model.interaction dot: the validation rows have no metric" in told


def test_clicks_that_are_none(dataset: Path) -> None:
    told(dataset, "many")
    with pytest.raises(InputError, match=r"click_rate must be a number above 0 and up to 1"):
        run(dataset)


def test_dropout_is_for_small_logs(tmp_path: Path) -> None:
    small, large = (
        write_dataset(tmp_path / str(rows), train_rows=rows, validation_rows=300)
        for rows in (50_000, 50_001)
    )
    assert (run(small).model.dropout, run(large).model.dropout) == (0.1, 0.0)
    assert run(small, "--model.dropout", "0").model.dropout == 0.0
    assert run(large, "--model.dropout", "0.1").model.dropout == 0.1


@pytest.mark.parametrize(("rows", "tried"), [(100_000, True), (100_001, False)])
def test_small_logs_choose_what_the_top_mlp_reads(rows: int, tried: bool, tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "data", train_rows=rows, validation_rows=300)
    found, _ = parse_run("train", ["dlrm-auto", "--data", str(folder)], TrainOptions)
    assert isinstance(found, DlrmRun)
    candidates = auto.candidates(found, run(folder)).values()
    kinds = [candidate.model.interaction for candidate in candidates]
    assert kinds == (["dot", "dot_and_inputs"] if tried else [])
    assert run(folder).model.interaction == "dot"  # as long as nothing was tried
    given = dataclasses.replace(found, model=dataclasses.replace(found.model, interaction="cat"))
    assert auto.candidates(given, run(folder)) == {}
    assert auto.candidates(found, dataclasses.replace(run(folder), patience=None)) == {}


def test_the_better_candidate_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same run as with the flag, and the result says why. A trial that ended before a kill is
    not repeated, and a second call finds all finished."""
    data = write_dataset(tmp_path / "data", train_rows=1500, validation_rows=300)
    command = ["train", "dlrm-auto", "--data", str(data), "--epochs", "2"]
    chosen, bests = tmp_path / "chosen", {}
    for kind, output in (("dot", chosen / "trials" / "0"), ("dot_and_inputs", tmp_path / "other")):
        flags = ["--model.interaction", kind, "--output", str(output)]
        assert main([*command, *flags]) == 0
        bests[kind] = result(output)["best"]
    values = {kind: best["value"] for kind, best in bests.items()}
    capsys.readouterr()
    assert main([*command, "--output", str(chosen)]) == 0
    assert "trials/0 is finished already" in "".join(capsys.readouterr().err.split("\n"))
    found, kind = result(chosen), max(values, key=lambda kind: values[kind])
    assert found["config"]["model"]["interaction"] == kind
    assert found["best"] == bests[kind]
    (why,) = [note for note in found["notes"] if note.startswith("Chose")]
    assert why.startswith(f"Chose --model.interaction {kind} by trial: auc on validation was ")
    assert all(f"{value:.5f} with --model.interaction {k}" in why for k, value in values.items())
    assert why.endswith(" s, which no time here includes.")
    assert not any("Continued" in note for note in found["notes"])
    assert not (chosen / "trials").exists()
    capsys.readouterr()
    assert main([*command, "--output", str(chosen)]) == 0
    assert "is finished already" in capsys.readouterr().err
    assert main([*command[:-1], "3", "--output", str(chosen)]) == 0
    assert why in result(chosen)["notes"]  # of a run that went on, too


def test_the_time_of_a_trial_is_its_own(tmp_path: Path) -> None:
    """Whatever this process waited for it: it may have ended before a kill."""
    candidates = dict.fromkeys(("--lr 1", "--lr 2"), run(write_dataset(tmp_path / "data")))
    values = {"0": (0.6, 70.0), "1": (0.7, 8.0)}

    def train(cfg: Any, output: Path) -> Any:
        value, seconds = values[output.name]
        best = Best(step=1, at_sample=1, split="validation", metric="auc", value=value)
        return SimpleNamespace(best=best, time_s=SimpleNamespace(e2e=seconds))

    output, mesh = tmp_path / "run", single(CPU)
    output.mkdir()
    choose(candidates, train, output, mesh)
    (why,) = reasons(output, mesh)
    assert why.endswith(
        "0.60000 with --lr 1 and 0.70000 with --lr 2. "
        "The others took 70.0 s, which no time here includes."
    )


@pytest.mark.parametrize("moves", [0, 1, 3])
def test_a_kill_while_the_best_trial_moves_up_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    data = write_dataset(tmp_path / "data", train_rows=1500, validation_rows=300)
    command = ["train", "dlrm-auto", "--data", str(data), "--epochs", "1"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main([*command, "--output", str(whole)]) == 0
    rename, moved = Path.rename, list[Path]()

    class Killed(BaseException):
        pass

    def rename_a_few(path: Path, target: Path) -> Path:
        if Path(target).parent != killed:
            return rename(path, target)
        if len(moved) == moves:
            raise Killed
        moved.append(path)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_a_few)
    with pytest.raises(Killed):
        main([*command, "--output", str(killed)])
    monkeypatch.undo()
    assert (killed / "trials").exists()
    assert main([*command, "--output", str(killed)]) == 0
    assert not (killed / "trials").exists()
    kind = result(whole)["config"]["model"]["interaction"]
    flags = ["--model.interaction", kind, "--output", str(tmp_path / "alone")]
    assert main([*command, *flags]) == 0  # the same run without trials
    curves = [(folder / "loss.csv").read_bytes() for folder in (whole, killed, tmp_path / "alone")]
    assert curves[0] == curves[1] == curves[2]
    for key in ("best", "quality", "samples", "steps"):
        assert result(whole)[key] == result(killed)[key] == result(tmp_path / "alone")[key]


def test_what_trials_leave_is_known_again(dataset: Path, tmp_path: Path) -> None:
    """A choice is not made twice; for other flags, or afresh, it is."""
    output, planted = tmp_path / "run", "Chose by trial, as was planted."
    command = ["train", "dlrm-auto", "--data", str(dataset), "--max-steps", "4", "--epochs", "1"]

    def why_after_a_kill(*flags: str) -> str:
        """Of a run that was killed when its trials had ended."""
        for path in output.glob("*"):
            if path.name not in ("choice.json", "trials"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert main([*command, *flags, "--output", str(output)]) == 0
        (why,) = [note for note in result(output)["notes"] if "by trial" in note]
        known = json.loads((output / "choice.json").read_text())
        known.pop("checksum", None)
        (output / "choice.json").write_text(json.dumps(known | {"why": planted}))
        assert isinstance(why, str)
        return why

    assert why_after_a_kill() != planted
    assert why_after_a_kill() == planted
    begun = ["--model.interaction", "dot", "--output", str(output / "trials/0")]
    assert main([*command, *begun]) == 0  # a trial of the other flags
    assert why_after_a_kill("--lr", "0.02") != planted
    assert why_after_a_kill("--lr", "0.02") == planted
    assert why_after_a_kill("--lr", "0.02", "--fresh") != planted
    known = checksums.dumps(json.loads((output / "choice.json").read_text()))
    (output / "choice.json").write_text(known.replace("planted", "plantee"))
    with pytest.raises(InputError, match=r"choice\.json is not as it was written"):
        reasons(output, single(CPU))


def test_a_run_from_another_has_its_network(dataset: Path, tmp_path: Path) -> None:
    """Also from one of an earlier version, whose top MLP read dot products alone; which the same
    command continues."""
    flags = ["--data", str(dataset), "--max-steps", "4"]
    earlier, later = tmp_path / "earlier", tmp_path / "later"
    dot = ["--model.interaction", "dot", "--output", str(earlier)]
    assert main(["train", "dlrm-auto", *flags, *dot]) == 0
    assert main(["train", "dlrm-auto", *flags, "--output", str(earlier)]) == 0
    following = ["--from", str(earlier), "--output", str(later)]
    assert main(["train", "dlrm-auto", *flags, *following]) == 0
    assert result(later)["config"]["model"]["interaction"] == "dot"


def test_what_nobody_chose_is_chosen_and_recorded(dataset: Path) -> None:
    cfg = run(dataset)
    steps = cfg.epochs * -(-6000 // 64)
    assert (cfg.global_batch, cfg.epochs, cfg.optimizer.eps) == (64, 13, 0.1 / 64)
    assert (cfg.schedule.factor(steps - 1) > 0, cfg.schedule.factor(steps)) == (True, 0.0)
    assert cfg.auto_rows == 6000
    assert resolve(cfg, ONE_CPU) == cfg
    longer = resolve(dataclasses.replace(cfg, epochs=20), ONE_CPU)
    assert longer.schedule == auto.schedule(20 * 94)


def test_what_was_given_stays_and_the_rest_follows_it(dataset: Path) -> None:
    cfg = run(dataset, "--global-batch", "500", "--epochs", "3", "--lr", "0.1")
    assert (cfg.global_batch, cfg.epochs, cfg.lr, cfg.optimizer.eps) == (500, 3, 0.1, 0.1 / 500)
    assert cfg.schedule.factor(3 * 12) == 0.0 < cfg.schedule.factor(3 * 12 - 1)
    assert run(dataset, "--optimizer.eps", "1e-8").optimizer.eps == 1e-8
    flat = ["--schedule.decay-start", "5", "--schedule.decay-steps", "6"]
    assert run(dataset, *flat).schedule.decay_steps == 6
    assert run(dataset, "--micro-batch", "32", "--accumulate", "2").global_batch == 64


def test_other_runs_choose_nothing() -> None:
    named = dataclasses.replace(workloads.named_run("dlrm-demo"), optimizer=Optimizer(eps=None))
    with pytest.raises(InputError, match=r"optimizer\.eps must be a number"):
        resolve(named, ONE_CPU)
    named = dataclasses.replace(named, optimizer=Optimizer())
    named = dataclasses.replace(named, model=dataclasses.replace(named.model, dropout=None))
    with pytest.raises(InputError, match=r"model\.dropout must be a number"):
        resolve(named, ONE_CPU)
    model = dataclasses.replace(named.model, dropout=0.0, interaction="auto")
    with pytest.raises(InputError, match=r"auto is for dlrm-auto to choose"):
        resolve(dataclasses.replace(named, model=model), ONE_CPU)


def test_settings_of_a_result_are_chosen_anew_for_other_data(dataset: Path, tmp_path: Path) -> None:
    """But for those that were given."""
    earlier = run(dataset, "--epochs", "5")
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"schema": "", "config": to_plain(earlier)}))
    other = write_dataset(tmp_path / "other", train_rows=30_000, validation_rows=300)
    cfg = run(other, "--config", str(file))
    assert (cfg.global_batch, cfg.epochs, cfg.optimizer.eps) == (256, 5, 0.1 / 256)
    assert (earlier.lr, cfg.lr) == (pytest.approx(0.024), 0.05)  # a fifth of the rows are clicks
    assert cfg.schedule == auto.schedule(5 * 118)
    large = write_dataset(tmp_path / "large", train_rows=60_000, validation_rows=300)
    dropout = [run(data, "--config", str(file)).model.dropout for data in (other, large)]
    assert (earlier.model.dropout, dropout) == (0.1, [0.1, 0.0])


def test_without_a_validation_split_the_last_training_rows_validate(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "data", cardinalities=(50,))
    cfg = run(folder)
    assert held_out_splits(cfg) == ("test", "validation")
    assert cfg.auto_rows == 900
    labels = np.fromfile(folder / "train" / "label.bin", np.bool_)
    (validation,) = build_data(cfg, "validation", 0, 1)
    np.testing.assert_array_equal(validation.labels.numpy(), labels[900:])
    trained = list(build_data(dataclasses.replace(cfg, epochs=1), "train", 0, 1))
    seen = np.concatenate([batch.labels.numpy() for batch in trained])
    assert (len(seen), seen.sum()) == (900, labels[:900].sum())


def test_other_runs_train_on_all_training_rows(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "data", cardinalities=(50,))
    named = dataclasses.replace(workloads.named_run("dlrm-demo"), data=str(folder))
    cfg = resolve(named, ONE_CPU)
    assert isinstance(cfg, DlrmRun)
    assert held_out_splits(cfg) == ("test",)
    assert sum(batch.samples for batch in build_data(cfg, "train", 0, 1)) == 1000


def clicks(path: Path, rows: int, seed: int) -> pd.DataFrame:
    """Three columns of ids whose effects add up."""
    random, effects = np.random.default_rng(seed), np.random.default_rng(0)
    columns = {name: random.integers(0, values, rows) for name, values in
               (("user", 40), ("item", 20), ("hour", 6))}  # fmt: skip
    logits = sum(effects.normal(0, 1, 40)[ids] for ids in columns.values())
    table = pd.DataFrame(columns)
    table["clicked"] = (random.random(rows) < 1 / (1 + np.exp(1 - logits))).astype(int)
    table.to_csv(path, index=False)
    return table


def test_it_learns_what_logistic_regression_learns(tmp_path: Path) -> None:
    """With no flag but --data, no validation split, and no numerical column."""
    train, test = clicks(tmp_path / "train.csv", 3000, 1), clicks(tmp_path / "test.csv", 3000, 2)
    files = ["--train", str(tmp_path / "train.csv"), "--test", str(tmp_path / "test.csv")]
    columns = ["--columns", "label=clicked categorical=user,item,hour"]
    assert main(["prepare", "csv", *files, *columns, "--output", str(tmp_path / "d")]) == 0
    output = tmp_path / "run"
    assert main(["train", "dlrm-auto", "--data", str(tmp_path / "d"), "--output", str(output)]) == 0
    names = ["user", "item", "hour"]
    one_hot = OneHotEncoder().fit(train[names])
    model = LogisticRegression(max_iter=1000).fit(one_hot.transform(train[names]), train.clicked)
    scores = model.predict_proba(one_hot.transform(test[names]))[:, 1]
    found = result(output)
    assert found["quality"]["value"] > roc_auc_score(test.clicked, scores) - 0.01
    assert found["best"]["split"] == "validation"
    assert found["division"] == "closed"


def test_prepare_tells_the_size_of_tables_at_the_dimension_of_this_run() -> None:
    cfg = workloads.named_run("dlrm-auto")
    assert isinstance(cfg, DlrmRun)
    assert cfg.model.embedding_dim == summary.AUTO_DIM
