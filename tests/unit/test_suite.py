"""`suite` checks all cases first, runs what this machine can, goes on after failures and stops."""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.small import FLAGS, newest, result, snapshot
from tests.unit.refusals import refused
from tests.unit.results import make_result, write_run
from tests.waiting import wait_until
from trainmark.cli import main
from trainmark.hardware import devices
from trainmark.verbs import attempt

SMALL = " ".join(FLAGS)
Suite = Callable[..., int]


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    """`trainmark suite` over cases that are given as dictionaries; the exit code."""

    def run(*cases: dict[str, object], flags: tuple[str, ...] = ()) -> int:
        return main([*written(tmp_path, *cases), *flags])

    return run


def written(folder: Path, *cases: dict[str, object]) -> list[str]:
    """The words after `trainmark`, the file being written."""
    path = folder / "cases.toml"
    lines = [
        "\n".join(["[[case]]", *(f"{key} = {json.dumps(value)}" for key, value in case.items())])
        for case in cases
    ]
    path.write_text("\n".join(lines))
    return ["suite", str(path), "--output", str(folder / "out")]


def case(**changes: object) -> dict[str, object]:
    return {"run": "dlrm-demo", "case": "cpux1x1", "flags": SMALL} | changes


class Here:
    """`train` in this process instead of one of its own; some cases fail."""

    def __init__(self, **failures: str) -> None:
        self.started: list[str] = []
        self.commands: dict[str, list[str]] = {}
        self.failures = failures

    def __call__(self, command: list[str], log: Path) -> "subprocess.CompletedProcess[str]":
        self.started.append(log.stem)
        self.commands[log.stem] = command[command.index("trainmark") + 1 :]
        if log.stem in self.failures:
            return subprocess.CompletedProcess(command, 2, self.failures[log.stem])
        arguments = command[command.index("train") :]
        return subprocess.CompletedProcess(command, main(arguments), "")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    monkeypatch.setenv("COLUMNS", "250")
    found = Here()
    monkeypatch.setattr(attempt, "_start", found)
    monkeypatch.setattr(devices, "accelerators", list)
    return found


def rows(out: str) -> dict[str, list[str]]:
    """The cells of the last table printed, by the first."""
    table = out[out.rindex("┃ name") :]
    lines = [line for line in table.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    return {row[0]: row[1:] for row in cells}


def last_line(out: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(out.splitlines()[-1])
    return found


# --- what is wrong is told at once


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (None, "does not exist"),
        ("[[case]\n", "cannot be read"),
        ("", "must be a list of [[case]], each with 'run' and 'case'. Received: nothing."),
        ("case = 3\n", "must be a list of [[case]]"),
        ("case = []\n", "must be a list of [[case]]"),
        ('[[cases]]\nrun = "dlrm-demo"\n', "Received: cases."),
        ("case = [3]\n", "case 1: "),
    ],
)
def test_a_file_without_cases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, part: str
) -> None:
    path = tmp_path / "cases.toml"
    if text is not None:
        path.write_text(text)
    refused(capsys, ["suite", str(path), "--output", str(tmp_path / "out")], part, lines=None)


def test_all_problems_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], here: Here
) -> None:
    cases: list[dict[str, object]] = [
        case(name="fine"),
        {"case": "cpux1x1"},
        case(run="dlrm-dem"),
        case(name="typo", flags="--max-step 3", case="h1000x1x1"),
        case(name="quote", flags="--data 'x"),
        case(name="none", repeats=0),
        case(name="seeds", repeats=11111111),
        case(name="wrong", flags="--lr -1 --epochs 0", colour="red"),
        case(name="values", flags="--lr -1 --epochs 0"),
        case(name="many", repeats="three"),
        case(name="ours", flags="--output x --dry_run --cluster cpux1x1 --fresh --repeats 2"),
        case(name="help", flags="--help"),
        case(name="../up"),
        case(name="device", flags="--device cuda"),
        case(name="twice"),
        case(name="twice", run="llama3-demo", flags=""),
    ]
    message = refused(capsys, written(tmp_path, *cases), lines=None)
    for name, part in (
        ("2", "run is missing"),
        ("dlrm-dem-cpux1x1", "Unknown run 'dlrm-dem'. Did you mean 'dlrm-demo'?"),
        ("typo", "Unknown hardware 'h1000'"),
        ("typo", "Unrecognized options: --max-step"),
        ("quote", "flags cannot be read: No closing quotation"),
        ("none", "repeats must be at least 1. Received: 0."),
        ("seeds", "repeats must be at most 1,000. Received: 11111111."),
        ("wrong", "colour is not a known key"),
        ("values", "2 problems:\n  - lr must be at least 0"),
        ("many", "repeats: "),
        ("ours", "5 problems:\n  - flags cannot have --output: its folder is OUTPUT/NAME."),
        ("help", "flags cannot have --help"),
        ("../up", "the name is that of a folder"),
        ("device", "it is for cpux1x1, but its flags say --device cuda."),
        ("twice", "2 cases have this name"),
    ):
        told = [text for text in message.split("\n- ") if text.startswith(f"case {name}: ")]
        assert any(part in text for text in told), (name, part, message)
    assert "case fine" not in message
    assert here.started == []
    assert not (tmp_path / "out").exists()


# --- where it is run


def test_what_is_for_other_hardware_is_skipped(
    suite: Suite,
    here: Here,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "accelerators", lambda: ["h100", "h100", "brand-new"])
    monkeypatch.setattr(attempt, "_start", Here(pair="trainmark: No.", new="trainmark: No."))
    code = suite(
        case(name="alone", run="dlrm-small", case="a100-40gx1x1", flags="--data /not/here"),
        case(name="many", case="h100x1x4", flags=""),
        case(name="mixed", case="h100x1x3", flags=""),
        case(name="nodes", run="dlrm-mlperf", case="h100x2x8", repeats=3, flags="--data 'a b'"),
        case(name="pair", case="H100x1x2", flags="--data synthetic"),
    )
    out = capsys.readouterr().out
    assert code == 1
    table = rows(out)
    assert {name: row[0] for name, row in table.items()} == {
        "alone": "skipped", "many": "skipped", "mixed": "skipped", "nodes": "skipped",
        "pair": "failed",
    }  # fmt: skip
    assert table["nodes"][1:3] == ["dlrm-mlperf", "h100x2x8"]
    has = "and this machine has 2 x h100, 1 x brand-new."
    assert f"case alone: it is for a100-40gx1x1, {has}" in out
    assert f"case many: it is for h100x1x4, {has}" in out
    launch = "trainmark launch --on slurm -j 2x8 train dlrm-mlperf --data 'a b' --repeats 3"
    assert f"{launch} --output {tmp_path / 'out' / 'nodes'}" in out
    assert last_line(out) == {"report": None, "done": 0, "skipped": 4, "failed": 1}


def test_several_devices_and_hardware_without_a_data_sheet(
    suite: Suite, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "accelerators", lambda: ["brand-new", "brand-new"])
    here.failures = {"gpus": "trainmark: No.", "ranks": "trainmark: No."}
    flags = "--global-batch 1024"
    assert suite(
        case(name="gpus", case="brand-newx1x2", flags=flags),
        case(name="ranks", case="cpux1x2", flags=flags),
    )
    launch = ["launch", "--on", "torchrun", "-j", "1x2", "train", "dlrm-demo"]
    assert here.commands["gpus"][:9] == [*launch, "--global-batch", "1024"]
    assert "--device" not in here.commands["gpus"]
    assert here.commands["ranks"][9:11] == ["--device", "cpu"]


def test_a_dry_run_tells_what_fits_and_writes_nothing(
    suite: Suite, here: Here, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [
        case(name="here"),
        case(name="fits", run="dlrm-small", case="a100-40gx1x1", flags="--data synthetic"),
        case(name="large", run="dlrm-large", case="a100-40gx1x1", flags="--data synthetic"),
        case(name="cut", run="llama3-8b", case="h100x1x8", flags="--parallel PP3DP1TP1"),
    ]
    assert suite(*cases, flags=("--dry-run",)) == 0
    out = capsys.readouterr().out
    table = rows(out)
    assert table["here"][:3] == ["dlrm-demo", "cpux1x1", "run"]
    total = devices.host_memory_bytes() // 2**30
    assert table["here"][3] == f"0.0/{total}"
    assert table["fits"][2] == "skip"
    assert table["fits"][3].endswith("/40")
    assert table["large"][3].endswith("/40 OOM")
    assert table["cut"][3] == "/"
    assert "case cut: parallel PP3DP1TP1 needs 3 x 1 x 1 = 3 devices" in out
    assert f"case here: trainmark train dlrm-demo {SMALL}" in out
    assert here.started == []
    assert set(snapshot(tmp_path)) == {"cases.toml"}


# --- what is finished, what failed


def test_a_suite_goes_on_after_a_failure_and_runs_nothing_twice(
    suite: Suite, here: Here, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here.failures = {"full": "trainmark: Out of memory (CUDA).", "bad": "trainmark: No data."}
    cases = [case(name="full"), case(name="bad"), case(), case(name="seeds", repeats=2)]
    assert suite(*cases) == 1
    out = capsys.readouterr().out
    table = rows(out)
    outcomes = {name: row[0] for name, row in table.items()}
    assert outcomes == {
        "full": "OOM", "bad": "failed",
        "dlrm-demo-cpux1x1": "done", "seeds/0": "done", "seeds/1": "done",
    }  # fmt: skip
    measured = result(tmp_path / "out" / "seeds" / "1")
    assert measured["config"]["seed"] == 1
    assert table["seeds/1"][5] == f"{measured['time_s']['e2e']:.1f}"
    assert "case bad: No data." in out
    assert "case full: Out of memory (CUDA)." in out
    page = tmp_path / "out" / "report.html"
    assert last_line(out) == {"report": str(page), "done": 2, "skipped": 0, "failed": 2}
    assert "dlrm-demo (seeds/1)" in page.read_text()

    kept = snapshot(tmp_path / "out" / "seeds")
    here.failures, here.started = {}, []
    assert suite(*cases) == 0
    assert here.started == ["full", "bad"]
    assert snapshot(tmp_path / "out" / "seeds") == kept
    table = rows(capsys.readouterr().out)
    assert [row[0] for row in table.values()] == ["done"] * 5


def test_results_of_another_machine_are_rows(
    suite: Suite, here: Here, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    far = case(name="far", run="dlrm-mlperf", case="a100-80gx2x8", flags="--data /far/away")
    write_run(
        tmp_path / "out" / "far", make_result(run="dlrm-mlperf", case="a100-80gx2x8"), [0.6, 0.5]
    )
    assert suite(far) == 0
    out = capsys.readouterr().out
    assert rows(out)["far"][:3] == ["done", "dlrm-mlperf", "a100-80gx2x8"]
    assert here.started == []
    write_run(tmp_path / "out" / "far", make_result(run="dlrm-mlperf", case="a100-80gx1x8"))
    assert suite(far) == 2
    assert "far has a result of dlrm-mlperf on a100-80gx1x8" in capsys.readouterr().err


def test_other_settings_are_another_case(
    suite: Suite, here: Here, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert suite(case(name="a")) == 0
    kept = snapshot(tmp_path / "out")
    for changes, part in (
        ({"flags": f"{SMALL} --lr 0.5 --max-steps 3"}, "with other settings (lr, max_steps"),
        ({"run": "llama3-demo", "flags": ""}, "a result of dlrm-demo on cpux1x1"),
        ({"repeats": 2}, "holds a single run"),
    ):
        capsys.readouterr()
        assert suite(case(name="b"), case(name="a", **changes)) == 2
        message = capsys.readouterr().err
        assert message.startswith("trainmark: case a: ")
        assert part in message
        assert "Give the case another name." in message
    assert here.started == ["a"]
    assert snapshot(tmp_path / "out") == kept
    # How a run is watched is no setting of it.
    assert suite(case(name="a", flags=f"{SMALL} --log-every 2")) == 0
    (tmp_path / "out" / "a" / "result.json").unlink()  # stopped, so to speak
    assert suite(case(name="a", flags=f"{SMALL} --lr 0.5")) == 2
    assert "a holds a run with another configuration (other lr)" in capsys.readouterr().err


# --- real processes


def test_ctrl_c_saves_the_case_and_the_same_command_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endless = f"{SMALL} --log-every 1 --epochs 100000"
    cases = [case(name="long", flags=endless), case(name="next")]
    output = tmp_path / "out"
    log = output / "long.log"

    def stop() -> None:
        wait_until(lambda: log.is_file() and "step " in log.read_text())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=stop)
    thread.start()
    assert main(written(tmp_path, *cases)) == 130
    thread.join()
    printed = capsys.readouterr()
    assert "Stopped by request, saved" in printed.err
    assert printed.err.endswith("trainmark: stopped; the same command goes on where it was.\n")
    assert not (output / "next").exists()
    step = int(newest(output / "long").name.removeprefix("step-"))
    assert step > 0

    cases[0]["flags"] = f"{endless} --max-steps {step + 3}"  # or it would go on for a long time
    assert main(written(tmp_path, *cases)) == 0
    printed = capsys.readouterr()
    assert "case 2 of 2, next" in printed.err
    page = output / "report.html"
    assert last_line(printed.out) == {"report": str(page), "done": 2, "skipped": 0, "failed": 0}
    first, second = result(output / "long"), result(output / "next")
    assert first["steps"]["all"] == step + 3
    assert any("Continued 1 time" in note for note in first["notes"])
    assert second["samples"] == 4000
    assert "dlrm-demo (next)" in page.read_text()
