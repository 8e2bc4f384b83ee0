"""One run of many, as `sweep` and `suite` start them, and how it ended.

In a process of its own a run leaks no state, and running out of memory ends only that run. In this
process a run does not wait for Python and PyTorch to start, and can be watched.
"""

import gc
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Self

from trainmark.config import Run, TrainOptions
from trainmark.errors import InputError, in_words, out_of_memory
from trainmark.hardware import backends
from trainmark.run.progress import Watch
from trainmark.run.signals import stop_signals

DONE, OUT_OF_MEMORY, FAILED, PRUNED = "done", "OOM", "failed", "pruned"
_SIGNS = ("Out of memory", "does not fit", "OutOfMemoryError")
_SENTENCE = "trainmark: "


def arguments(words: list[str], devices: int) -> list[str]:
    """The words after `trainmark` that train on so many devices of this machine.

    Args:
        words: those after `train`.
        devices: more than one are started by torchrun, as `launch` does it.
    """
    launcher = ["launch", "--on", "torchrun", "-j", f"1x{devices}"] if devices > 1 else []
    return [*launcher, "train", *words]


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    kind: str
    """`done`, `OOM`, `failed` or, in this process, `pruned`."""
    reason: str = ""
    """Why it failed or ran out of memory."""
    evaluations: list[float] = field(default_factory=list)
    """The metric so far of a pruned run."""


class Pruned(Exception):  # noqa: N818  (no error: it was asked for)
    """A run that does worse than others is ended; raised by what watches it."""

    def __init__(self, evaluations: list[float]) -> None:
        super().__init__()
        self.evaluations = evaluations


def attempt_here(cfg: Run, options: TrainOptions, watch: Watch | None) -> Outcome:
    """Train in this process; `watch` may raise `Pruned`."""
    from trainmark.run import runner
    from trainmark.run.loop import Interrupted

    try:
        runner.train(cfg, options, time.perf_counter(), watch)
    except Interrupted:
        raise _stopped() from None
    except Pruned as pruned:
        return Outcome(PRUNED, evaluations=pruned.evaluations)
    except RuntimeError as error:
        if (told := out_of_memory(error)) is None:
            raise
        return Outcome(OUT_OF_MEMORY, in_words(told))
    except (InputError, OSError, MemoryError) as error:
        return _outcome(in_words(error))
    finally:  # free its memory for the next run
        gc.collect()
        backends.empty_cache()
    return Outcome(DONE)


def attempt(words: list[str], devices: int, log: Path) -> Outcome:
    """Train in a process of its own; what it prints is shown, and kept in `log`."""
    ended = _start([sys.executable, "-m", "trainmark", *arguments(words, devices)], log)
    if ended.returncode == 0:
        return Outcome(DONE)
    if ended.returncode in (130, 143):
        raise _stopped()
    reason = last_sentence(ended.stdout) or f"{how_it_ended(ended.returncode)}, see {log}"
    return _outcome(reason, printed=ended.stdout)


def _outcome(reason: str, printed: str = "") -> Outcome:
    full = any(sign in reason or sign in printed for sign in _SIGNS)
    return Outcome(OUT_OF_MEMORY if full else FAILED, reason)


def last_sentence(printed: str) -> str | None:
    """The sentence that a run ended with; problems that it lists follow it, a line each."""
    lines = printed.splitlines()
    # The first: what a launcher says after it is not the cause.
    place = next((n for n, line in enumerate(lines) if line.startswith(_SENTENCE)), None)
    if place is None:
        return None
    reason = [lines[place].removeprefix(_SENTENCE)]
    for line in lines[place + 1 :]:
        if not line.startswith("- "):
            break
        reason.append(line)
    return "\n".join(reason)


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    hint = " (Linux does so when memory runs out)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


def _stopped() -> KeyboardInterrupt:
    return KeyboardInterrupt("stopped; the same command goes on where it was.")


def _start(command: list[str], log: Path) -> "subprocess.CompletedProcess[str]":
    log.parent.mkdir(parents=True, exist_ok=True)
    printed = []
    # In a process group of its own: Ctrl-C reaches it once, from here, and it can save first.
    with (
        log.open("a", encoding="utf-8", buffering=1) as kept,
        _Stops() as stops,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            process_group=0,
        ) as process,
    ):
        stops.pass_on_to(process)
        for line in process.stdout or ():
            printed.append(line)
            kept.write(line)
            sys.stderr.write(line)
            sys.stderr.flush()
        process.wait()
    if stops.seen:
        raise _stopped()
    return subprocess.CompletedProcess(command, process.returncode, "".join(printed))


class _Stops:
    """While entered, Ctrl-C and the like are noted here, and are for the run."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._previous = {s: signal.signal(s, self._note) for s in stop_signals()}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def pass_on_to(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        for number in self.seen:  # while it was being started
            process.send_signal(number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen.append(number)
        if self._process is not None:
            self._process.send_signal(number)
