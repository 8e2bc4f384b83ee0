"""Table sizes that are given together with a dataset, which has its own."""

import dataclasses
import json
from pathlib import Path

import pytest

from tests.small import ONE_CPU, train, write_dataset
from trainmark import workloads
from trainmark.cli import main
from trainmark.config import resolve
from trainmark.errors import InputError
from trainmark.workloads.dlrm.runs import DlrmRun


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "data", train_rows=600, cardinalities=(50, 7, 3))


def resolved(dataset: Path, **sizes: object) -> DlrmRun:
    named = workloads.named_run("dlrm-demo")
    model = dataclasses.replace(named.model, **sizes)
    return resolve(dataclasses.replace(named, model=model, data=str(dataset)), ONE_CPU)


def test_a_dataset_brings_its_own_sizes(dataset: Path) -> None:
    found = resolved(dataset).model
    assert found.table_rows == (50, 7, 3)
    again = resolved(dataset, table_rows=(50, 7, 3), numerical_features=found.numerical_features)
    assert again.model == found


def test_other_sizes_are_refused(dataset: Path) -> None:
    with pytest.raises(InputError) as refused:
        resolved(dataset, table_rows=(50, 8, 3))
    assert str(refused.value) == (
        f"model.table_rows is 50 8 3, but {dataset} has 50 7 3. Give data of the model's sizes, or "
        "leave model.table_rows out of the flags and the --config file: a dataset brings its own."
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
    assert f"is 50 7 3, but {other} has 60 7 3. Give data of" in capsys.readouterr().err
