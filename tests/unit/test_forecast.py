"""What was predicted of a run, in its result, on its page, and over many results."""

import dataclasses
import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.small import train
from tests.small_distilbert import FLAGS as DISTILBERT
from tests.unit.results import make_predicted, make_result, write_run
from tests.unit.without_torch import run_without_torch
from trainmark import __version__, workloads
from trainmark.cli import main
from trainmark.hardware.devices import Cluster
from trainmark.hardware.memory import MemoryPlan
from trainmark.report import forecasts, reports
from trainmark.run import result
from trainmark.run.forecast import forecast
from trainmark.run.result import Memory
from trainmark.workloads import resolve
from trainmark.workloads.dlrm import definition as dlrm
from trainmark.workloads.dlrm.network import Model
from trainmark.workloads.dlrm.step_time import predict

NEEDED = MemoryPlan(weights=1, gradients=2, optimizer=3, activations=4)


def resolved(name: str, cluster: str, **changes: Any) -> Any:
    run = dataclasses.replace(workloads.named_run(name), data="synthetic", **changes)
    return resolve(run, Cluster.parse(cluster))


def test_a_linear_output_of_the_bottom_mlp_saves_a_mask() -> None:
    relu, linear = (
        predict(resolved("dlrm-small", "h200x1x1", model=model)).step_s
        for model in (Model(), Model(bottom_output="linear"))
    )
    assert relu is not None
    assert linear is not None
    assert 0.95 * relu < linear < relu


# --- in the result


@pytest.mark.parametrize(
    ("name", "cluster", "changes"),
    [
        ("dlrm-large", "a100-80gx1x8", {}),
        ("llama3-8b", "a100-80gx1x8", {"parallel": "PP2DP4TP1"}),
    ],
)
def test_a_forecast_is_the_plan(name: str, cluster: str, changes: dict[str, Any]) -> None:
    cfg = resolved(name, cluster, **changes)
    make_plan = workloads.definition(cfg).plan
    assert make_plan is not None
    plan = make_plan(cfg, Cluster.parse(cluster))
    found = forecast(cfg, Cluster.parse(cluster), NEEDED)
    assert found.step_s == plan.step_s
    assert found.step_s == pytest.approx(sum(found.parts.values()))
    assert found.p_train == pytest.approx(cfg.global_batch / (found.step_s or 1))
    assert found.memory_bytes == max(device.total for device in plan.memory)
    assert found.memory_bytes == sum(found.memory_parts.values())
    assert found.bound_by
    assert found.reason is None
    assert found.planner == f"trainmark {__version__}"
    assert found.constants
    assert any("A100" in source for source in found.sources)


def test_without_a_prediction_there_is_a_reason() -> None:
    found = forecast(resolved("distilbert-sst2", "cpux1x1"), Cluster.parse("cpux1x1"), NEEDED)
    assert (found.step_s, found.p_train, found.parts) == (None, None, {})
    assert found.reason == "distilbert has no prediction of times on CPUs"
    assert found.interval_s is None
    cpu = forecast(resolved("dlrm-demo", "cpux1x1"), Cluster.parse("cpux1x1"), NEEDED)
    assert cpu.step_s is None
    assert "'cpu' are not known" in (cpu.reason or "")


def test_a_prediction_that_fails_is_no_failure_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> Any:
        raise ZeroDivisionError("nothing to divide by")

    broken = dataclasses.replace(dlrm.DLRM, plan=fails)
    monkeypatch.setitem(workloads.DEFINITIONS, "dlrm", broken)
    assert train(tmp_path) == 0
    found = result.read(tmp_path).predicted
    assert found is not None
    assert found.reason == "the prediction failed (ZeroDivisionError: nothing to divide by)"
    assert (found.memory_bytes or 0) > 0


def test_every_run_writes_one_down(tmp_path: Path) -> None:
    words = ["train", "distilbert-demo", *DISTILBERT, "--output", str(tmp_path)]
    assert main(words) == 0
    found = result.read(tmp_path).predicted
    assert found is not None
    assert found.reason == "distilbert has no prediction of times on CPUs"
    assert found.memory_bytes == sum(found.memory_parts.values()) > 0


# --- beside what was measured


def on_gpu(allocated: int) -> Memory:
    return Memory(peak_bytes=2 * allocated, allocated_peak_bytes=allocated, total_bytes=2**40,
                  host_peak_bytes=1)  # fmt: skip


def test_the_page_shows_both(tmp_path: Path) -> None:
    """45 s of 900 steps: 50 ms each, of which 5.56 are waiting; 40 ms were predicted."""
    predicted = make_predicted(interval_s=(0.036, 0.046))
    folder = write_run(tmp_path / "run", make_result(predicted=predicted, memory=on_gpu(2000)))
    page = reports.report([folder], None).read_text()
    for words in ("Predicted and measured", "40.00 ms (36.00 to 46.00)", "50.00 ms", "-20.0 %",
                  "25.0 k", "20.0 k", "+25.0 %", "-50.0 %", "matmul of peak 0.5",
                  "a datasheet"):  # fmt: skip
        assert words in page, words
    assert "The step took 10.00 ms more than predicted. It waited 5.56 ms for input" in page
    assert "dense at 1.15 times its prediction would be the rest." in page
    both = [folder, write_run(tmp_path / "older", make_result())]
    assert "-20.0 %" in reports.report(both, tmp_path / "both.html").read_text()


def test_the_page_leaves_out_what_was_not_predicted(tmp_path: Path) -> None:
    predicted = make_predicted(step_s=None, p_train=None, reason="no peak is known")
    folder = write_run(tmp_path / "run", make_result(predicted=predicted))
    page = reports.report([folder], None).read_text()
    assert "No time was predicted: no peak is known." in page
    assert page.count("time per step") == 0
    assert "1000 bytes" in page


def test_on_a_cpu_no_memory_is_compared() -> None:
    found = forecasts.memory(make_result(predicted=make_predicted()))
    assert (found.predicted, found.measured, found.off) == (1000, None, None)


def test_the_errors_of_many_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    steps = [0.040, 0.055, 0.049, 0.0]  # of 0.050; the last has none
    for i, step_s in enumerate(steps):
        known = make_predicted(step_s=step_s or None, reason=None if step_s else "the moon is full")
        folder = tmp_path / f"[bold]{i}"
        write_run(folder, make_result(predicted=known, memory=on_gpu(1000 + 10 * i)))
    llama = make_predicted(step_s=0.0505)
    write_run(tmp_path / "llama", make_result(predicted=llama, workload="llama3"))
    write_run(tmp_path / "old", make_result())
    write_run(tmp_path / "odd", make_result())
    (tmp_path / "odd" / result.FILE_NAME).write_text("{}")
    assert main(["plan", "--check", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    off = [step / 0.05 - 1 for step in steps[:3]]
    rows = [" ".join(line.split()) for line in out.splitlines()]
    signed, unsigned = statistics.median(off), statistics.median(map(abs, off))
    assert rows[2].startswith(
        f"dlrm time per step 3 {100 * signed:+.1f} % {100 * unsigned:.1f} % -20.0 % /"
    )
    assert rows[2].endswith("/[bold]0")  # the folder
    assert rows[3].startswith(f"dlrm memory 4 -1.5 % 1.5 % {100 * (1000 / 1030 - 1):+.1f} % /")
    assert rows[3].endswith("/[bold]3")
    assert rows[4].startswith("llama3 time per step 1 +1.0 % 1.0 % +1.0 %")
    assert rows[5] == "llama3 memory 0 — — —"
    assert rows[6].startswith("all time per step 4 ")
    assert "Results without a prediction, which are older: 1." in out
    assert "Without a predicted time: 1 of 5, because the moon is full." in out
    assert "Results that cannot be read: 1, such as" in out


def test_nothing_to_check_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "old", make_result())
    assert main(["plan", "--check", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "has a prediction. Results without a prediction, which are older: 1." in told
    assert len(told.splitlines()) == 1
    assert main(["plan", "--check", str(tmp_path / "none")]) == 2
    assert "is not there" in capsys.readouterr().err
    assert main(["plan", "dlrm-demo", "--check", str(tmp_path)]) == 2
    assert "--check needs no RUN" in capsys.readouterr().err


def test_a_check_needs_no_torch(tmp_path: Path) -> None:
    write_run(tmp_path, make_result(predicted=make_predicted()))
    run_without_torch(["plan", "--check", str(tmp_path)])
