"""`trainmark gate`: whether a step takes longer than it did, even on a machine that is shared.

Two commits, or two configurations, train as two resident processes that take turns
(`gate_turns.py`); `metrics.slowdown` judges their steps. This is for one device.
"""

import json
import random
import shlex
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import trainmark
from trainmark.config import Run, TrainOptions
from trainmark.errors import InputError, raise_all
from trainmark.formatting import counted
from trainmark.metrics.slowdown import Comparison, compare
from trainmark.progress import say
from trainmark.validation import problems
from trainmark.verbs.flags import parse_run, without_flags
from trainmark.verbs.gate_turns import WORKER, Clock, Side, resident, train_by_turns
from trainmark.verbs.options import GateOptions

TREE = Path(trainmark.__file__).resolve().parent.parent
EXIT_CODES = {"not slower": 0, "slower": 1, "undecided": 3}
"""Exit code 2 says that the sides cannot be compared."""
OWN_FLAGS = ("--base", "--candidate", "--slower-by", "--budget", "--clock")
"""Flags that are the gate's, and not those of its runs."""
ROUND_BLOCKS = 100
"""Blocks after which it pays to start a fresh pair of processes."""
ENDLESS = (
    *("--epochs", "1000000", "--max-steps", "None", "--no-stop-at-target"),
    *("--evals-per-epoch", "0", "--checkpoint-every", "never"),
)
"""Flags for both sides, with which they do nothing but steps, without end. Every commit that `gate`
can drive knows them."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a gate has found."""

    comparison: Comparison | None
    """None where the budget was over before there was enough to compare."""
    rounds: int
    blocks: int
    seconds: float

    @property
    def verdict(self) -> str:
        return self.comparison.verdict if self.comparison else "undecided"


def gate(cfg: Run, options: GateOptions, words: list[str]) -> int:
    """Compare, say what was found, and print it as JSON; returns the exit code.

    `words` are those after `gate`, without the flags of one side alone.
    """
    shared, slower_by = without_flags(words, OWN_FLAGS), options.slower_by / 100
    with ends_in_order(), two_sides(cfg, shared, options) as sides:
        found = measure(
            *sides,
            slower_by=slower_by,
            budget_s=options.budget,
            clock=options.clock,
            tell=lambda so_far: say(progress(so_far)),
        )
    say(sentence(found, slower_by))
    print(as_json(found))
    return EXIT_CODES[found.verdict]


@contextmanager
def ends_in_order() -> Iterator[None]:
    """Make SIGTERM end this process as Ctrl-C does, so that no process and no folder is left."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


# --- the two sides


@contextmanager
def two_sides(cfg: Run, words: Sequence[str], options: GateOptions) -> Iterator[tuple[Side, Side]]:
    """The two sides. Copies of commits are removed after the block.

    Args:
        cfg: the run.
        words: its name and the flags of both sides.
        options: the commits, and the flags that only one side has.
    """
    base = ("base", options.base, options.base_flags)
    candidate = ("candidate", options.candidate, options.candidate_flags)
    if base[1:] == candidate[1:]:
        raise InputError(
            "Both sides of the gate are the same. Give --base COMMIT, to compare this tree with "
            "it, or --base-flags '...', to compare two configurations."
        )
    # Patience counts evaluations; versions that do not know the flag have no runs with it.
    endless = [*ENDLESS, *(() if cfg.patience is None else ("--patience", "None"))]
    with tempfile.TemporaryDirectory(prefix="trainmark-gate-") as folder:

        def side(name: str, commit: str | None, flags: str) -> Side:
            tree = TREE if commit is None else _copy_of(commit, Path(folder) / name)
            own = _split(flags, f"--{name}-flags")
            side = Side(name=name, tree=tree, words=(*words, *own, *endless))
            if commit is None:  # report what is wrong now; another commit reports its own
                raise_all(problems(parse_run("train", list(side.words), TrainOptions)[0]))
            return side

        yield side(*base), side(*candidate)


def _split(flags: str, name: str) -> list[str]:
    try:
        return shlex.split(flags)
    except ValueError as error:
        raise InputError(f"{name} {flags!r} cannot be read: {error}.") from None


def _copy_of(commit: str, folder: Path) -> Path:
    """The package as it was at a commit: a copy leaves no trace in the repository."""
    found = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}")
    if found is None:
        raise InputError(
            f"{TREE} has no commit {commit!r}: expected a branch, a tag or a commit of the git "
            "checkout that trainmark runs from. In CI, fetch it first (with its whole history)."
        )
    archive = folder.with_suffix(".tar")
    output = f"--output={archive}"
    if _git("archive", "--format=tar", output, found.strip(), "--", "trainmark") is None:
        raise InputError(f"Commit {commit!r} has no package 'trainmark' to run.")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    archive.unlink()
    return folder


def _git(*arguments: str) -> str | None:
    """The output of git in the checkout of this package; None where it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(TREE), *arguments], capture_output=True, encoding="utf-8", check=False
        )
    except FileNotFoundError:
        raise InputError("To compare commits, gate needs git, which is not here.") from None
    return done.stdout if done.returncode == 0 else None


# --- the comparison


def measure(
    base: Side,
    candidate: Side,
    *,
    slower_by: float,
    budget_s: float,
    clock: Clock = "wall",
    tell: Callable[[Found], None] = lambda found: None,
    coin: random.Random | None = None,
    script: Path = WORKER,
) -> Found:
    """Let both sides take turns until one answer is sure, or the budget is spent.

    Args:
        slower_by: the slow-down that must be found; 0.03 is 3 %.
        tell: is told what is known, after every round.
    """
    coin, began = coin or random.Random(), time.monotonic()
    rounds: list[list[float]] = []
    started = coin.sample([base, candidate], 2)
    while True:
        starting = time.monotonic()
        started.reverse()  # who starts second was seen to be quicker by a third of a percent
        with (
            tempfile.TemporaryDirectory(prefix="trainmark-gate-") as folder,
            resident(*started, folder=Path(folder), script=script) as workers,
        ):
            ready, ends = time.monotonic(), began + budget_s
            rounds.append([])
            by_side = dict(zip(started, workers, strict=True))
            for block in train_by_turns(by_side[base], by_side[candidate], coin):
                rounds[-1].append(block.difference(clock))
                now = time.monotonic()
                found = Found(
                    comparison=compare(rounds, slower_by),
                    rounds=len(rounds),
                    blocks=sum(map(len, rounds)),
                    seconds=now - began,
                )
                if found.verdict != "undecided" or now >= ends:
                    return found
                one_more = (ready - starting) + (now - ready) * ROUND_BLOCKS / len(rounds[-1])
                if len(rounds[-1]) >= ROUND_BLOCKS and ends - now > one_more:
                    tell(found)
                    break


# --- words


def sentence(found: Found, slower_by: float) -> str:
    """What was found, for people."""
    compared = found.comparison
    if compared is None:
        return f"Undecided: {_spent(found)} were not enough. Give more seconds as --budget."
    if compared.verdict == "undecided":
        return (
            f"Undecided after {_spent(found)}: {_known(compared)}. Neither 'as fast' nor 'slower "
            f"by {slower_by:.1%}' is sure; the more probable has a confidence of "
            f"{compared.confidence:.1%}. Give more seconds as --budget, a quieter "
            "machine, or (on a CPU) --clock cpu."
        )
    verdict = compared.verdict.capitalize()
    return f"{verdict}, confidence {compared.confidence:.1%}: {_known(compared)}, {_spent(found)}."


def progress(found: Found) -> str:
    """What is known before there is a verdict."""
    known = _known(found.comparison) if found.comparison else "nothing yet"
    return f"After {_spent(found)}: {known}."


def _known(compared: Comparison) -> str:
    return (
        f"the candidate's step time is {compared.slowdown:+.1%} from the base's "
        f"(95 % interval {compared.low:+.1%} to {compared.high:+.1%})"
    )


def _spent(found: Found) -> str:
    return f"{found.seconds:.0f} s, {found.blocks} blocks in {counted(found.rounds, 'round')}"


def as_json(found: Found) -> str:
    """What was found as one line of JSON, for programs."""
    plain: dict[str, Any] = {"verdict": found.verdict}
    if found.comparison:
        plain |= asdict(found.comparison) | {"confidence": found.comparison.confidence}
    plain |= {"rounds": found.rounds, "blocks": found.blocks, "seconds": round(found.seconds, 3)}
    return json.dumps(plain)
