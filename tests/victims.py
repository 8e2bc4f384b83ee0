"""For the kill tests: for every line on standard input, fork a process that trains.

    python -m tests.victims

A line is a JSON list of arguments for `trainmark`, and the number of its call of `fsync` with which
it is killed, or null. Forking makes a fresh victim in milliseconds, where importing torch again
would take seconds. Standard output gets the victim's process id, which
stays the victim's until another line asks how it ended: its exit code, or minus the signal that
killed it.
"""

import itertools
import json
import os
import signal
import sys
import time

import torch

from trainmark.cli import main

SLOW_FSYNC_S = 0.005  # most of a victim's time goes into writing checkpoints


def _slowly(dies_at: int | None, fsync=os.fsync):  # type: ignore[no-untyped-def]
    calls = itertools.count(1)

    def slow(descriptor: int) -> None:
        if next(calls) == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(SLOW_FSYNC_S)
        fsync(descriptor)

    return slow


def _serve() -> None:
    torch.set_num_threads(1)  # a fork takes no other thread along
    import tests.small  # noqa: F401  (imports what a run needs, once for all victims)
    from trainmark.run import runner  # noqa: F401

    for line in sys.stdin:
        victim = os.fork()
        if victim == 0:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            words, dies_at = json.loads(line)
            os.fsync = _slowly(dies_at)
            os._exit(main(words))
        print(victim, flush=True)
        sys.stdin.readline()
        _, status = os.waitpid(victim, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    _serve()
