"""Processes that share the work: what they answer, and how they end."""

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.waiting import PATIENCE_S, wait_until
from trainmark.clicklog.engine.turns import Turns
from trainmark.clicklog.engine.workers import Call, Workers
from trainmark.clicklog.sources import apart
from trainmark.errors import InputError


class Served:
    def __init__(self) -> None:
        self.known = 7

    def add(self, number: int) -> tuple[int, int]:
        self.known += number
        return number + 1, os.getpid()

    def refuse(self, number: int) -> None:
        if number == 2:
            raise InputError("2 is refused.")

    def open_files(self) -> tuple[int, int]:
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("count", [1, 3])
def test_results_come_in_order_and_this_process_keeps_what_it_knew(count: int) -> None:
    served = Served()
    with Workers(served, count) as workers:
        found = workers.each(0, "add", [(number,) for number in range(40)])
        assert [result for result, _ in found] == list(range(1, 41))
        processes = {process for _, process in found}
        assert processes == {os.getpid()} if count == 1 else os.getpid() not in processes
        assert len(processes) <= count
    assert served.known == (7 if count > 1 else 7 + sum(range(40)))
    assert not any(psutil.pid_exists(process) for process in processes - {os.getpid()})


@pytest.mark.parametrize("count", [1, 3])
def test_errors_are_those_of_the_method(count: int) -> None:
    with Workers(Served(), count) as workers:
        with pytest.raises(InputError, match=r"^2 is refused\.$"):
            workers.each(0, "refuse", [(number,) for number in range(4)])
        assert workers.each(0, "refuse", [(1,)]) == [None]


@pytest.mark.parametrize("count", [1, 3])
def test_many_may_ask_and_an_error_lets_none_of_them_wait(count: int) -> None:
    """Each asks again and again; after the first error all get one, be they asking or waiting."""

    def ask(who: int) -> None:
        for number in range(20):
            workers.each(who, "refuse", [(2 if (who, number) == (5, 3) else 1,)] * 3)

    with Workers(Served(), count) as workers, ThreadPoolExecutor(8) as askers:
        with pytest.raises(InputError, match="2 is refused"), workers.stopping():
            askers.submit(ask, 5).result()
        ended = [askers.submit(ask, who) for who in range(8)]
        assert all(isinstance(one.exception(timeout=PATIENCE_S), RuntimeError) for one in ended)
    with (
        Workers(Served(), count) as workers,
        ThreadPoolExecutor(8) as askers,
        pytest.raises((InputError, RuntimeError)),
        workers.stopping(),
    ):
        list(askers.map(ask, range(8)))


@pytest.mark.parametrize("count", [1, 3])
def test_turns_come_in_order_whoever_is_ready_first(count: int) -> None:
    turns, had = Turns(iter(range(40))), list[int]()

    def work(worker: Call, number: int, item: int) -> None:
        worker("add", item)
        time.sleep(0.001 * (number % 3))
        with turns.turn(number):
            had.append(item)

    turns.run(Workers(Served(), count), work)
    assert had == list(range(40))


def test_nobody_waits_for_a_turn_that_will_not_come() -> None:
    """Of two errors that of the earlier item is raised; those behind it have no turn."""
    turns, both, had = Turns(iter(range(8)), first=5), threading.Barrier(2), list[int]()

    def work(worker: Call, number: int, item: int) -> None:
        if item in (2, 3):
            both.wait(PATIENCE_S)
            raise OSError(f"item {item}")
        with turns.turn(number):
            had.append(item)

    with pytest.raises(OSError, match="item 2"):
        turns.run(Workers(Served(), 4), work)
    assert had == [0, 1]


@pytest.mark.parametrize("count", [1, 3])
def test_a_worker_may_open_as_many_files_as_the_system_lets_it(count: int) -> None:
    before = Served().open_files()
    hard = before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        with Workers(Served(), count) as workers:
            assert workers.each(0, "open_files", [()]) == [(hard, hard)]
        assert Served().open_files() == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_process_that_was_killed_is_told() -> None:
    with Workers(Served(), 2) as workers, pytest.raises(RuntimeError, match="was it killed"):
        workers.each(0, "end", [()])


def test_a_process_that_was_killed_while_it_read_is_told() -> None:
    def made() -> Iterator[int]:
        yield 1
        time.sleep(0.2)  # until the next item is asked for
        os.kill(os.getpid(), signal.SIGKILL)

    items = apart.iterate(made)
    assert next(items) == 1
    with pytest.raises(RuntimeError, match="was it killed, for its memory"):
        next(items)


def test_an_error_of_the_system_is_that_of_the_process_that_read() -> None:
    def made() -> Iterator[int]:
        yield 1
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        list(apart.iterate(made))


def test_none_outlives_the_process_that_started_it() -> None:
    script = (
        "import os, signal, time\n"
        "from tests.unit.test_prepare_workers import Served\n"
        "from trainmark.clicklog.engine.workers import Workers\n"
        "workers = Workers(Served(), 3)\n"
        "found = workers.each(0, 'add', [(n,) for n in range(30)])\n"
        "print(*{process for _, process in found}, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=False)
    assert run.returncode == -signal.SIGKILL
    left = [int(word) for word in run.stdout.split()]
    assert left
    wait_until(lambda: not any(map(psutil.pid_exists, left)))
