"""Processes for ranks.

They are forked from a process that has imported torch and what ranks need of it (`conftest.py` says
what): importing takes longer than most of them run.
"""

import time
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

PATIENCE_S = 600


def start(target: Callable[..., None], *arguments: Any, world: int) -> Any:
    """`target(rank, *arguments)` in a process for each rank."""
    return mp.start_processes(
        target, arguments, nprocs=world, join=False, start_method="forkserver"
    )


def finish(*started: Any, patience_s: float = PATIENCE_S) -> None:
    """Wait for ranks that were started; if one fails, end all, and raise its error."""
    waiting, deadline = list(started), time.monotonic() + patience_s
    try:
        while waiting:
            assert time.monotonic() < deadline, "the ranks hang"
            waiting = [ranks for ranks in waiting if not ranks.join(timeout=0.05)]
    finally:
        for ranks in waiting:
            end(ranks)


def end(ranks: Any) -> None:
    """Kill ranks, whatever they do."""
    for process in ranks.processes:
        process.kill()
        process.join()


def run(target: Callable[..., None], *arguments: Any, world: int) -> None:
    """Start ranks, and wait for them."""
    finish(start(target, *arguments, world=world))
