"""Two machines: two network namespaces that share nothing but a cable (a veth pair).

Both know themselves as the same host name with a loopback address, as badly configured machines do.
"""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.distributed.launching import (
    ENDLESS,
    ROOT,
    SHORT,
    assert_trained_like_one_process,
    finish,
    start,
)
from tests.waiting import wait_until
from trainmark.distributed.launched import LOST_RANK

ADDRESSES = ("10.231.77.1", "10.231.77.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def _joined_by_a_cable() -> Iterator[tuple[str, str]]:
    number = os.getpid() % 100_000
    machines = (f"tm{number}a", f"tm{number}b")
    ip("link", "add", machines[0], "type", "veth", "peer", "name", machines[1])
    try:
        for name, address in zip(machines, ADDRESSES, strict=True):
            ip("netns", "add", name)
            ip("link", "set", name, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/30", "dev", name)
            for device in ("lo", name):
                ip("-n", name, "link", "set", device, "up")
        yield machines
    finally:
        for name in machines:  # the cable goes with them
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    if shutil.which("ip") is None:
        pytest.skip("there is no ip command here")
    with _joined_by_a_cable() as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def _permission() -> None:
    probe = f"tm{os.getpid() % 100_000}p"
    try:
        ip("netns", "add", probe)
        ip("netns", "delete", probe)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("network namespaces need the ip command and root")


def launch_on(
    machines: tuple[str, str], words: tuple[str, ...], *flags: str, module: str = "trainmark"
) -> list["subprocess.Popen[str]"]:
    """The same line on both machines."""
    line = ["launch", "--on", "torchrun", "-j", "2x1", "--rendezvous", ADDRESSES[0], *flags, *words]
    return [
        start(line, ROOT, module, prefix=("ip", "netns", "exec", machine)) for machine in machines
    ]


def test_two_machines_train_like_one_process(machines: tuple[str, str], tmp_path: Path) -> None:
    output = tmp_path / "run"
    started = launch_on(machines, (*SHORT, "--output", str(output)))
    for done in map(finish, started):
        assert done.returncode == 0, done.stderr
    assert_trained_like_one_process(output, tmp_path)
    result = json.loads((output / "result.json").read_text())
    assert result["case"] == "cpux2x1"
    assert result["parallel"] == {"dp": 2}
    assert result["samples"] == 150


@pytest.mark.slow
@pytest.mark.parametrize(("how", "rank"), [("input", 1), ("input:0", 0), ("kill", 1)])
def test_a_rank_that_dies_on_one_machine_ends_both(
    machines: tuple[str, str], tmp_path: Path, how: str, rank: int
) -> None:
    module = f"tests.distributed.broken_rank {how}"
    words = (*SHORT, "--output", str(tmp_path / "run"))
    ended = [finish(process) for process in launch_on(machines, words, module=module)]
    if how == "kill":
        told, other = sorted(ended, key=lambda done: -done.returncode)
        assert told.returncode == 137
        assert other.returncode == 1
        assert "the connection to another rank was lost" in other.stderr
        return
    assert sorted(done.returncode for done in ended) == [1, 2]
    for done in ended:
        assert re.search(f"^trainmark: rank {rank} on .*: The shard of", done.stderr, re.M)


@pytest.mark.slow
def test_a_rank_that_dies_on_one_machine_is_restarted_with_the_other(
    machines: tuple[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "run"
    module, words = "tests.distributed.broken_rank kill", (*SHORT, "--output", str(output))
    started = launch_on(machines, words, "--max-restarts", "2", module=module)
    for done in map(finish, started):
        assert done.returncode == 0, done.stderr
    assert_trained_like_one_process(output, tmp_path)


@pytest.mark.slow
def test_a_machine_that_vanishes_ends_the_other(machines: tuple[str, str], tmp_path: Path) -> None:
    output = tmp_path / "run"
    started = launch_on(machines, (*ENDLESS, "--output", str(output)))
    wait_until(lambda: (output / "loss.csv").exists())
    ip("-n", machines[1], "link", "set", machines[1], "down")
    for done in map(finish, started):
        assert done.returncode == LOST_RANK
        assert "has not been heard of" in done.stderr, done.stderr


@pytest.mark.slow
def test_ctrl_c_on_one_machine_saves_on_all(machines: tuple[str, str], tmp_path: Path) -> None:
    output = tmp_path / "run"
    # The second machine's rank takes a while to end; the first one, where both meet, must stay.
    module = "tests.distributed.broken_rank linger"
    started = launch_on(machines, (*ENDLESS, "--output", str(output)), module=module)
    wait_until(lambda: (output / "loss.csv").exists())
    started[0].send_signal(signal.SIGINT)
    ended = [finish(process) for process in started]
    assert [done.returncode for done in ended] == [130, 130]
    said = "".join(done.stderr for done in ended)
    assert said.count("Stopped by request, saved") == 1
