"""`trainmark launch` with a rank that fails in the middle of training.

    python -m tests.distributed.broken_rank HOW launch --on torchrun -j 1x2 train RUN ...

HOW is `input` (an InputError), `crash` (any other exception), `memory` (of its device, used up),
`kill` (as by `kill -9`), `kill-unseen` (the same, while the others are busy, so that the launcher's
SIGTERM reaches them before they miss their partner) or `stop` (as by `kill -STOP`). The last rank,
or with `HOW:0` the first, fails before its fifth step, and does not fail again when torchrun
restarts it. With `linger` it does not fail, but its process takes a while to end.

With `--device cuda`, all ranks are ranks of NCCL on one GPU.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.distributed import joining
from trainmark import cli
from trainmark.distributed import launch_torchrun, mesh
from trainmark.errors import InputError

FAILS_AT = 5
LINGERS_S = 3.0
BUSY_S = 3.0
BEAT_S, SILENCE_S = 0.5, 20.0
"""Of tests, which need not wait for as long as jobs do."""


def _fail(how: str) -> None:
    if how == "input":
        raise InputError("The shard of this rank is damaged. Prepare the data again.")
    if how == "crash":
        raise ZeroDivisionError("a bug in the last rank")
    if how == "memory":
        torch.empty(2**50, dtype=torch.uint8, device="cuda" if _on_a_gpu() else "cpu")
    assert how in ("kill", "kill-unseen", "stop")
    os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)


def _on_a_gpu() -> bool:
    return "cuda" in sys.argv


def _is_broken(rank: str) -> bool:
    return os.environ["RANK"] == (rank or str(int(os.environ["WORLD_SIZE"]) - 1))


def _before_the_fifth_step(act: Callable[[], None]) -> None:
    from trainmark.run import loop

    count = loop.Training._count

    def act_first(self: loop.Training, *args: Any, **named: Any) -> None:
        first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first_attempt and self.progress.step == FAILS_AT - 1:
            self._saver.finish()  # else its last checkpoint may be lost, too, or not
            act()
        count(self, *args, **named)

    loop.Training._count = act_first  # type: ignore[method-assign]


if __name__ == "__main__":
    how = sys.argv.pop(1)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        launch_torchrun.RANK = ["-m", "tests.distributed.broken_rank", how]
        sys.exit(cli.main())
    from trainmark.distributed.heartbeat import Heartbeat
    from trainmark.distributed.launched import leave, run_rank
    from trainmark.run import process

    if not _on_a_gpu():
        process.Heartbeat = partial(Heartbeat, beat_s=BEAT_S, silence_s=SILENCE_S)  # type: ignore[assignment,misc]
    else:
        joining.share_the_gpu(int(os.environ["RANK"]))
        mesh.local_device = joining.device_of
    kind, _, rank = how.partition(":")
    if _is_broken(rank) and kind != "linger":
        _before_the_fifth_step(partial(_fail, kind))
    elif kind == "kill-unseen":
        _before_the_fifth_step(partial(time.sleep, BUSY_S))
    code = run_rank(cli.main)
    if _is_broken(rank) and kind == "linger":
        time.sleep(LINGERS_S)
    leave(code)
