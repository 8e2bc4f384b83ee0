"""The GPU benchmarks of DistilBERT and Llama-3 run: each with a toy network, on a CPU.

What they measure here means nothing; that a row has the figures asked for is what is tested.
"""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks import common, distilbert_gpu, distilbert_sst2, llama3_alignment, llama3_gpu
from trainmark.cli import main


def rows(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("*.json")
    document = json.loads(path.read_text())
    assert document["schema"] == "trainmark.benchmark/1"
    found: list[dict[str, Any]] = document["rows"]
    return found


@pytest.mark.parametrize(("system", "count"), [("trainmark", 3), ("huggingface-eager", 4)])
def test_distilbert(system: str, count: int, tmp_path: Path) -> None:
    distilbert_gpu.main(["--tiny", "--only", system, "--output", str(tmp_path)])
    found = rows(tmp_path)
    assert len(found) == count
    keys = {"system", "mode", "precision", "batch", "samples_per_s", "memory_gib", "mfu"}
    assert all(row.keys() >= keys and row["samples_per_s"] > 0 for row in found)
    kinds = {(row["mode"], row["precision"], row["attention"]) for row in found}
    assert ("padded", "bf16", "masked") in kinds
    assert len(kinds) == count


def test_the_rows_that_the_gpu_will_measure() -> None:
    found = [(c.system, c.mode, c.precision, c.batch) for c in distilbert_gpu.cases()]
    ours = [row[1:] for row in found if row[0] == "trainmark"]
    assert {("padded", "bf16", 96), ("padded", "tf32", 96), ("packed", "bf16", 1024)} <= {*ours}
    for precision in ("bf16", "tf32"):
        for system in ("huggingface-eager", "huggingface-compiled"):
            assert (system, "padded", precision, 96) in found


def test_distilbert_on_sst2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def in_this_process(command: list[str]) -> None:
        commands.append(shlex.join(command))
        assert main(command) == 0

    monkeypatch.setattr(distilbert_sst2, "trainmark", in_this_process)
    where = ["--output", str(tmp_path / "out"), "--runs", str(tmp_path / "runs")]
    distilbert_sst2.main(["--tiny", *where])
    found = rows(tmp_path / "out")
    assert [(row["mode"], row["seed"]) for row in found] == [
        ("packed", 0), ("packed", 0), ("padded", 0), ("packed", 1), ("packed", 2),
    ]  # fmt: skip
    best = max(found[:2], key=lambda row: row["last"])
    assert {row["lr"] for row in found[2:]} == {best["lr"]}
    assert all(0 < row["last"] <= row["best"] <= 1 for row in found)
    assert [row["command"].removeprefix("trainmark ") for row in found] == commands


@pytest.mark.parametrize("to_target", [False, True])
@pytest.mark.parametrize("recipe", distilbert_sst2.RECIPES)
def test_recipes_are_flags_of_the_command(
    recipe: distilbert_sst2.Recipe, to_target: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = distilbert_sst2.flags(recipe, "packed", 1, to_target)
    assert main(["show", "distilbert-sst2", *flags, "--cluster", "h200x1x1"]) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line)
    assert float(shown["lr"]) == recipe.lr
    assert shown["stop_at_target"].strip() == str(to_target).lower()
    warmup = int(shown["schedule.warmup_steps"])
    steps = warmup + int(shown["schedule.decay_steps"])
    assert steps == -(-67_349 // recipe.batch) * recipe.epochs
    assert warmup == round(recipe.warmup * steps)


def test_llama3_speed(tmp_path: Path) -> None:
    names = ["bf16-mb1", "fp8-mb2", "transformers-mb1"]
    llama3_gpu.main(["--tiny", "--output", str(tmp_path), "--only", *names])
    found = rows(tmp_path)
    assert [row["name"] for row in found] == names
    keys = {
        "system", "precision", "sequence", "parameters", "micro_batch", "recompute", "optimizer",
        "tokens_per_s", "mfu_published", "mfu_palm", "memory_gib",
    }  # fmt: skip
    assert all(row.keys() >= keys and row["tokens_per_s"] > 0 for row in found)


def test_llama3_cases_that_are_not_run_keep_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(llama3_gpu, "measure", lambda case, scale: {"name": case.name})
    for name in ("transformers-mb1", "bf16-mb2"):
        llama3_gpu.main(["--tiny", "--output", str(tmp_path), "--only", name])
    assert [row["name"] for row in rows(tmp_path)] == ["bf16-mb2", "transformers-mb1"]


def test_llama3_alignment(tmp_path: Path) -> None:
    where = ["--output", str(tmp_path / "out"), "--runs", str(tmp_path / "runs")]
    llama3_alignment.main(["--tiny", *where])
    found = rows(tmp_path / "out")
    assert [row["steps_compared"] for row in found] == [4, 4, 4]
    assert found[0]["mean_relative_error_from_step_21"] == 0
    assert all(0 < row["mean_relative_error_from_step_21"] < 0.01 for row in found[1:])


def test_rows_that_are_not_measured_again_stay() -> None:
    """The committed reference serves variants that are run alone."""
    known = llama3_alignment.known_rows("llama3_alignment_h200")
    assert known.keys() == llama3_alignment.VARIANTS.keys()
    assert len(known["reference"]["curve"]) == llama3_alignment.STEPS
    llama3_alignment.check_same_start(known)
    other = known["low-memory"] | {"curve": [9.41]}
    with pytest.raises(AssertionError, match="not the reference's data"):
        llama3_alignment.check_same_start(known | {"low-memory": other})
