"""A run that is killed at any moment and started again ends, bit for bit, where it would have."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.small import FLAGS, newest, result, saved
from tests.waiting import wait_until
from trainmark.checkpoint import checkpoints, folders


class Victims:
    """Trains in processes that can be killed."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.victims"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, output: Path, *flags: str, dies_at: int | None = None) -> int:
        """Begin a run; its process id.

        Args:
            dies_at: the call of `fsync`, of which there are several for a checkpoint, with which
                it is killed.
        """
        return self._ask(["train", "dlrm-demo", *FLAGS, "--output", str(output), *flags], dies_at)

    def end(self) -> int:
        """Wait until the run is over; its exit code, negative where a signal killed it."""
        return self._ask([])

    def _ask(self, words: list[str], dies_at: int | None = None) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps([words, dies_at]) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def close(self) -> None:
        self._server.communicate()


@pytest.fixture(scope="module")
def victims() -> Iterator[Victims]:
    made = Victims()
    made._ask(["--version"])  # wait for its imports
    assert made.end() == 0
    yield made
    made.close()


def half_written(output: Path) -> bool:
    return any((output / "checkpoints").glob(".writing-*"))


EVERY_STEP = ("--checkpoint-every", "1 steps", "--log-every", "3", "--evals-per-epoch", "3")


def test_killed_at_any_moment_of_saving(victims: Victims, tmp_path: Path) -> None:
    """`tests/kills.py` kills at other moments, too."""
    flags: tuple[str, ...] = ("--epochs", "2", "--shuffle", "rows", "--shuffle-window", "700")
    flags += (*EVERY_STEP, "--optimizer.name", "adam", "--precision", "fp16")
    victims.start(tmp_path / "undisturbed", *flags)
    assert victims.end() == 0
    output, torn = tmp_path / "killed", 0
    for dies_at in (1, 2, 9, 4, 3, 11, 5, 6):
        victims.start(output, *flags, dies_at=dies_at)
        assert victims.end() == -signal.SIGKILL
        torn += half_written(output)
    victims.start(output, *flags)
    assert victims.end() == 0
    assert torn
    assert saved(newest(output)) == saved(newest(tmp_path / "undisturbed"))
    curves = [(tmp_path / name / "loss.csv").read_bytes() for name in ("killed", "undisturbed")]
    assert curves[0] == curves[1]
    observed = [_observed(tmp_path / name) for name in ("killed", "undisturbed")]
    assert observed[0] == observed[1]
    assert [row[0] for row in observed[0]] == [str(step) for step in range(1, 17)]
    found, expected = result(output), result(tmp_path / "undisturbed")
    for key in ("samples", "loss", "config"):
        assert found[key] == expected[key]
    metrics = [[(e["at_sample"], e["split"], e["metrics"]) for e in r["evaluations"]]
               for r in (found, expected)]  # fmt: skip
    assert metrics[0] == metrics[1]
    assert found["steps"]["all"] == expected["steps"]["all"] == 16
    for path in folders.all_checkpoints(output / "checkpoints"):
        checkpoints.verify(path)


def _observed(output: Path) -> list[list[str]]:
    """The rows of curves.csv without times."""
    rows = [line.split(",") for line in (output / "curves.csv").read_text().splitlines()]
    assert {len(row) for row in rows} == {9}
    return [row[:6] for row in rows[1:]]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_asked_to_stop_it_saves_first(victims: Victims, tmp_path: Path, number: int) -> None:
    output = tmp_path / "stopped"
    flags = ("--epochs", "10000", "--log-every", "2", "--evals-per-epoch", "0")
    victim = victims.start(output, *flags)
    losses = output / "loss.csv"
    wait_until(lambda: losses.exists() and losses.stat().st_size >= 100)
    os.kill(victim, number)
    assert victims.end() == 128 + number
    step = folders.read_state(newest(output))["progress"]["step"]
    assert 0 < step < 80000
    assert not (output / "result.json").exists()
    for folder in (output, tmp_path / "undisturbed"):
        victims.start(folder, *flags, "--max-steps", str(step + 3))
        assert victims.end() == 0
    assert saved(newest(output)) == saved(newest(tmp_path / "undisturbed"))
    assert result(output)["steps"]["all"] == step + 3
    notes = " ".join(result(output)["notes"])
    assert "Continued 1 time(s)" in notes


def test_a_flipped_byte_is_named_and_the_checkpoint_before_it_offered(
    victims: Victims, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.small import train

    output = tmp_path / "run"
    assert train(output, "--max-steps", "4", "--checkpoint-every", "2 steps") == 0
    data = newest(output) / "rank-00000.safetensors"
    content = bytearray(data.read_bytes())
    content[-10] ^= 1
    data.write_bytes(content)
    capsys.readouterr()
    assert train(output, "--max-steps", "6", "--checkpoint-every", "2 steps") == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "step-00000004" in message
    assert "step-00000002, which is intact" in message
