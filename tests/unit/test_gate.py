"""`trainmark gate`: two processes by turns, what it says of them, and what it leaves behind.

Most tests let the real worker drive a stand-in for the package, with a clock of its own: so they
know the truth, and show what an earlier commit must have to be driven.
"""

import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest

from tests.docs.commands import ROOT
from tests.unit.refusals import refused
from tests.waiting import PATIENCE_S, wait_until
from trainmark.cli import main
from trainmark.errors import InputError
from trainmark.verbs import gate, gate_turns
from trainmark.verbs.gate_turns import Side, Turn, Worker, resident, train_by_turns

MAIN = """
import os, random, sys, time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar
from trainmark.run.feed import Feed

def main(words):
    if words[0] == "--version":
        return 0
    told = dict(zip(words[1::2], words[2::2]))
    clock, noise = [0.0], random.Random(words[1])
    time.perf_counter = lambda: clock[0]
    for step, _ in enumerate(Feed(int(told.get("--samples", 512)))):
        with open(told["--output"] + ".steps", "a") as log:
            log.write(f"{time.monotonic_ns()} {told['--name']}\\n")
        clock[0] += 0.02 * float(told["--takes"]) * noise.choice([1, 1, 1, 1.001, 3])
        if step == int(told.get("--fails", -1)):
            print("trainmark: The loss of step 3 is not finite.")
            return 2
        if step == int(told.get("--dies", -1)):
            os.kill(os.getpid(), 9)

sys.exit(main(sys.argv[1:]))
"""
FEED = """
class Batch:
    def __init__(self, samples):
        self.samples = samples

class Feed:
    def __init__(self, samples):
        self.samples = samples
    def __iter__(self):
        return self
    def __next__(self):
        return Batch(self.samples)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A tree with a stand-in for trainmark: of the real one the worker needs no more than this."""
    root = tmp_path / "tree"
    for name, text in {
        "__init__": "",
        "__main__": MAIN,
        "run/__init__": "",
        "run/feed": FEED,
    }.items():
        path = root / "trainmark" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def sides(tree: Path, candidate_takes: float = 1.0, *words: str) -> tuple[Side, Side]:
    return tuple(  # type: ignore[return-value]
        Side(name=name, tree=tree, words=("--name", name, "--takes", str(takes), *more))
        for name, takes, more in (("base", 1.0, ()), ("candidate", candidate_takes, words))
    )


def measure(tree: Path, candidate_takes: float, *words: str, budget_s: float = 60.0) -> gate.Found:
    return gate.measure(
        *sides(tree, candidate_takes, *words),
        slower_by=0.03,
        budget_s=budget_s,
        coin=random.Random(0),
    )


# --- by turns


def test_both_train_by_turns_and_never_at_once(package: Path, tmp_path: Path) -> None:
    coin = random.Random(1)
    with resident(*sides(package), folder=tmp_path) as (base, candidate):
        processes = {worker: psutil.Process(worker._process.pid) for worker in (base, candidate)}
        blocks = train_by_turns(base, candidate, coin)
        for _ in range(6):
            next(blocks)
            assert {p.status() for p in processes.values()} == {psutil.STATUS_STOPPED}
    assert not any(process.is_running() for process in processes.values())
    steps = [
        line.split()
        for name in ("base", "candidate")
        for line in (tmp_path / f"{name}.steps").read_text().splitlines()
    ]
    order = "".join(name[0] for _, name in sorted(steps, key=lambda step: int(step[0])))
    warmup = 4 * gate_turns.WARMUP_STEPS
    assert order[:warmup] == ("b" * 10 + "c" * 10) * 2
    turns = order[warmup:][::5]  # 20 ms by its clock: 5 steps fill 0.1 s
    assert order[warmup:] == "".join(turn * 5 for turn in turns)
    toss = random.Random(1)
    assert turns == "".join("cbbc" if toss.random() < 0.5 else "bccb" for _ in range(6))


def test_a_turns_first_step_is_not_timed() -> None:
    class Stub(Worker):
        def __init__(self, quick: float) -> None:
            self.quick = quick

        def train(self, steps: int) -> Turn:
            seconds = [9.0] + [self.quick] * (steps - 1)
            return Turn(wall_s=seconds, cpu_s=[7.0] * steps, samples=steps)

    found = next(train_by_turns(Stub(0.01), Stub(0.02), random.Random(0)))
    assert found.difference("wall") == pytest.approx(0.693, abs=1e-3)
    assert found.difference("cpu") == 0
    assert found.base[0].timed("wall") == [0.01] * 4


@pytest.mark.parametrize(("step_s", "steps"), [(0.001, 100), (0.03, 3), (0.09, 1), (20.0, 1)])
def test_short_steps_share_a_turn(step_s: float, steps: int) -> None:
    assert gate_turns.steps_per_turn([[step_s] * 10, [step_s / 5] * 10]) == steps


# --- verdicts


@pytest.mark.parametrize(
    ("takes", "verdict", "code"),
    [(1.05, "slower", 1), (1.0, "not slower", 0), (0.9, "not slower", 0)],
)
def test_verdicts(package: Path, takes: float, verdict: str, code: int) -> None:
    found = measure(package, takes)
    assert (found.verdict, gate.EXIT_CODES[found.verdict]) == (verdict, code)
    assert found.comparison is not None
    assert found.comparison.slowdown == pytest.approx(takes - 1, abs=0.005)
    assert found.comparison.confidence > 0.99
    words = gate.sentence(found, 0.03)
    assert words.startswith(verdict.capitalize())
    assert json.loads(gate.as_json(found))["slowdown"] == found.comparison.slowdown


def test_a_small_budget_leaves_it_undecided(package: Path) -> None:
    found = measure(package, 1.05, budget_s=1e-9)
    assert (found.verdict, found.blocks) == ("undecided", 1)
    assert "Give more seconds as --budget" in gate.sentence(found, 0.03)
    assert gate.EXIT_CODES[found.verdict] == 3


def test_what_is_unclear_takes_fresh_processes(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "ROUND_BLOCKS", 4)
    told: list[gate.Found] = []
    first: list[str] = []

    def resident(*sides: Side, **options: Path) -> AbstractContextManager[tuple[Worker, ...]]:
        first.append(sides[0].name)
        return gate_turns.resident(*sides, **options)

    monkeypatch.setattr(gate, "resident", resident)

    def tell(so_far: gate.Found) -> None:
        told.append(so_far)
        if len(told) == 2:
            raise StopAsyncIteration  # enough

    with pytest.raises(StopAsyncIteration):
        gate.measure(*sides(package), slower_by=0.03, budget_s=600, tell=tell)
    assert [(so_far.rounds, so_far.blocks) for so_far in told] == [(1, 4), (2, 8)]
    assert sorted(first) == ["base", "candidate"]  # each was started first once


# --- what goes wrong


def test_a_side_that_ends_is_told(package: Path) -> None:
    with pytest.raises(InputError, match=r"^The candidate does not train: .* killed by SIGKILL"):
        measure(package, 1.0, "--dies", "33")
    with pytest.raises(InputError, match=r"^The candidate does not train: The loss of step 3 is"):
        measure(package, 1.0, "--fails", "3")
    (package / "trainmark" / "run" / "feed.py").unlink()
    (package / "trainmark" / "__main__.py").write_text("")
    with pytest.raises(InputError, match=r"too old for gate: it has no trainmark/run/feed\.py"):
        measure(package, 1.0)


def test_steps_that_are_not_alike_are_not_compared(package: Path) -> None:
    with pytest.raises(InputError, match=r"base trains 5,120 samples, the candidate 2,560"):
        measure(package, 1.0, "--samples", "256")


def test_another_package_than_the_sides_is_refused(package: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match="The base does not train: expected the package in"):
        measure(empty, 1.0)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ([], ["Both sides of the gate are the same", "--base COMMIT"]),
        (["--base", "no-such-commit"], ["no commit 'no-such-commit'", "a branch, a tag"]),
        (["--base", "--help"], ["--base"]),
        (["--base-flags"], ["--base-flags needs flags as one word"]),
        (["--base-flags", "'"], ["--base-flags", "cannot be read"]),
        (["--base-flags=--lrr 1"], ["--lrr"]),
        (["--candidate-flags", "--lr -1"], ["lr"]),
        (["--base", "HEAD", "--slower-by", "0"], ["slower_by"]),
        (["--base", "HEAD", "--budget", "nan"], ["budget"]),
    ],
)
def test_bad_input_is_told_in_a_sentence(
    capsys: pytest.CaptureFixture[str], flags: list[str], parts: list[str]
) -> None:
    refused(capsys, ["gate", "dlrm-demo", *flags], *parts)


# --- commits


@pytest.fixture
def repository(package: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Makes a git repository of the stand-in, which `gate` takes for its own checkout."""
    monkeypatch.setattr(gate, "TREE", package)

    def git(*words: str) -> str:
        own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", "-C", str(package), *own, *words], check=True, capture_output=True, text=True
        )
        return done.stdout

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "one")
    return git


def test_a_commit_is_copied_and_leaves_no_trace(
    repository: Callable[..., str], package: Path, tmp_path: Path
) -> None:
    earlier = (package / "trainmark" / "__main__.py").read_text()
    (package / "trainmark" / "__main__.py").write_text("changed")
    copy = gate._copy_of("HEAD", tmp_path / "copy")
    assert (copy / "trainmark" / "__main__.py").read_text() == earlier
    assert len(repository("worktree", "list").splitlines()) == 1
    assert repository("status", "--porcelain").split() == ["M", "trainmark/__main__.py"]
    repository("rm", "-rfq", ".")
    repository("commit", "--quiet", "--allow-empty", "--message", "two")
    with pytest.raises(InputError, match="has no package 'trainmark'"):
        gate._copy_of("HEAD", tmp_path / "none")
    with pytest.raises(InputError, match="has no commit '--output=x'"):
        gate._copy_of("--output=x", tmp_path / "option")


# --- what is left behind

GATE = """
import signal
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar
from trainmark.verbs import gate
from trainmark.verbs.gate_turns import Side
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs in the background ignores it
tree = Path(sys.argv[1])
names = {"base": "1", "candidate": "1.015"}
sides = [Side(name=n, tree=tree, words=("--name", n, "--takes", t)) for n, t in names.items()]
with gate.ends_in_order():
    print("started", flush=True)
    gate.measure(*sides, slower_by=1e-6, budget_s=600)
"""


def children(process: psutil.Process) -> Iterator[psutil.Process]:
    for child in process.children(recursive=True):
        if "gate_worker.py" in " ".join(child.cmdline()):
            yield child


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_gate_that_is_ended(
    package: Path, tmp_path: Path, number: signal.Signals
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    path = {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary), "PATH": ""}
    command = [sys.executable, "-c", GATE, str(package)]
    with subprocess.Popen(command, env=path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as it:
        workers = wait_until(lambda: both(psutil.Process(it.pid)))
        it.send_signal(number)
        it.communicate(timeout=PATIENCE_S)
    assert it.returncode in (-number, 128 + number)  # Python ends itself by the SIGINT that it got
    wait_until(lambda: not any(worker.is_running() for worker in workers))
    if number != signal.SIGKILL:  # after which nobody can tidy up
        assert not list(temporary.iterdir())


def both(process: psutil.Process) -> list[psutil.Process]:
    """Its two workers, once both are stopped or at work."""
    found = list(children(process))
    return found if len(found) == 2 else []


# --- the whole road


def test_a_real_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """This tree beside its last commit, where there is one; else beside other flags. Llama-3 has no
    kernels that a copy of a commit would have to compile."""
    base = ["--base", "HEAD"] if (ROOT / ".git").exists() else ["--base-flags", "--log-every 7"]
    code = main(["gate", "llama3-demo", "--device", "cpu", *base, "--budget", "1"])
    found = json.loads(capsys.readouterr().out)
    assert found["blocks"] >= 1
    assert code == gate.EXIT_CODES[found["verdict"]]
