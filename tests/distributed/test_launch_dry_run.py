"""`launch --dry-run` prints what a launch would run, and starts nothing."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainmark.cli import main

BASH = shutil.which("bash")
RUN = ["train", "llama3-demo", "--checkpoint-every", "2 steps"]


STARTS = (
    "launch_torchrun.run",
    "launch_torchx.run_here",
    "launch_torchx.submit",
    "launch_slurm.submit",
    "launch_jobs.start_process",
)


@pytest.fixture(autouse=True)
def nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_: object) -> None:
        raise AssertionError("started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # no SLURM here
    for name in STARTS:
        monkeypatch.setattr(f"trainmark.distributed.{name}", refuse)
    yield
    assert not list(tmp_path.iterdir())


def printed(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["launch", *flags, "--dry-run", *RUN]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("more", [[], ["--detach"]])
def test_the_torchrun_line(capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    quiet, program, *words = shlex.split(printed(capsys, "--on", "torchrun", "-j", "1x2", *more))
    assert quiet == "TORCH_CPP_LOG_LEVEL=FATAL"
    parsed = get_args_parser().parse_args(words)
    assert (program, parsed.nnodes, parsed.nproc_per_node) == ("torchrun", "1", "2")
    assert [parsed.training_script, *parsed.training_script_args] == ["trainmark", *RUN]


def test_the_variables_of_a_torchrun_line(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--on", "torchrun", "-j", "2x2", "--rendezvous", "localhost", "--max-restarts", "1"]
    line = printed(capsys, *flags)
    assert " TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 2 " in line


def test_names_and_gpus_of_other_machines_need_not_be_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainmark.hardware.backends.here", lambda: None)
    flags = ["--on", "torchrun", "-j", "2x2", "--rendezvous", "node0.invalid", "--numa"]
    line = printed(capsys, *flags)
    assert " --rdzv-endpoint node0.invalid:29500 " in line
    assert " --numa-binding node " in line


def test_the_batch_script_needs_no_slurm(capsys: pytest.CaptureFixture[str]) -> None:
    script = printed(capsys, "--on", "slurm", "-j", "2x8", "--sbatch", "partition=gpu")
    assert script.startswith("#!/bin/bash\n#SBATCH --job-name=llama3-demo\n#SBATCH --nodes=2\n")
    assert "#SBATCH --partition=gpu\n" in script
    assert f" {shlex.join(RUN)}\n" in script
    subprocess.run([str(BASH), "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize("scheduler", ["local_cwd", "slurm"])
def test_what_torchx_would_run(capsys: pytest.CaptureFixture[str], scheduler: str) -> None:
    pytest.importorskip("torchx")
    text = printed(capsys, "--on", "torchx", "--scheduler", scheduler, "-j", "1x2")
    assert "-m trainmark launch --on torchrun -j 1x2 train llama3-demo" in text
    assert text.startswith({"local_cwd": "bash -c", "slurm": "sbatch --parsable"}[scheduler])


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_torchx_that_is_missing_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, dry: list[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "torchx"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchx", None)
    assert main(["launch", "--on", "torchx", "-j", "1x2", *dry, *RUN]) == 2
    assert "pip install 'trainmark[launch]'" in capsys.readouterr().err


def test_a_dry_run_still_refuses_what_a_launch_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--on", "torchrun", "-j", "2x8", "--dry-run", *RUN]) == 2
    assert "needs --rendezvous HOST" in capsys.readouterr().err
    assert main(["launch", "--on", "torchrun", "-j", "1x2", *RUN, "--dry-run"]) == 2
    assert "For a dry run of the launch, give it before 'train'." in capsys.readouterr().err
