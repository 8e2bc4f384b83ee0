"""Best, not last: where patience ends a run, whose weights count, and which checkpoints stay."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.small import newest, result, saved, train, write_dataset
from trainmark.checkpoint import folders
from trainmark.cli import main
from trainmark.run.loop import Training

PATIENCE = 3
EVALUATED = ("--epochs", "12", "--evals-per-epoch", "4")
FLAGS = (*EVALUATED, "--patience", str(PATIENCE))


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Uniform ids cannot be learned: the AUC goes up and down, and patience runs out."""
    output = tmp_path_factory.mktemp("patience") / "run"
    assert train(output, *FLAGS) == 0
    return output


def aucs(found: dict[str, Any], split: str) -> list[tuple[int, float]]:
    evaluations = [e for e in found["evaluations"] if e["split"] == split]
    return [(e["at_sample"], e["metrics"]["auc"]) for e in evaluations]


def stopped_by_hand(values: list[tuple[int, float]]) -> tuple[int, int]:
    """(samples of the best evaluation, of the one that ends the run)."""
    for place in range(PATIENCE, len(values)):
        head = values[: place + 1]
        best = max(range(len(head)), key=lambda i: head[i][1])
        if place - best == PATIENCE:
            return head[best][0], head[-1][0]
    raise AssertionError("patience never ran out")


def test_patience_ends_the_run_and_the_best_weights_are_judged(
    patient: Path, tmp_path: Path
) -> None:
    assert train(tmp_path / "whole", *EVALUATED, "--quality-split", "validation") == 0
    whole, found = result(tmp_path / "whole"), result(patient)
    expected_best, expected_end = stopped_by_hand(aucs(whole, "validation"))
    assert (whole["ended"], whole["best"]) == ("epochs", None)
    assert (found["ended"], found["samples"]) == ("patience", expected_end)
    best = found["best"]
    assert (best["at_sample"], best["split"], best["since"]) == (expected_best, "validation", 3)
    assert best["value"] == dict(aucs(whole, "validation"))[expected_best]
    # A run that simply ends there has the same weights, and the same AUC on test.
    assert train(tmp_path / "short", "--epochs", "12", "--max-steps", str(best["step"])) == 0
    short = result(tmp_path / "short")
    assert aucs(found, "test") == [(expected_best, short["quality"]["value"])]
    assert found["quality"]["value"] == short["quality"]["value"]
    kept = folders.folder_of(patient / "checkpoints", best["step"])
    assert saved(kept) == saved(newest(tmp_path / "short"))
    assert any(f"Quality is that of step {best['step']}" in note for note in found["notes"])
    finished = json.loads((patient / "perf.log").read_text().splitlines()[-1].split(" ", 1)[1])
    assert finished["value"]["final_auc"] == found["quality"]["value"]
    assert not [w for w in found["warnings"] if "chose the checkpoint" in w]


def test_only_improvements_and_the_end_are_saved(patient: Path) -> None:
    lines = (patient / "perf.log").read_text().splitlines()
    events = [json.loads(line.split(" ", 1)[1]) for line in lines]
    written = [Path(e["value"]["path"]).name for e in events if e["event"] == "CHECKPOINT"]
    found = result(patient)
    values = aucs(found, "validation")
    better = sum(
        auc > max((v for _, v in values[:i]), default=0) for i, (_, auc) in enumerate(values)
    )
    assert len(written) == better + 1
    last = found["steps"]["all"]
    names = [path.name for path in folders.all_checkpoints(patient / "checkpoints")]
    assert names[-1] == f"step-{last:08d}"
    assert f"step-{found['best']['step']:08d}" in names


def test_a_run_that_crashes_again_and_again_ends_as_if_it_had_not(
    patient: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate, calls = Training._evaluate, []

    def sometimes(self: Training, split: str) -> None:
        calls.append(split)
        if len(calls) % 3 == 0:  # also the one at the end, with the best weights
            raise OSError("the machine is gone")
        evaluate(self, split)

    monkeypatch.setattr(Training, "_evaluate", sometimes)
    flags, attempts = (*FLAGS, "--checkpoint-every", "1 steps"), 0
    while train(tmp_path / "run", *flags):
        attempts += 1
        assert attempts < 50
    assert attempts >= 2
    found, expected = result(tmp_path / "run"), result(patient)
    for key in ("best", "ended", "samples", "loss"):
        assert found[key] == expected[key]
    assert found["quality"]["value"] == expected["quality"]["value"]
    assert [(e["at_sample"], e["split"], e["metrics"]) for e in found["evaluations"]] == [
        (e["at_sample"], e["split"], e["metrics"]) for e in expected["evaluations"]
    ]
    step = expected["best"]["step"]
    assert saved(folders.folder_of(tmp_path / "run" / "checkpoints", step)) == saved(
        folders.folder_of(patient / "checkpoints", step)
    )
    assert train(tmp_path / "run", *flags) == 0  # finished: nothing is done
    assert result(tmp_path / "run") == found


def test_more_patience_goes_on(patient: Path, tmp_path: Path) -> None:
    for patience in ("3", "5"):
        flags = (*EVALUATED, "--patience", patience)
        assert train(tmp_path / "run", *flags) == 0
    assert train(tmp_path / "at once", *flags) == 0
    again, at_once = result(tmp_path / "run"), result(tmp_path / "at once")
    assert at_once["samples"] > result(patient)["samples"]
    for key in ("best", "ended", "samples", "loss"):
        assert again[key] == at_once[key]


def test_without_checkpoints_the_best_one_is_kept_all_the_same(
    patient: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    assert train(output, *FLAGS, "--checkpoint-every", "never", "--keep-checkpoints", "1") == 0
    found = result(output)
    assert found["best"] == result(patient)["best"]
    assert found["quality"] | {"at_s": 0} == result(patient)["quality"] | {"at_s": 0}
    assert newest(output).name == f"step-{found['best']['step']:08d}"


def test_a_split_that_chooses_and_judges_is_warned_about(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", train_rows=400, test_rows=200)
    command = ["train", "dlrm-demo", "--data", str(data), "--device", "cpu", "--output"]
    flags = ["--global-batch", "100", "--evals-per-epoch", "2", "--epochs", "4", "--patience", "1"]
    assert main([*command, str(tmp_path / "run"), *flags]) == 0
    found = result(tmp_path / "run")
    assert found["best"]["split"] == found["quality"]["split"] == "test"
    assert (
        found["quality"]["value"]
        == found["best"]["value"]
        == max(v for _, v in aucs(found, "test"))
    )
    (warning,) = [w for w in found["warnings"] if "chose the checkpoint" in w]
    assert warning.startswith("The test split chose the checkpoint (--patience)")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--patience", "0"), "patience must be at least 1. Received: 0."),
        (("--patience", "2", "--evals-per-epoch", "0"), "evals_per_epoch must be at least 1"),
    ],
)
def test_what_patience_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    assert train(tmp_path / "run", *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# --- --checkpoint


def evaluation(folder: Path, *flags: str) -> dict[str, Any]:
    assert main(["evaluate", str(folder), "--device", "cpu", *flags]) == 0
    found: dict[str, Any] = json.loads((folder / "evaluation.json").read_text())
    return found


def test_the_best_checkpoint_is_the_default_and_any_can_be_asked_for(
    patient: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = result(patient)
    step, last = trained["best"]["step"], trained["steps"]["all"]
    for flags, expected, role in (
        ((), step, "best"),
        (("--checkpoint", "best"), step, "best"),
        (("--checkpoint", "last"), last, "last"),
        (("--checkpoint", f"step-{step}"), step, "best"),
        (("--checkpoint", f"step-{last:08d}"), last, "last"),
    ):
        found = evaluation(patient, *flags)
        assert (found["step"], found["role"]) == (expected, role)
        assert f"step-{expected:08d} ({role})" in capsys.readouterr().out
        if expected == step:
            assert found["splits"]["test"]["auc"] == trained["quality"]["value"]
            assert found["splits"]["validation"]["auc"] == trained["best"]["value"]
    assert main(["evaluate", str(patient), "--checkpoint", "step-7"]) == 2
    error = capsys.readouterr().err
    assert "--checkpoint must be best, last or one of step-0000" in error
    assert error.rstrip().endswith("Received: step-7.")


def test_the_other_verbs_take_it_too(
    patient: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = result(patient)
    names = {"best": trained["best"]["step"], "last": trained["steps"]["all"]}
    for which, step in names.items():
        target = ["--output", str(tmp_path / which)]
        assert main(["export", str(patient), "--checkpoint", which, *target]) == 0
        assert f"step-{step:08d} ({which})" in capsys.readouterr().err
        timed = ["--batches", "1", "--steps", "1", "--device", "cpu"]
        assert main(["infer", str(patient), "--checkpoint", which, *timed]) == 0
        assert json.loads((patient / "inference.json").read_text())["step"] == step
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in names]
    assert weights[0] != weights[1]


def test_a_run_without_patience_has_no_best_one(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = evaluation(finished)
    assert (found["step"], found["role"]) == (8, "last")
    assert main(["evaluate", str(finished), "--checkpoint", "best"]) == 2
    assert "kept no best checkpoint: it was trained without --patience" in capsys.readouterr().err
