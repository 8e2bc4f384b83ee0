"""`align` reads what the field writes, and judges by the published rule."""

import json
from pathlib import Path

import pytest

from trainmark.cli import main
from trainmark.errors import InputError
from trainmark.report import reports
from trainmark.report.tables import result_grid
from trainmark.run import alignment
from trainmark.run.alignment import FIRST_STEP, compare, read_curve, sentence
from trainmark.run.result import Aligned

MEGATRON = (
    " [2024-05-01 10:00:00] iteration {step:8d}/{total:8d} | consumed samples: {samples:12d} | "
    "elapsed time per iteration (ms): 1234.5 | learning rate: 1.000000E-05 | global batch size:   "
    "512 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations:"
    "   0 | number of nan iterations:   0 |"
)


def write_csv(path: Path, losses: dict[int, float]) -> Path:
    lines = ["step,samples,loss", *(f"{s},{s * 512},{loss!r}" for s, loss in losses.items())]
    path.write_text("\n".join(lines) + "\n")
    return path


def curve(factor: float = 1.0) -> dict[int, float]:
    return {step: factor * (10 - step / 10) for step in range(1, 51)}


# --- align


def test_every_kind_of_reference_gives_the_same_curve(tmp_path: Path) -> None:
    wanted = curve()
    lines = [MEGATRON.format(step=s, total=300, samples=512 * s, loss=y) for s, y in wanted.items()]
    (tmp_path / "megatron.log").write_text("training ...\n" + "\n".join(lines))
    events = [{"key": "global_batch_size", "value": 512, "metadata": {}}]
    events += [
        {"key": "train_loss", "value": y, "metadata": {"samples_count": 512 * s}}
        for s, y in wanted.items()
    ]
    stats = [
        {"key": "tracked_stats", "value": {"train_loss": y}, "metadata": {"step": s}}
        for s, y in wanted.items()
    ]
    for name, found in (("mlperf.log", events), ("stats.log", stats)):
        text = "\n".join(f":::MLLOG {json.dumps(event)}" for event in found)
        (tmp_path / name).write_text(f"start\n{text}\n:::MLLOG {{cut")
    write_csv(tmp_path / "loss.csv", wanted)
    for name in ("megatron.log", "mlperf.log", "stats.log", "loss.csv", "."):
        assert read_curve(tmp_path / name) == pytest.approx(wanted, rel=1e-6), name


def test_the_rule_is_the_published_one() -> None:
    early = curve() | dict.fromkeys(range(1, FIRST_STEP), 99.0)  # does not count
    assert compare(early, curve(), "x").error == 0
    assert compare(curve(1.0199), curve(), "x").passed
    above = compare(curve(1.0201), curve(), "x")
    assert not above.passed
    assert above.error == pytest.approx(0.0201)
    assert above.steps == 30
    assert "not aligned" in sentence(above)


def test_align_writes_a_page_and_exits_by_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    write_csv(folder / "loss.csv", curve())
    good = write_csv(tmp_path / "good.csv", curve(1.01))
    bad = write_csv(tmp_path / "bad.csv", curve(1.1))
    assert main(["align", str(folder), str(good)]) == 0
    assert "aligned with" in capsys.readouterr().out
    assert "<svg" in (folder / "alignment.html").read_text()
    known = alignment.known(folder)
    assert known is not None
    assert known == Aligned(reference=str(good), error=known.error, passed=True)
    assert known.error == pytest.approx(1 - 1 / 1.01)
    assert main(["align", str(folder), str(bad)]) == 1
    found = alignment.known(folder)
    assert found is not None
    assert not found.passed
    write_csv(folder / "loss.csv", curve(1.1))  # another run in its place: nothing is known of it
    assert alignment.known(folder) is None
    (folder / "alignment.json").write_text("{}")
    with pytest.raises(InputError, match="Run 'trainmark align' again"):
        alignment.known(folder)


FLAGS = ["--device", "cpu", "--evals-per-epoch", "0", "--warmup-clock", "1", "--log-every", "5"]
FLAGS += ["--checkpoint-every", "never", "--synthetic-samples", "400"]


def test_the_verdict_gets_into_the_result_by_train_and_into_the_report_by_both(
    tmp_path: Path,
) -> None:
    """`train` alone writes result.json; `align` leaves it as it is."""
    run, other = tmp_path / "run", write_csv(tmp_path / "other.csv", curve())
    assert train(run, "--max-steps", "22") == 0
    before = (run / "result.json").read_text()
    assert json.loads(before)["aligned"] is None
    assert main(["align", str(run), str(other)]) == 1
    assert (run / "result.json").read_text() == before
    assert report_says_aligned(run) == "no"

    again = tmp_path / "again"
    assert train(again, "--max-steps", "22", "--reference", str(run)) == 0
    assert json.loads((again / "result.json").read_text())["aligned"] == {
        "reference": str(run), "error": 0.0, "passed": True,
    }  # fmt: skip
    assert report_says_aligned(again) == "yes"


def train(output: Path, *flags: str) -> int:
    return main(["train", "llama3-demo", *FLAGS, "--output", str(output), *flags])


def report_says_aligned(folder: Path) -> str:
    grid = result_grid([run.result for run in reports._load([folder])])
    return dict(zip(grid.headers, grid.rows[0], strict=True))["aligned"]


def test_a_reference_is_read_first_and_a_short_run_says_so(tmp_path: Path) -> None:
    assert train(tmp_path / "run", "--max-steps", "2", "--reference", str(tmp_path / "no")) == 2
    assert not (tmp_path / "run").exists()
    reference = write_csv(tmp_path / "loss.csv", curve())
    assert train(tmp_path / "run", "--max-steps", "2", "--reference", str(reference)) == 0
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found["aligned"] is None
    assert any("no step from 21 on in common" in note for note in found["notes"])


def test_align_says_what_it_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "empty.log").write_text("nothing here\n")
    for path, message in ((tmp_path / "empty.log", "has no loss"), (tmp_path / "x", "not exist")):
        with pytest.raises(InputError, match=message):
            read_curve(path)
    with pytest.raises(InputError, match="no step from 21"):
        compare({5: 1.0}, curve(), "x")
    (tmp_path / "bad.csv").write_text("step,samples,loss\n1,2\n")
    with pytest.raises(InputError, match="line 2"):
        read_curve(tmp_path / "bad.csv")
