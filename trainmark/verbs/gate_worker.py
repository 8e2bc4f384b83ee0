"""One side of `trainmark gate`: trains, and between two steps waits for its turn.

A script, not imported: it comes from the tree that `gate` runs in, and drives the `trainmark` that
lies first on PYTHONPATH, which may be of a commit that knows nothing of it. Of that it needs
`python -m trainmark train` with its flags, and `trainmark.run.feed.Feed`, which the loop asks for a
batch before every step.

    python -P gate_worker.py TREE TOKENS ANSWERS WORDS...

TOKENS and ANSWERS are descriptors of pipes. A token is a line with the number of steps to train; an
answer is a line of JSON: `{"ready": true}` before the first step, then, for each token,
`{"wall_s": [...], "cpu_s": [...], "samples": N}`, with seconds of each step (on a GPU, no `cpu_s`).
Where the tokens end, so does this process.
"""

import contextlib
import ctypes
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

FEED = "trainmark/run/feed.py"
PR_SET_PDEATHSIG = 1  # of Linux's <sys/prctl.h>


def _torch_with_accelerator() -> Any:
    """PyTorch, if this process has begun to use an accelerator. The package's own way to ask
    (`hardware/backends.py`) may not be there in the commit that is driven."""
    torch: Any = sys.modules.get("torch")
    accelerator = torch and torch.accelerator.current_accelerator()
    if not accelerator:
        return None
    module = torch.get_device_module(accelerator)
    return torch if getattr(module, "is_initialized", bool)() else None


class Turns:
    """Lets steps through when it is this process's turn, and times them.

    On a CPU one by one. A GPU is given work ahead, and waited for after the first step and after
    the last: the others have the mean of their times.
    """

    def __init__(self, tokens: int, answers: int) -> None:
        self._tokens = os.fdopen(tokens, "r")
        self._answers = os.fdopen(answers, "w")
        self._steps: int | None = None  # of this turn; None before the first
        self._done = self._timed = 0
        self._wall_s: list[float] = []
        self._cpu_s: list[float] = []
        self._since = (0.0, 0.0)
        self.samples = 0

    def step_begins(self) -> None:
        """Called before every step, and so after every other one."""
        if self._steps is None:
            self._answer(ready=True)
        else:
            self._step_ended(self._steps)
            if self._done < self._steps:
                return
            self._answer(wall_s=self._wall_s, cpu_s=self._cpu_s, samples=self.samples)
        token = self._tokens.readline()
        if not token:
            os._exit(0)  # at once: nobody wants what this run has learned
        self._steps = int(token)
        self._done = self._timed = self.samples = 0
        self._wall_s, self._cpu_s = [], []
        self._since = _clocks()

    def _step_ended(self, steps: int) -> None:
        self._done += 1
        if torch := _torch_with_accelerator():
            if self._done not in (1, steps):
                return
            torch.accelerator.synchronize()
        (wall, cpu), (now, cpu_now), count = self._since, _clocks(), self._done - self._timed
        self._wall_s += [(now - wall) / count] * count
        if not torch:  # CPU time says nothing about a GPU
            self._cpu_s.append(cpu_now - cpu)
        self._since, self._timed = (now, cpu_now), self._done

    def _answer(self, **fields: Any) -> None:
        self._answers.write(json.dumps(fields) + "\n")
        self._answers.flush()


def _clocks() -> tuple[float, float]:
    """Wall-clock time, and the CPU time that all threads of this process have used."""
    return time.perf_counter(), time.process_time()


def take_turns(turns: Turns) -> None:
    """Make the loop of the `trainmark` that is found here wait for its turns."""
    from trainmark.run.feed import Feed

    next_batch = Feed.__next__

    def in_turn(feed: Any) -> Any:
        turns.step_begins()
        batch = next_batch(feed)
        turns.samples += batch.samples
        return batch

    Feed.__next__ = in_turn  # type: ignore[assignment, method-assign]


def end_with_parent() -> None:
    """Even while it is stopped. Where there is no such call, the tokens' end has to do."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def trainmark_ends(*words: str) -> object:
    """What `python -m trainmark WORDS` exits with, run in this process."""
    sys.argv = ["trainmark", *words]
    try:
        runpy.run_module("trainmark", run_name="__main__")
    except SystemExit as stop:
        return stop.code
    return None


def main(tree: str, tokens: str, answers: str, *words: str) -> object:
    end_with_parent()
    import trainmark

    if Path(trainmark.__file__).resolve().parent.parent != Path(tree).resolve():
        return f"trainmark: expected the package in {tree}, found {trainmark.__file__}."
    # Not asked by importing it: an installed package would lend the module that is missing here.
    if not (Path(tree) / FEED).exists():
        return f"trainmark: this commit is too old for gate: it has no {FEED}."
    trainmark_ends("--version")  # a version sets by itself what must be set before torch is loaded
    take_turns(Turns(int(tokens), int(answers)))
    return trainmark_ends("train", *words)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))  # type: ignore[arg-type]
