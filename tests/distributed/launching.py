"""What the tests of launching share: a run of seconds, and ways to start it."""

import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch.distributed as dist

from tests import rank_processes
from tests.distributed import joining
from tests.small import curve
from tests.waiting import PATIENCE_S, wait_until
from trainmark.checkpoint import folders
from trainmark.cli import main

ROOT = Path(__file__).parents[2]
RUN = (
    *("train", "distilbert-demo", "--device", "cpu", "--synthetic-sentences", "150"),
    *("--global-batch", "16", "--micro-batch", "8"),
    *("--model.hidden", "16", "--model.feed-forward", "32"),
    *("--model.dropout", "0", "--model.attention-dropout", "0", "--model.head-dropout", "0"),
    *("--warmup-clock", "1", "--log-every", "1", "--no-initial-evaluation"),
    *("--no-stop-at-target", "--checkpoint-every", "2 steps"),
)
SHORT = (*RUN, "--epochs", "1", "--evals-per-epoch", "0")
"""Ten steps, the last of six sentences."""
ENDLESS = (*RUN, "--epochs", "10000", "--evals-per-epoch", "0")


def start(
    words: list[str], cwd: Path, module: str = "trainmark", prefix: tuple[str, ...] = ()
) -> "subprocess.Popen[str]":
    """`python -m MODULE WORDS...` in a folder."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", *module.split(), *words],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def on_ranks(folder: Path, *commands: list[str], world: int = 2) -> None:
    """`trainmark WORDS...` for each command, on so many ranks, until all have ended well."""
    # Ranks would look for each other where those of an earlier call have been.
    (folder / f"store-{world}").unlink(missing_ok=True)
    rank_processes.run(_follow, commands, folder, world, world=world)


def _follow(rank: int, commands: list[list[str]], folder: Path, world: int) -> None:
    joining.join(rank, world, folder / f"store-{world}")
    place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in place.items()})
    for words in commands:
        assert main(words) == 0, words
        dist.barrier()
    dist.destroy_process_group()


def finish(process: "subprocess.Popen[str]") -> "subprocess.CompletedProcess[str]":
    """Wait for the end of a launch; one that hangs is ended, and fails the test."""
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"the launch hangs:\n{out}\n{err}")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def stopped_by_ctrl_c(line: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    """A launch of an endless run, into the folder's `run`, once it has trained and saved."""
    launcher = start([*line, *ENDLESS, "--output", "run"], folder)
    wait_until((folder / "run" / "loss.csv").exists)
    launcher.send_signal(signal.SIGINT)
    done = finish(launcher)
    assert folders.latest(folder / "run" / "checkpoints")
    return done


def status(handle: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What `trainmark launch status` says of a job."""
    assert main(["launch", "status", handle]) == 0
    return capsys.readouterr().out


@cache
def one_process_curve(folder: Path) -> list[tuple[int, int, float]]:
    """The curve of the short run in one process, without any launcher."""
    assert main([*SHORT, "--output", str(folder)]) == 0
    return curve(folder)


def assert_trained_like_one_process(output: Path, folder: Path) -> None:
    """The launched run has the same samples and, up to rounding, the same losses."""
    found, expected = curve(output), one_process_curve(folder / "one-process")
    assert [row[:2] for row in found] == [row[:2] for row in expected]
    assert len(found) == 10
    losses, wanted = ([row[2] for row in rows] for rows in (found, expected))
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert len(set(wanted)) == 10


def check_torchx(folder: Path, *flags: str) -> None:
    """A run through TorchX trains, and one with bad input ends with that input's exit code."""
    line = ["launch", "--on", "torchx", *flags]
    done = finish(start([*line, *SHORT, "--output", "run"], folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 10  loss" in done.stdout
    assert_trained_like_one_process(folder / "run", folder)
    wrong = [*SHORT, "--output", "wrong", "--micro-batch", "7"]
    done = finish(start([*line, *wrong], folder))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "global_batch 16 must equal" in done.stdout
