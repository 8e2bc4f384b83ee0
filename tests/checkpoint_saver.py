"""For the kill test: for every line on standard input, fork a process that saves without end.

    python -m tests.checkpoint_saver ROOT

Forking makes a fresh victim in milliseconds, where importing torch again would take seconds. The
process id of each victim goes to standard output; the next line is read once it is dead.
"""

import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from trainmark.checkpoint import checkpoints

KEEP = 2


def tensors_at(step: int) -> dict[str, Tensor]:
    """What is saved at `step`: large enough that most of the time is spent writing."""
    generator = torch.Generator().manual_seed(step)
    return {
        "table": torch.rand(100_000, 16, generator=generator),
        "step": torch.tensor(step),
        "rng": generator.get_state(),
    }


def _save_without_end(root: Path) -> None:
    newest = checkpoints.latest(root)
    step = 0 if newest is None else checkpoints.read_state(newest)["step"]
    while True:
        step += 1
        tensors = tensors_at(step)
        checkpoints.save(root, step, tensors, {"step": step}, KEEP)
        # A step may be saved again, at the end of a run for example.
        checkpoints.save(root, step, tensors, {"step": step}, KEEP)


def _main(root: Path) -> None:
    torch.set_num_threads(1)  # a fork takes no other thread along
    for _ in sys.stdin:
        victim = os.fork()
        if victim == 0:
            _save_without_end(root)
        print(victim, flush=True)
        os.waitpid(victim, 0)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
