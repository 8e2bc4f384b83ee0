"""Two resident processes that take turns to train, never both at once, in a random order."""

import json
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from trainmark.errors import InputError
from trainmark.metrics.slowdown import block_difference
from trainmark.verbs import attempt

WORKER = Path(__file__).with_name("gate_worker.py")
WARMUP_STEPS = 10
"""Steps before the first turn, done twice: the first ones may compile, the others tell how long a
step takes."""
TURN_S = 0.1
"""About how long a turn takes; at least one step."""
NO_ANSWER_S = 1800.0
"""Seconds without an answer after which a process counts as hung."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """What one of the two processes trains."""

    name: str
    """`base` or `candidate`."""
    tree: Path
    """Folder whose `trainmark` it runs."""
    words: tuple[str, ...]
    """The words after `train`."""


Clock = Literal["wall", "cpu"]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The times of the steps that a process trained in one turn."""

    wall_s: list[float]
    """Seconds of each step."""
    cpu_s: list[float]
    """CPU seconds of each step, over all cores; empty for steps on a GPU."""
    samples: int
    """Samples of all steps together."""

    def timed(self, clock: Clock) -> list[float]:
        """Seconds of the steps that count. The first step does not, if there are others: it finds
        the caches full of the other process's data."""
        seconds = self.wall_s if clock == "wall" else self.cpu_s
        if not seconds:
            raise InputError("--clock cpu says nothing of a GPU's steps: leave it out.")
        return seconds[1:] or seconds


@dataclass(frozen=True, kw_only=True)
class Block:
    """Four turns, two of each side."""

    base: list[Turn]
    candidate: list[Turn]

    def difference(self, clock: Clock) -> float:
        """The difference between the sides (see `metrics.slowdown`)."""
        base_s, candidate_s = (
            [seconds for turn in turns for seconds in turn.timed(clock)]
            for turns in (self.base, self.candidate)
        )
        return block_difference(base_s, candidate_s)


class Worker:
    """A process that trains when it is its turn. In between it is stopped with all its threads, so
    that reading ahead costs time of its own turns, and not of the other's."""

    def __init__(self, side: Side, folder: Path, script: Path = WORKER) -> None:
        self.side = side
        self._log = folder / f"{side.name}.log"
        self._output = folder / side.name
        self._script = script

    def __enter__(self) -> Self:
        side = self.side
        tokens, self._tokens = os.pipe()
        self._answers, answers = os.pipe()
        self._received = b""
        path = os.pathsep.join(filter(None, [str(side.tree), os.environ.get("PYTHONPATH")]))
        words = [*side.words, "--output", str(self._output)]
        own = [str(side.tree), str(tokens), str(answers)]
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(self._script), *own, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "PYTHONPATH": path},
                    pass_fds=(tokens, answers),
                    process_group=0,  # Ctrl-C is for this process, which ends that one
                )
        finally:
            os.close(tokens)
            os.close(answers)
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._tokens)
        self._process.kill()
        self._process.wait()
        os.close(self._answers)

    def get_ready(self) -> None:
        """Wait until its model is built and its first step is about to begin."""
        self._receive()
        self._stop()

    def train(self, steps: int) -> Turn:
        """Let it train so many steps."""
        self._process.send_signal(signal.SIGCONT)
        try:
            os.write(self._tokens, f"{steps}\n".encode())
        except BrokenPipeError:
            raise self._ended() from None
        answer = self._receive()
        self._stop()
        return Turn(**answer)

    def _stop(self) -> None:
        """Stop it, and wait until none of its threads runs."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _receive(self) -> dict[str, Any]:
        while b"\n" not in self._received:
            readable, _, _ = select.select([self._answers], [], [], NO_ANSWER_S)
            if not readable:
                raise InputError(f"The {self.side.name} has not answered for {NO_ANSWER_S:g} s.")
            received = os.read(self._answers, 65536)
            if not received:
                raise self._ended()
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> InputError:
        code = self._process.wait()
        printed = self._log.read_text(encoding="utf-8", errors="replace")
        reason = attempt.last_sentence(printed)
        if reason is None:
            reason = f"it {attempt.how_it_ended(code)}. Its last words:\n{printed[-1000:].strip()}"
        return InputError(f"The {self.side.name} does not train: {reason}")


@contextmanager
def resident(*sides: Side, folder: Path, script: Path = WORKER) -> Iterator[tuple[Worker, ...]]:
    """A process for each side, ready for its first step; they end with the block."""
    with ExitStack() as stack:
        workers = []
        for side in sides:  # one after the other: even now, never both at once
            workers.append(stack.enter_context(Worker(side, folder, script)))
            workers[-1].get_ready()
        yield tuple(workers)


def train_by_turns(base: Worker, candidate: Worker, coin: random.Random) -> Iterator[Block]:
    """Warm both up, then let them train in blocks of four turns, without end."""
    for worker in (base, candidate):
        worker.train(WARMUP_STEPS)
    steps = steps_per_turn([worker.train(WARMUP_STEPS).wall_s for worker in (base, candidate)])
    while True:
        order = (base, candidate, candidate, base)
        if coin.random() < 0.5:
            order = (candidate, base, base, candidate)
        turns: dict[Worker, list[Turn]] = {base: [], candidate: []}
        for worker in order:
            turns[worker].append(worker.train(steps))
        block = Block(base=turns[base], candidate=turns[candidate])
        _check_samples(block, 2 * steps)
        yield block


def steps_per_turn(seconds: Sequence[Sequence[float]]) -> int:
    """How many steps take about `TURN_S` on an undisturbed machine."""
    return max(1, round(TURN_S / max(map(min, seconds))))


def _check_samples(block: Block, steps: int) -> None:
    base, candidate = (sum(turn.samples for turn in side) for side in (block.base, block.candidate))
    if base != candidate:
        raise InputError(
            f"The sides' steps are not alike: in {steps} steps the base trains {base:,} samples, "
            f"the candidate {candidate:,}. Give both the same --global-batch and --data."
        )
