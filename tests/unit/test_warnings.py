"""What a run is warned about: at its end, in its result and on its page; and what it is not."""

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.small import ONE_CPU, config, result, train, write_dataset
from tests.unit.results import make_result, write_run
from trainmark import metrics, workloads
from trainmark.cli import main
from trainmark.config import Run, TrainOptions
from trainmark.report import reports
from trainmark.run.result import Best, Evaluation, Steps
from trainmark.run.warnings import warnings
from trainmark.verbs.flags import parse_run
from trainmark.workloads import resolve
from trainmark.workloads.dlrm.runs import DlrmRun

# --- steps and loss


def steps_warned(taken: int, skipped: int = 0, **changes: Any) -> list[str]:
    finished = make_result(steps=Steps(all=taken, warmup=0, skipped=skipped), **changes)
    return warnings(config(), finished, Path("/nonexistent"))


def test_fewer_than_200_steps() -> None:
    quality = dataclasses.replace(make_result().quality, reached=False)
    (warning,) = steps_warned(199, quality=quality)
    assert "199 steps" in warning
    assert "--global-batch" in warning
    assert steps_warned(200, quality=quality) == []
    assert steps_warned(210, skipped=20, quality=quality) != []  # 190 that did something
    assert steps_warned(1) == []  # it reached its target
    finished = make_result(steps=Steps(all=20, warmup=0, skipped=0), quality=quality)
    nowhere = Path("/nonexistent")
    began_with = {"path": "/run/checkpoints/step-00000009", "with_optimizer": True}
    assert warnings(config(), finished, nowhere, began_with=began_with) == []  # trained before
    best = Best(step=0, at_sample=0, split="test", metric="auc", value=0.7)
    kept = dataclasses.replace(finished, best=best)
    warning, *_ = warnings(config(), kept, nowhere, began_with=began_with)
    assert warning.endswith("which are kept. Lower --lr.")


def test_few_steps_that_nobody_chose_are_enough(tmp_path: Path) -> None:
    """dlrm-auto takes 168 of 171,000 rows, by its own rules; but not if it was told to."""
    data = write_dataset(tmp_path / "data", train_rows=171_000, validation_rows=300)

    def warned(*flags: str) -> list[str]:
        asked, _ = parse_run("train", ["dlrm-auto", "--data", str(data), *flags], TrainOptions)
        cfg = resolve(asked, ONE_CPU)
        finished = make_result(
            quality=dataclasses.replace(make_result().quality, reached=None),
            steps=Steps(all=cfg.max_steps or 168, warmup=0, skipped=0),
        )
        return [line for line in warnings(cfg, finished, tmp_path) if "were updated" in line]

    assert warned() == []
    assert len(warned("--global-batch", "4096")) == 1
    assert len(warned("--max-steps", "12")) == 1


def rising_warned(aucs: list[float], **changes: Any) -> list[str]:
    """Of a run of four epochs with these evaluations on the test split."""
    evaluations = [
        Evaluation(at_sample=100 * number, split="test", metrics={"auc": auc}, seconds=0.1)
        for number, auc in enumerate(aucs, 1)
    ]
    quality = dataclasses.replace(make_result().quality, reached=None, value=aucs[-1])
    finished = make_result(evaluations=evaluations, quality=quality, ended="epochs")
    return warnings(
        config(epochs=4), dataclasses.replace(finished, **changes), Path("/nonexistent")
    )


def test_an_auc_that_rose_to_the_end() -> None:
    rising = [0.60, 0.70, 0.76, 0.80, 0.83, 0.85, 0.86, 0.87]
    (warning,) = rising_warned(rising)
    assert "was 0.8000 in their first half, 0.8700 in the end. Train with --epochs 8" in warning
    assert rising_warned(rising, ended="patience") == []
    assert rising_warned([*rising, 0.87]) == []  # as good as before
    assert rising_warned([0.6, 0.7, 0.8, 0.87, 0.8705, 0.8708, 0.871, 0.8712]) == []  # level
    assert rising_warned(rising[-3:]) == []  # too few to tell
    assert [rising_warned([auc]) for auc in (0.7, 1.0)] == [[], []]  # --evals-per-epoch 0
    reached = dataclasses.replace(make_result().quality, reached=True)
    assert rising_warned(rising, quality=reached) == []


def falling(steps: int = 400, noise: float = 0.02, seed: int = 0) -> list[float]:
    chance = random.Random(seed)
    return [0.4 + 0.3 * math.exp(-step / 50) + chance.gauss(0, noise) for step in range(steps)]


def test_a_loss_that_fell_did_not_rise() -> None:
    for seed in range(300):
        assert metrics.risen_loss(falling(seed=seed)) is None
        assert metrics.risen_loss(falling(seed=seed, noise=0.2)) is None
        flat = [random.Random(seed + step * 1000).gauss(0.693, 0.01) for step in range(300)]
        assert metrics.risen_loss(flat) is None


def test_losses_near_nothing_vary() -> None:
    """A fitted classifier: 0.001 and 0.003 are the same loss to one that began at 0.7."""
    curve = [0.7] * 40 + [0.001 + 1e-5 * (step % 3) for step in range(320)] + [0.003] * 40
    assert metrics.risen_loss(curve) is None


def test_a_loss_that_rose() -> None:
    found = metrics.risen_loss([*falling(), *(0.4 + 0.001 * step for step in range(200))])
    assert found is not None
    lowest, last = found
    assert lowest == pytest.approx(0.4, abs=0.02)
    assert last == pytest.approx(0.57, abs=0.02)
    assert metrics.risen_loss([0.5 + 0.01 * step for step in range(100)]) is not None
    assert metrics.risen_loss([0.5 + 0.01 * step for step in range(19)]) is None  # too short


def test_a_risen_loss_is_read_from_the_curve(tmp_path: Path) -> None:
    losses = [*falling(300), *[0.9] * 100]
    finished = make_result()
    folder = write_run(tmp_path, finished, losses)
    (warning,) = warnings(config(), finished, folder)
    assert "rose" in warning
    assert "0.9 in the last one" in warning
    write_run(tmp_path, finished, falling())
    assert warnings(config(), finished, folder) == []


# --- DLRM: AUC


def warned(cfg: DlrmRun, auc: float | None) -> list[str]:
    return workloads.load(cfg.workload).warnings(cfg, {"test": {"auc": auc}})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Its test split has 40,000 rows, near 30 % of them clicks: two errors of guessing are
    0.0063."""
    return write_dataset(tmp_path / "data", test_rows=40_000)


def test_the_bound_is_two_errors_of_guessing() -> None:
    """Simulated: AUCs of scores that say nothing."""
    import torch

    labels = torch.arange(200) < 40
    generator = torch.Generator().manual_seed(0)
    draws = [metrics.auc(torch.rand(200, generator=generator), labels) for _ in range(2000)]
    assert np.std(np.array(draws, float)) == pytest.approx(
        metrics.guessing_error(40, 160), rel=0.05
    )


def test_an_auc_of_many_rows(data: Path) -> None:
    cfg = config(data=str(data))
    assert warned(cfg, 0.6) == warned(cfg, 0.511) == warned(cfg, None) == []
    (near,) = warned(cfg, 0.505)
    assert "near guessing" in near
    assert "among 40,000 rows" in near
    (below,) = warned(cfg, 0.464)
    assert "worse than guessing" in below


def test_an_auc_that_a_column_gives_away(data: Path) -> None:
    cfg = config(data=str(data))
    (warning,) = warned(cfg, 0.9995)
    assert "0.9995" in warning
    assert "may tell the label" in warning
    assert "--importance" in warning
    assert warned(cfg, 0.9985) == []  # as well as diamonds' prices are known


@pytest.mark.parametrize(("clicks", "which"), [(0, "no row"), (1, "every row")])
def test_an_auc_of_one_label(clicks: int, which: str, data: Path) -> None:
    np.full(40_000, clicks, np.bool_).tofile(data / "test/label.bin")
    cfg = config(data=str(data))
    (warning,) = warned(cfg, None)
    assert f"is undefined: {which} there is a click" in warning
    assert workloads.load(cfg.workload).warnings(cfg, {}) == []  # nothing was evaluated


def test_an_auc_of_few_rows(tmp_path: Path) -> None:
    """With 300 rows, 0.55 may be chance."""
    cfg = config(data=str(write_dataset(tmp_path / "data", test_rows=300)))
    (warning,) = warned(cfg, 0.55)
    labels = np.fromfile(tmp_path / "data/test/label.bin", np.bool_)
    clicks = int(labels.sum())
    bound = 0.5 + 2 * math.sqrt(301 / (12 * clicks * (300 - clicks)))
    assert f"up to {bound:.4f}" in warning
    assert f"{clicks} clicks among 300 rows" in warning
    assert warned(cfg, 0.65) == []


def test_the_quality_split_is_judged(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "data", validation_rows=300)
    cfg = config(data=str(folder), quality_split="validation")
    found: dict[str, Any] = {"test": {"auc": 0.9}, "validation": {"auc": 0.45}}
    (warning,) = workloads.load(cfg.workload).warnings(cfg, found)
    assert "on validation" in warning


def test_synthetic_data() -> None:
    """Uniform ids are for speed, and a note says it; planted ones can be learned."""
    assert warned(config(synthetic_ids="uniform"), 0.5) == []
    (warning,) = warned(config(synthetic_ids="planted"), 0.5)
    assert "among 4,000 rows" in warning


def test_data_that_is_gone_by_the_end(data: Path) -> None:
    cfg = config(data=str(data))
    (data / "test/label.bin").unlink()
    (warning,) = warned(cfg, 0.5)
    assert "near guessing" in warning
    assert warned(cfg, 0.7) == []


# --- DLRM: rare ids


def rare(data: Path, shares: dict[str, float]) -> list[str]:
    features = {name: {"rare_share": share} for name, share in shares.items()}
    (data / "prepare.json").write_text(json.dumps({"features": features}))
    return warned(config(data=str(data)), 0.8)


def test_rare_ids(data: Path) -> None:
    assert rare(data, {"city": 0.1, "user": 0.0}) == []
    (warning,) = rare(data, {"city": 0.12, "day": 0.02, "user": 0.43})
    assert "2 columns: user (43%), city (12%)." in warning
    assert "--frequency-threshold" in warning
    (many,) = rare(data, {f"c{number}": 0.5 for number in range(8)})
    assert "c4 (50%) and 3 more." in many


@pytest.mark.parametrize("text", ["{}", '{"features": 3}', '{"features": {"a": {}}}'])
def test_a_preparation_that_does_not_tell(data: Path, text: str) -> None:
    """As of datasets of other systems: no warning, and no result lost."""
    (data / "prepare.json").write_text(text)
    assert warned(config(data=str(data)), 0.8) == []


def test_rare_values_of_a_prepared_log(tmp_path: Path) -> None:
    """From the file to the warning: half of the users come once."""
    lines = [f"{row % 3 == 0:d},{row if row % 2 else 'often'},x" for row in range(2000)]
    (tmp_path / "log.csv").write_text("\n".join(["click,user,site", *lines]) + "\n")
    words = ["prepare", "csv", "--input", str(tmp_path / "log.csv"), "--columns"]
    words += ["label=click categorical=user,site", "--frequency-threshold", "2"]
    assert main([*words, "--output", str(tmp_path / "data")]) == 0
    (warning,) = warned(config(data=str(tmp_path / "data")), 0.9)
    assert "1 column: user (50%)." in warning


# --- where they are told


def test_a_run_is_warned_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the result, on the terminal (a line each, before the JSON), and on the page."""
    folder = write_dataset(tmp_path / "data")
    flags = ("--data", str(folder), "--model.table-rows", *map(str, named_rows()))
    assert train(tmp_path / "run", *flags, "--target", "0.99") == 0
    found = result(tmp_path / "run")["warnings"]
    assert any("2 steps only" in text for text in found)
    assert any("The AUC on test" in text for text in found)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("Warning")] == [
        f"Warning: {text}" for text in found
    ]
    assert json.loads(lines[-1])["run"] == "dlrm-demo"
    page = reports.report([tmp_path / "run"]).read_text()
    assert page.index("2 steps only") < page.index("<h2")


def named_rows() -> tuple[int, ...]:
    run: Any = workloads.named_run("dlrm-demo")
    rows: tuple[int, ...] = run.model.table_rows
    return rows


def test_a_page_of_several_runs_names_the_one(tmp_path: Path) -> None:
    good = write_run(tmp_path / "good", make_result())
    bad = write_run(tmp_path / "bad", make_result(warnings=["AUC < 0.5."]))
    page = reports.report([good, bad], tmp_path / "page.html").read_text()
    assert page.index("dlrm-demo (bad): AUC &lt; 0.5.") < page.index("<h2")
    assert "Warnings" not in reports.report([good]).read_text()


def test_a_workload_without_warnings_of_its_own() -> None:
    for name in ("distilbert-demo", "llama3-demo"):
        cfg: Run = workloads.named_run(name)
        assert workloads.load(cfg.workload).warnings(cfg, {"test": {"loss": 1.0}}) == []
