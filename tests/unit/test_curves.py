"""What happened in training: `curves.csv`, TensorBoard, and the norms and scales in them."""

import csv
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import small_distilbert
from tests.small import STEPS, config, copies, curve, result, train, trainer
from trainmark.config import Schedule
from trainmark.errors import InputError
from trainmark.report.reports import report
from trainmark.report.training import COLUMNS
from trainmark.run.curves import CURVES, LOSS, read_curves
from trainmark.training.optimizers import norms
from trainmark.validation import parse
from trainmark.workloads.dlrm.data import build_data
from trainmark.workloads.dlrm.runs import Optimizer


def rows(output: Path) -> list[dict[str, str]]:
    with open(output / "curves.csv", newline="") as file:
        return list(csv.DictReader(file))


# --- norms


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_dlrms_norm_is_that_of_what_its_dense_weights_lose(precision: str) -> None:
    """SGD takes the gradient away, times the rate."""
    cfg = config(optimizer=Optimizer(name="sgd"), micro_batch=128, precision=precision)
    built = trainer(cfg)
    dense = {name: p.detach() for name, p in built.model.named_parameters()}
    for batch in list(build_data(cfg, "train", 0, 1))[:3]:
        before = copies(dense)
        built.step(built.prepare(batch), 0.5)
        lost = [((before[name] - dense[name]).double() / 0.5).square().sum() for name in dense]
        norm = torch.stack(lost).sum().sqrt().item()
        assert built.observed()["gradient_norm"].item() == pytest.approx(norm, rel=1e-4)
    assert ("loss_scale" in built.observed()) == (precision == "fp16")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_distilberts_norm_is_pytorchs(precision: str) -> None:
    cfg = small_distilbert.config(precision=precision)
    ours = small_distilbert.trainer(cfg)
    for batch in small_distilbert.batches(cfg)[:3]:
        ours.step(ours.prepare(batch), 1e-3)
        norm = torch.nn.utils.get_total_norm(small_distilbert.gradients(ours).values())
        assert ours.observed()["gradient_norm"].item() == pytest.approx(norm.item(), rel=1e-5)


def test_the_norm_of_many_numbers_loses_none_of_them() -> None:
    many = torch.rand(20_000_000, generator=torch.Generator().manual_seed(1))
    assert norms([many]).item() == pytest.approx(many.double().norm().item(), rel=1e-5)


def test_a_scale_that_is_too_large_is_halved_step_by_step(tmp_path: Path) -> None:
    assert train(tmp_path / "run", "--precision", "fp16", "--lr", "0.01") == 0
    found, skipped = rows(tmp_path / "run"), result(tmp_path / "run")["steps"]["skipped"]
    assert sum(int(row["skipped"]) for row in found) == skipped
    scale = 65536.0
    for row in found:
        assert float(row["loss_scale"]) == scale
        assert math.isfinite(float(row["gradient_norm"])) == (row["skipped"] == "0")
        scale /= 2 if row["skipped"] == "1" else 1


# --- files


def test_every_step_has_a_row(finished: Path) -> None:
    """The fixture looks at the loss every 3 steps."""
    found, cfg = rows(finished), result(finished)["config"]
    assert [(int(r["step"]), int(r["samples"])) for r in found] == [r[:2] for r in curve(finished)]
    schedule = parse(Schedule, cfg["schedule"], "test")
    rates = [cfg["lr"] * schedule.factor(step) for step in range(STEPS)]
    assert [float(row["lr"]) for row in found] == rates
    assert all(float(row["gradient_norm"]) > 0 for row in found)
    assert {(row["loss_scale"], row["skipped"]) for row in found} == {("", "0")}
    looked = [row for row in found if row["time_s"]]
    assert [int(row["step"]) for row in looked] == [3, 6, STEPS]
    times = [float(row["time_s"]) for row in looked]
    assert times == sorted(times)
    assert times[-1] <= result(finished)["time_s"]["e2e"] + 0.001
    assert all(float(row["samples_per_s"]) > 0 for row in looked)


def test_rates_are_samples_over_the_time_of_steps(finished: Path) -> None:
    """Nothing else happens between these looks: no evaluation, no checkpoint."""
    first, second = [row for row in rows(finished) if row["time_s"]][:2]
    seconds = float(second["time_s"]) - float(first["time_s"])
    taken = 3 * 512 / float(second["samples_per_s"])
    assert taken <= seconds + 0.002


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of which a kill took what came after step 4, whose last rows were cut."""
    output = tmp_path_factory.mktemp("continued") / "run"
    flags = ["--tensorboard", "--log-every", "2", "--checkpoint-every", "4 steps"]
    assert train(output, *flags, "--max-steps", "4") == 0
    assert train(output, *flags, "--max-steps", "6", "--checkpoint-every", "never") == 0
    for name, torn in (("loss.csv", "7,35"), ("curves.csv", "7,3584,0.1,0.3")):
        with open(output / name, "a") as file:
            file.write(torn)
    assert train(output, *flags) == 0
    return output


def test_a_continued_run_has_each_step_once(continued: Path, finished: Path) -> None:
    assert "Continued 1 time(s)" in " ".join(result(continued)["notes"])
    assert curve(continued) == curve(finished)
    known = CURVES.columns[:6]
    assert [[row[name] for name in known] for row in rows(continued)] == [
        [row[name] for name in known] for row in rows(finished)
    ]


@pytest.mark.parametrize("name", ["finished", "continued"])
def test_tensorboard_has_the_same(name: str, request: pytest.FixtureRequest) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    output: Path = request.getfixturevalue(name)
    events = EventAccumulator(str(output / "tensorboard"))
    events.Reload()

    def drawn(tag: str) -> list[tuple[int, Any]]:
        return [(event.step, pytest.approx(event.value)) for event in events.Scalars(tag)]

    found = rows(output)
    assert [(step, loss) for step, _, loss in curve(output)] == drawn("loss")
    expected = [(int(row["step"]), float(row["gradient_norm"])) for row in found]
    assert expected == drawn("gradient_norm")
    for tag in ("lr", "time_s", "samples_per_s"):
        looks = [(int(row["step"]), float(row[tag])) for row in found if row["time_s"]]
        assert len(looks) == len(drawn(tag))
    assert events.Scalars("test/auc")[-1].step == STEPS


def test_columns_are_read_as_curves(tmp_path: Path) -> None:
    (tmp_path / "curves.csv").write_text(
        f"{CURVES.header}\n1,10,0.1,2.0,,0,,,\n2,20,0.2,inf,,1,,,\n3,30,0.3,4.0,,1,7.5,80,300\n"
    )
    found = read_curves(tmp_path / "curves.csv")
    points = {name: [(p.x, p.y) for p in one.points] for name, one in found.items()}
    assert points == {
        "lr": [(10, 0.1), (20, 0.2), (30, 0.3)],
        "gradient_norm": [(10, 2.0), (30, 4.0)],
        "skipped": [(10, 0), (20, 1), (30, 2)],
        "samples_per_s": [(7.5, 80)],
        "power_w": [(7.5, 300)],
    }
    assert found["gradient_norm"].not_finite == 1
    assert read_curves(tmp_path / "none.csv") == {}
    with open(tmp_path / "curves.csv", "a") as file:
        file.write("\n")
    assert read_curves(tmp_path / "curves.csv").keys() == found.keys()


@pytest.mark.parametrize("row", ["1,2", "1,,0.1,2,,0,,,", "1,2,x,2,,0,,,"])
def test_a_row_that_is_none_is_named(tmp_path: Path, row: str) -> None:
    (tmp_path / "curves.csv").write_text(f"{CURVES.header}\n{row}\n")
    with pytest.raises(InputError, match=r"curves.csv, line 2: expected step,samples,lr"):
        read_curves(tmp_path / "curves.csv")


def test_what_is_no_row_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / "loss.csv").write_text("step,samples,loss\n1,10,0.5\n,20,0.4\n2\n\n3,30,0.3\n2,20,")
    LOSS.begin(tmp_path, 2).close()
    assert (tmp_path / "loss.csv").read_text() == "step,samples,loss\n1,10,0.5\n"


# --- on the page


def test_the_page_draws_what_was_recorded(tmp_path: Path, finished: Path) -> None:
    scaled = tmp_path / "scaled"
    assert train(scaled, "--precision", "fp16", "--log-every", "2") == 0
    older = tmp_path / "older"
    shutil.copytree(finished, older)
    (older / "curves.csv").unlink()

    def drawn(*folders: Path) -> list[str]:
        text = report(folders, tmp_path / "page.html").read_text()
        return re.findall("<title>([^<]*) over (?:samples|seconds)</title>", text)

    always = ["gradient norm", "learning rate", "samples/s"]
    assert [name for name in drawn(finished) if name in COLUMNS.values()] == always
    assert not set(drawn(older)) & set(COLUMNS.values())
    every = [name for name in COLUMNS.values() if name != "power in W"]
    assert [name for name in drawn(scaled, older, finished) if name in COLUMNS.values()] == every
