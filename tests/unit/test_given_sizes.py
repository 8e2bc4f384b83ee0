"""Table sizes that are given together with a dataset, which has its own."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from tests.small import ONE_CPU, train, write_dataset
from trainmark import workloads
from trainmark.cli import main
from trainmark.config import Run, TrainOptions, to_plain
from trainmark.errors import InputError
from trainmark.verbs.flags import parse_run
from trainmark.workloads import resolve
from trainmark.workloads.dlrm.runs import DlrmRun


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "data", train_rows=600, cardinalities=(50, 7, 3))


def dlrm(run: Run) -> DlrmRun:
    assert isinstance(run, DlrmRun)
    return run


def resolved(dataset: Path, **sizes: object) -> DlrmRun:
    named = workloads.named_run("dlrm-demo")
    model = dataclasses.replace(named.model, **sizes)
    return resolve(dataclasses.replace(named, model=model, data=str(dataset)), ONE_CPU)


def test_a_dataset_brings_its_own_sizes(dataset: Path) -> None:
    found = resolved(dataset).model
    assert found.table_rows == (50, 7, 3)
    again = resolved(dataset, table_rows=(50, 7, 3), numerical_features=found.numerical_features)
    assert again.model == found


def test_show_says_how_large_its_tables_are(
    dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", "dlrm-demo", "--data", str(dataset)]) == 0
    assert re.search(r"tables +3\.8 KiB", capsys.readouterr().out)  # 60 rows of 16 numbers


def test_the_demo_learns_from_the_first_row_to_the_last(dataset: Path) -> None:
    """Its schedule is as long as the log; a schedule that is given, or published, stays."""
    named = workloads.named_run("dlrm-demo")
    assert (named.schedule.warmup_steps, named.schedule.decay_start) == (100, 156)
    cfg = dataclasses.replace(named, data=str(dataset), epochs=7, global_batch=64)
    schedule = resolve(cfg, ONE_CPU).schedule  # 7 x 10 steps
    rates = [schedule.factor(step) for step in range(70)]
    assert (rates.index(1.0), rates[14], rates[68] > 0, rates[69]) == (10, 1.0, True, 0.0)

    given = dataclasses.replace(named.schedule, decay_steps=5000)
    assert resolve(dataclasses.replace(cfg, schedule=given), ONE_CPU).schedule == given
    small = workloads.named_run("dlrm-small")
    found = resolve(dataclasses.replace(small, data=str(dataset)), ONE_CPU)
    assert found.schedule == small.schedule


def test_more_epochs_continue_the_demo(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its schedule grows with them, and is no change that anybody made; one that is given is."""
    output = tmp_path / "run"
    flags = ["train", "dlrm-demo", "--data", str(dataset), "--output", str(output)]
    assert main(flags) == 0
    first = json.loads((output / "result.json").read_text())
    assert (first["division"], first["changed"], first["steps"]["all"]) == ("closed", [], 1)

    assert main([*flags, "--epochs", "20"]) == 0
    longer = json.loads((output / "result.json").read_text())
    assert (longer["changed"], longer["steps"]["all"]) == (["epochs"], 20)
    assert longer["config"]["schedule"]["decay_steps"] == 15  # from step 4 to the last, 19

    assert main([*flags, "--epochs", "20", "--schedule.decay-steps", "9"]) == 2
    assert "another configuration (other schedule." in capsys.readouterr().err


def test_a_results_schedule_is_fitted_again(dataset: Path, tmp_path: Path) -> None:
    """To other epochs or data; one that somebody chose stays."""

    def repeated(*flags: str) -> DlrmRun:
        words = ["dlrm-demo", "--config", str(result), *flags]
        return dlrm(resolve(parse_run("train", words, TrainOptions)[0], ONE_CPU))

    named = workloads.named_run("dlrm-demo")
    cfg = resolve(dataclasses.replace(named, data=str(dataset), global_batch=6), ONE_CPU)
    result = tmp_path / "result.json"
    result.write_text(json.dumps({"schema": "trainmark.result/1", "config": to_plain(cfg)}))
    assert repeated().schedule.decay_start == 20  # a fifth of 100 steps
    assert repeated("--epochs", "2").schedule.decay_start == 40
    assert repeated("--data", "synthetic").schedule == workloads.named_run("dlrm-demo").schedule
    chosen = repeated("--epochs", "2", "--schedule.decay-steps", "9")
    assert (chosen.schedule.decay_start, chosen.schedule.decay_steps) == (20, 9)
    assert chosen.schedule_steps is None


def test_other_sizes_are_refused(dataset: Path) -> None:
    with pytest.raises(InputError) as refused:
        resolved(dataset, table_rows=(50, 8, 3))
    assert str(refused.value) == (
        f"model.table_rows is 50 8 3, but {dataset} has 50 7 3. Give data of the model's sizes "
        "(prepare's --vocabulary makes them), or leave model.table_rows out of the flags and the "
        "--config file: a dataset brings its own."
    )
    with pytest.raises(InputError, match="numerical_features is 99, but"):
        resolved(dataset, numerical_features=99)


def test_flags_and_files_are_refused_before_anything_is_written(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, config = tmp_path / "run", tmp_path / "run.toml"
    config.write_text("[model]\ntable_rows = [50, 7]\n")
    flags = ["--data", str(dataset), "--output", str(output)]
    for more in (["--model.table-rows", "50", "7"], ["--config", str(config)]):
        assert main(["train", "dlrm-demo", *flags, *more]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("trainmark: model.table_rows is 50 7, but ")
    assert not output.exists()


def test_a_finished_run_is_evaluated_and_continued_on_its_data(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder remembers the dataset's sizes, which are not the named run's."""
    output, flags = tmp_path / "run", ("--data", str(dataset), "--global-batch", "100")
    assert train(output, *flags, "--max-steps", "2") == 0
    assert json.loads((output / "config.json").read_text())["model"]["table_rows"] == [50, 7, 3]
    assert train(output, *flags, "--max-steps", "3") == 0
    assert main(["evaluate", str(output)]) == 0
    other = write_dataset(tmp_path / "other", train_rows=600, cardinalities=(60, 7, 3))
    assert main(["evaluate", str(output), "--data", str(other)]) == 2
    (*_, line) = capsys.readouterr().err.splitlines()
    how = "its categorical column 'cat_0.bin' has 60 ids, not 50"
    assert f"{other} is not what the model was trained on: {how}. Give {dataset}, or" in line


def test_a_finished_run_is_repeated_on_other_data(dataset: Path, tmp_path: Path) -> None:
    """With its settings, but the sizes, the best AUC and the target of the other data."""
    first, flags = tmp_path / "first", ("--global-batch", "100", "--max-steps", "2")
    assert train(first, *flags, "--data", str(dataset), "--lr", "0.25") == 0
    other = write_dataset(tmp_path / "other", train_rows=600, cardinalities=(60, 8))

    def repeated(result: Path, *more: str) -> DlrmRun:
        run, _ = parse_run("train", ["dlrm-demo", "--config", str(result), *more], TrainOptions)
        return dlrm(resolve(run, ONE_CPU))

    result = first / "result.json"
    run = repeated(result, "--data", str(other))
    assert (run.model.table_rows, run.global_batch, run.lr) == ((60, 8), 100, 0.25)
    assert repeated(result, "--data", str(dataset)) == repeated(result)
    assert repeated(result, "--data", "synthetic").model.table_rows == (50, 7, 3)
    with pytest.raises(InputError, match="table_rows is 5 6, but"):
        repeated(result, "--data", str(other), "--model.table-rows", "5", "6")


@pytest.mark.parametrize("flags", [(), ("--target", "0.6")])
def test_the_target_of_planted_rows_stays_with_them(
    dataset: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    words = ["dlrm-demo", "--synthetic-rows", "2000", *flags]
    planted = dlrm(resolve(parse_run("train", words, TrainOptions)[0], ONE_CPU))
    assert planted.best_auc is not None
    result = tmp_path / "result.json"
    result.write_text(json.dumps({"schema": "trainmark.result/1", "config": to_plain(planted)}))
    words = ["dlrm-demo", "--config", str(result), "--data", str(dataset)]
    run = dlrm(resolve(parse_run("train", words, TrainOptions)[0], ONE_CPU))
    assert run.best_auc is None
    assert run.target == (0.6 if flags else None)


# --- the embedding width


def widths(*flags: str, name: str = "dlrm-demo") -> tuple[int, tuple[int, ...]]:
    """(embedding_dim, bottom_mlp) of `train NAME FLAGS`, resolved."""
    run, _ = parse_run("train", [name, *flags], TrainOptions)
    model = dlrm(resolve(dataclasses.replace(run, data="synthetic"), ONE_CPU)).model
    return model.embedding_dim, model.bottom_mlp


def test_an_embedding_width_alone() -> None:
    """The named run's own bottom MLP follows it; without it, all is as published."""
    assert widths() == (16, (16,))
    assert widths("--model.embedding-dim", "32") == (32, (32,))
    assert widths(name="dlrm-auto") == (16, (256, 128, 16))
    for name in workloads.named_runs():
        if name.startswith("dlrm-") and name not in ("dlrm-demo", "dlrm-auto"):
            own = dlrm(workloads.named_run(name)).model.bottom_mlp
            assert widths(name=name) == (128, own) == (128, (512, 256, 128))
            assert widths("--model.embedding-dim", "64", name=name) == (64, (512, 256, 64))


def test_an_embedding_width_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[model]\nembedding_dim = 32\n")
    assert widths("--config", str(path)) == (32, (32,))
    assert widths("--config", str(path), "--model.embedding-dim", "8") == (8, (8,))
    path.write_text("[model]\nembedding_dim = 32\nbottom_mlp = [5, 32]\n")
    assert widths("--config", str(path)) == (32, (5, 32))


def test_a_bottom_mlp_that_is_given_is_not_changed(tmp_path: Path) -> None:
    both = ("--model.embedding-dim", "32", "--model.bottom-mlp")
    assert widths(*both, "100", "32") == (32, (100, 32))
    path = tmp_path / "run.toml"
    path.write_text("[model]\nbottom_mlp = [100, 50]\n")
    for flags in (
        (*both, "100", "16"),
        ("--model.bottom-mlp", "64", "32"),
        ("--config", str(path)),
        ("--config", str(path), "--model.embedding-dim", "32"),
    ):
        with pytest.raises(InputError, match=r"last width of model\.bottom_mlp must equal"):
            widths(*flags)


def test_a_run_of_another_embedding_width(tmp_path: Path, dataset: Path) -> None:
    """It trains, can be repeated from its result, and says what was changed."""
    flags = ["--data", str(dataset), "--device", "cpu", "--max-steps", "2"]
    words = ["train", "dlrm-small", *flags, "--precision", "fp32", "--global-batch", "256"]
    first, again = tmp_path / "first", tmp_path / "again"
    assert main([*words, "--model.embedding-dim", "8", "--output", str(first)]) == 0
    found = json.loads((first / "result.json").read_text())
    assert found["config"]["model"]["bottom_mlp"] == [512, 256, 8]
    assert {"model.embedding_dim", "model.bottom_mlp"} <= set(found["changed"])
    config = ["--config", str(first / "result.json"), "--output", str(again)]
    assert main(["train", "dlrm-small", *config]) == 0
    assert json.loads((again / "result.json").read_text())["config"] == found["config"]
