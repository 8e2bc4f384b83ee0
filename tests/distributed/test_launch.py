"""`trainmark launch --on torchrun` with real ranks: ends well, fails clearly, restarts, stops."""

import json
from pathlib import Path

import pytest

from tests.distributed.launching import (
    ENDLESS,
    ROOT,
    SHORT,
    assert_trained_like_one_process,
    check_torchx,
    finish,
    start,
    status,
    stopped_by_ctrl_c,
)
from tests.waiting import wait_until
from trainmark.checkpoint import checkpoints, folders
from trainmark.cli import main
from trainmark.distributed.launched import LOST_RANK

TORCHRUN = ["launch", "--on", "torchrun", "-j", "1x2"]


def launch_short(output: Path, *flags: str) -> list[str]:
    """The launch line of the short run."""
    return [*TORCHRUN, *flags, *SHORT, "--output", str(output)]


def sentences(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("trainmark: ")]


@pytest.mark.parametrize(
    ("how", "code", "first", "then"),
    [
        ("input", 2, ": The shard of this rank is damaged", "rank 1 ended with exit code 2"),
        pytest.param(
            *("crash", 1, ": a bug in the last rank", "rank 1 ended with exit code 1"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("memory", 2, ": Out of memory ([enforce fail at", "rank 1 ended with exit code 2"),
            marks=pytest.mark.slow,
        ),
        pytest.param("kill", 137, "was killed by SIGKILL", None, marks=pytest.mark.slow),
        ("kill-unseen", 137, "was killed by SIGKILL", None),
    ],
)
def test_a_dead_rank_stops_the_job_with_its_own_error_first(
    tmp_path: Path, how: str, code: int, first: str, then: str | None
) -> None:
    output = tmp_path / "run"
    module = f"tests.distributed.broken_rank {how}"
    done = finish(start(launch_short(output), ROOT, module))
    assert done.returncode == code
    told = sentences(done.stderr)
    assert told[0].startswith("trainmark: rank 1 ")
    assert first in told[0]
    assert len(told) == (1 if then is None else 2), told
    if then:
        assert then in told[1]
    assert ("Traceback" in done.stderr) == (how == "crash")
    assert "Connection closed" not in done.stderr  # what rank 0 saw of it explains nothing
    assert not (output / "result.json").exists()
    assert folders.latest(output / "checkpoints").name == "step-00000004"  # type: ignore[union-attr]


def test_a_stopped_rank_ends_the_job(tmp_path: Path) -> None:
    """It breaks no connection, and answers no signal."""
    output = tmp_path / "run"
    done = finish(start(launch_short(output), ROOT, "tests.distributed.broken_rank stop"))
    assert done.returncode == LOST_RANK
    told = sentences(done.stderr)
    assert len(told) == 2, told
    assert "rank 1 has not been heard of for " in told[0]
    assert "rank 0 ended with exit code 75" in told[1]
    assert "Traceback" not in done.stderr
    assert folders.latest(output / "checkpoints").name == "step-00000004"  # type: ignore[union-attr]


def test_a_restart_continues_from_the_last_checkpoint(tmp_path: Path) -> None:
    output = tmp_path / "run"
    line = launch_short(output, "--max-restarts", "1")
    done = finish(start([*line, "--fresh"], ROOT, "tests.distributed.broken_rank kill"))
    assert done.returncode == 0, done.stderr
    assert "step-00000004 at step 4" in done.stderr
    assert_trained_like_one_process(output, tmp_path)
    result = json.loads((output / "result.json").read_text())
    assert result["case"] == "cpux1x2"
    assert result["samples"] == 150
    assert result["steps"]["all"] == 10
    assert "Continued 1 time(s)" in " ".join(result["notes"])


def test_a_detached_job_is_found_again_and_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*TORCHRUN, "--detach", *ENDLESS, "--output", "run"]) == 0
    command, handle = capsys.readouterr().out.splitlines()
    assert " torchrun --nnodes 1 --nproc-per-node 2 --standalone" in command
    curve = tmp_path / "run" / "loss.csv"
    wait_until(lambda: curve.exists() and len(curve.read_text().splitlines()) > 3)
    assert status(handle, capsys).startswith(f"{handle}: RUNNING; started 20")
    assert main(["launch", "logs", handle]) == 0
    assert "step 1  loss" in capsys.readouterr().out
    assert main(["launch", "stop", handle]) == 0
    assert main(["launch", "logs", handle, "--follow"]) == 143
    log = capsys.readouterr().out
    assert log.count("Stopped by request, saved") == 1
    assert "Traceback" not in log
    assert f"{handle}: FAILED, exit code 143" in status(handle, capsys)
    saved = folders.latest(tmp_path / "run" / "checkpoints")
    assert saved is not None
    checkpoints.verify(saved)
    assert main(["launch", "stop", handle]) == 2
    assert "has ended already" in capsys.readouterr().err


@pytest.mark.slow
def test_torchx_runs_two_machines_on_this_one(tmp_path: Path) -> None:
    pytest.importorskip("torchx")
    check_torchx(tmp_path, "-j", "2x1")


@pytest.mark.slow
def test_ctrl_c_saves(tmp_path: Path) -> None:
    done = stopped_by_ctrl_c([*TORCHRUN], tmp_path)
    assert done.returncode == 130
    assert done.stderr.count("Stopped by request, saved") == 1
