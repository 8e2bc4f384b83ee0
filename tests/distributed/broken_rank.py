"""`trainmark launch` with a rank that fails in the middle of training.

    python -m tests.distributed.broken_rank HOW launch --on torchrun -j 1x2 train RUN ...

HOW is `input` (an InputError), `crash` (any other exception) or `kill` (as by `kill -9`). The last
rank fails before its fifth step, and does not fail again when torchrun restarts it.
"""

import os
import signal
import sys
from typing import Any

from trainmark import cli
from trainmark.distributed import launch_torchrun
from trainmark.errors import InputError

FAILS_AT = 5


def _fail(how: str) -> None:
    if how == "input":
        raise InputError("The shard of this rank is damaged. Prepare the data again.")
    if how == "crash":
        raise ZeroDivisionError("a bug in the last rank")
    os.kill(os.getpid(), signal.SIGKILL)


def _break_last_rank(how: str) -> None:
    from trainmark import loop

    count = loop.Training._count

    def fail_first(self: loop.Training, *args: Any) -> None:
        last = self.mesh.rank == self.mesh.world_size - 1
        first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if last and first_attempt and self.progress.step == FAILS_AT - 1:
            _fail(how)
        count(self, *args)

    loop.Training._count = fail_first  # type: ignore[method-assign]


if __name__ == "__main__":
    how = sys.argv.pop(1)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        launch_torchrun.MODULE = f"tests.distributed.broken_rank {how}"
        sys.exit(cli.main())
    from trainmark.distributed.launched import run_rank

    _break_last_rank(how)
    sys.exit(run_rank(cli.main))
