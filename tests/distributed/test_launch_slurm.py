"""`trainmark launch` on a real SLURM of two nodes, directly and through TorchX."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed import slurm_cluster
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
from trainmark.checkpoint import folders
from trainmark.cli import main

SLURM = ["launch", "--on", "slurm"]


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if reason := slurm_cluster.missing():
        pytest.skip(reason)
    with (
        slurm_cluster.cluster(tmp_path_factory.mktemp("slurm")) as variables,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        yield


def test_two_nodes_train_like_one_process(tmp_path: Path) -> None:
    line = [*SLURM, "-j", "2x1", "--sbatch", "comment=a test", *SHORT, "--output", "run"]
    done = finish(start(line, tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "#SBATCH --nodes=2\n" in done.stdout
    assert "#SBATCH '--comment=a test'\n" in done.stdout
    assert "step 10  loss" in done.stdout  # the log was followed
    assert_trained_like_one_process(tmp_path / "run", tmp_path)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["case"] == "cpux2x1"
    (script,) = (tmp_path / "runs" / "launch").glob("slurm-*.sh")
    assert script.read_text() in done.stdout


def test_bad_input_is_the_jobs_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = [*SHORT, "--output", "run", "--micro-batch", "7"]
    assert main([*SLURM, "-j", "1x1", *wrong]) == 2
    log = capsys.readouterr().out
    assert log.count("trainmark: global_batch 16 must equal") == 1
    assert "Traceback" not in log
    assert main([*SLURM, "-j", "1x1", "--sbatch", "partition=none", *wrong]) == 2
    assert "sbatch refused the job" in (refusal := capsys.readouterr().err)
    assert "Invalid partition" in refusal
    assert main([*SLURM, "-j", "1x1", "--sbatch", "partitoin=all", *wrong]) == 2
    assert "unrecognized option '--partitoin=all'" in capsys.readouterr().err


def test_a_job_that_waits_says_why_and_leaves_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*SLURM, "-j", "3x1", "--detach", *SHORT]) == 0
    handle = capsys.readouterr().out.splitlines()[-1]
    wait_until(lambda: "PENDING (PartitionNodeLimit)" in status(handle, capsys))
    assert main(["launch", "logs", handle]) == 2
    assert "has written no log yet" in capsys.readouterr().err
    assert main(["launch", "stop", handle]) == 0
    assert main(["launch", "logs", handle, "--follow"]) == 1
    assert f"{handle}: CANCELLED, exit code 1" in status(handle, capsys)


@pytest.mark.slow
def test_a_detached_job_saves_when_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*SLURM, "-j", "2x2", "--detach", *ENDLESS, "--output", "run",
                 "--micro-batch", "4"]) == 0  # fmt: skip
    handle = capsys.readouterr().out.splitlines()[-1]
    assert handle.startswith("slurm-")
    wait_until((tmp_path / "run" / "loss.csv").exists)
    assert f"{handle}: RUNNING; started" in status(handle, capsys)
    assert main(["launch", "stop", handle]) == 0
    assert main(["launch", "logs", handle, "--follow"]) == 143
    assert capsys.readouterr().out.count("Stopped by request, saved") == 1
    assert f"{handle}: FAILED, exit code 143" in status(handle, capsys)
    assert folders.latest(tmp_path / "run" / "checkpoints")


@pytest.mark.slow
def test_ctrl_c_saves_and_ends_the_job(tmp_path: Path) -> None:
    done = stopped_by_ctrl_c([*SLURM, "-j", "1x2"], tmp_path)
    assert done.returncode == 143
    assert done.stdout.count("Stopped by request, saved") == 1


@pytest.mark.slow
def test_a_dead_rank_ends_the_job(tmp_path: Path) -> None:
    line = [*SLURM, "-j", "2x1", *ENDLESS, "--output", "run"]
    launcher = start(line, tmp_path)
    wait_until((tmp_path / "run" / "loss.csv").exists)
    os.kill(_process_of_rank(1), signal.SIGKILL)
    done = finish(launcher)
    assert done.returncode == 137, done.stdout
    told = [text for text in done.stdout.splitlines() if text.startswith("trainmark: ")]
    assert told[0].startswith("trainmark: rank 1 (process")
    assert "was killed by SIGKILL" in told[0]


def _process_of_rank(rank: int) -> int:
    import psutil

    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except psutil.Error:
            continue
        if environment.get("RANK") == str(rank) and "SLURM_JOB_ID" in environment:
            return process.pid
    raise AssertionError("no such rank")


@pytest.mark.slow
def test_torchx_submits_to_slurm(tmp_path: Path) -> None:
    pytest.importorskip("torchx")
    check_torchx(tmp_path, "--scheduler", "slurm", "-j", "1x2")
