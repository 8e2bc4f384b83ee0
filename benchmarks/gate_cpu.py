"""How often `trainmark gate` is right on a noisy machine, and how long it takes.

    python benchmarks/gate_cpu.py record HOUR.jsonl         # an hour of two equal sides, by turns
    python benchmarks/gate_cpu.py live TRIALS.jsonl         # gates of a commit that is 3 % slower
    python benchmarks/gate_cpu.py results HOUR.jsonl --trials TRIALS.jsonl

`record` starts a fresh pair of processes every minute and keeps what every block's steps took.
`results` lets gates begin at random minutes of that hour and go on from there as they would have,
once with 3 % more for every step of the candidate and once without. `live` gates, in a clone,
commits whose loop does something for 3 % longer in each step, and commits that change nothing.
What else the machine does is part of what is measured: each row has the load.
"""

import argparse
import dataclasses
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import write_results
from trainmark.metrics.slowdown import compare, median_and_error
from trainmark.verbs.gate import ENDLESS, ROUND_BLOCKS, TREE
from trainmark.verbs.gate_turns import Block, Clock, Side, Turn, resident, train_by_turns
from trainmark.verbs.options import GateOptions

RUN = "dlrm-demo"
GATE = (sys.executable, "-P", "-m", "trainmark", "gate", RUN, "--base", "HEAD~1")
SLOWER_BY = 0.03
ROUND_S = 60.0
BUDGET_S = GateOptions().budget
RESAMPLED = 1000
LOOK_EVERY = 5
"""Blocks between two looks, when resampled; the gate itself looks after each."""
SEED = 0
CLOCKS: tuple[Clock, ...] = ("wall", "cpu")
CLOCK_NAMES = {"wall": ("perf_counter", "perf_counter"), "cpu": ("process_time", "thread_time")}
"""What Python calls them: of a step, and of what its main thread does besides."""
Row = dict[str, Any]


# --- an hour


def record(target: Path, minutes: float) -> None:
    """Append a line for each pair of processes."""
    ends, coin = time.monotonic() + 60 * minutes, random.Random(SEED)
    base = Side(name="base", tree=TREE, words=(RUN, *ENDLESS))
    candidate = dataclasses.replace(base, name="candidate")
    while time.monotonic() < ends:
        starting = time.monotonic()
        with (
            tempfile.TemporaryDirectory() as folder,
            resident(base, candidate, folder=Path(folder)) as (first, second),
        ):
            turns = train_by_turns(first, second, coin)
            blocks = [next(turns)]
            ready = time.monotonic()
            while time.monotonic() < ready + ROUND_S:
                blocks.append(next(turns))
            measured_s = time.monotonic() - ready
        row = {
            "load": os.getloadavg()[0],
            "setup_s": ready - starting,
            "block_s": measured_s / (len(blocks) - 1),
            "blocks": [dataclasses.asdict(block) for block in blocks],
        }
        _append(target, row)
        print(f"load {row['load']:.1f}, {len(blocks)} blocks", flush=True)


# --- gates that begin at random minutes of it


def resampled(
    hour: Sequence[Row], clock: Clock, effect: float, rng: np.random.Generator
) -> tuple[str, float]:
    """The verdict of one gate, and its seconds. Both sides of the recording were the same program:
    which of them is called the candidate is chosen anew for each pair."""
    rounds: list[list[float]] = []
    seconds, place = 0.0, int(rng.integers(len(hour)))
    while True:
        pair = hour[place % len(hour)]
        place += 1
        seconds += pair["setup_s"]
        sign = rng.choice([-1, 1])
        rounds.append([])
        blocks = [sign * d + math.log1p(effect) for d in differences(pair, clock)[:ROUND_BLOCKS]]
        for look in range(0, len(blocks), LOOK_EVERY):
            seen = blocks[look : look + LOOK_EVERY]
            rounds[-1] += seen
            seconds += pair["block_s"] * len(seen)
            found = compare(rounds, SLOWER_BY)
            verdict = found.verdict if found else "undecided"
            if verdict != "undecided" or seconds >= BUDGET_S:
                return verdict, seconds


def differences(pair: Row, clock: Clock) -> list[float]:
    """Of its blocks, as they are kept in the results."""
    return [float(word) for word in pair[clock].split()]


def resampled_row(hour: Sequence[Row], clock: Clock, effect: float, trials: int = RESAMPLED) -> Row:
    rng = np.random.default_rng(SEED)
    found = [resampled(hour, clock, effect, rng) for _ in range(trials)]
    row: Row = {"system": "trainmark", "what": "resampled", "clock": clock, "slower_by": effect}
    return row | {"budget_s": BUDGET_S} | _counts(found)


def _counts(found: Sequence[tuple[str, float]]) -> Row:
    verdicts, seconds = [verdict for verdict, _ in found], [seconds for _, seconds in found]
    counts = {verdict: verdicts.count(verdict) for verdict in ("slower", "not slower", "undecided")}
    quantiles = {
        "median_s": round(float(np.median(seconds)), 1),
        "p90_s": round(float(np.quantile(seconds, 0.9)), 1),
    }
    return {"trials": len(found)} | counts | quantiles


# --- live


def live(target: Path, trials: int, clock: Clock) -> None:
    """Gate as CI would, in a clone: a commit that is slower, then one that is not, and so on."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        _git(TREE, "clone", "--quiet", "--shared", str(TREE), str(clone))
        for trial in range(trials):
            slower = trial % 2 == 0
            _git(clone, "checkout", "--quiet", "--detach", "origin/HEAD")
            if slower:
                _slow_down(clone / "trainmark" / "run", clock)
            _git(clone, "commit", "--quiet", "--all", "--allow-empty", "--message", "candidate")
            done = subprocess.run(
                [*GATE, "--clock", clock],
                env={**os.environ, "PYTHONPATH": str(clone)},
                stdout=subprocess.PIPE,
                check=False,
            )
            row = {"slower_by": SLOWER_BY if slower else 0.0, "clock": clock}
            row |= {"exit_code": done.returncode}
            row |= json.loads(done.stdout) | {"load": os.getloadavg()[0]}
            _append(target, row)
            print(row, flush=True)


def _slow_down(folder: Path, clock: Clock) -> None:
    """Compute after each step, for a share of what it and its batch took by a clock."""
    of_step, of_more = CLOCK_NAMES[clock]
    _replace(
        folder / "feed.py",
        "        before = self._event()\n",
        f"        self.began = time.{of_step}()\n        before = self._event()\n",
    )
    _replace(
        folder / "loop.py",
        "                profiler.step_done(progress.step)\n",
        "                profiler.step_done(progress.step)\n"
        f"                more = {SLOWER_BY} * (time.{of_step}() - self.feed.began)\n"
        f"                ends = time.{of_more}() + more\n"
        f"                while time.{of_more}() < ends:\n"
        "                    pass\n",
    )


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{path} has changed"
    path.write_text(text.replace(old, new))


def _git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=gate", "-c", "user.email=gate@localhost"]
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True)


# --- results


def rows(hours: Sequence[Path], trials: Path) -> Iterator[Row]:
    recorded = [_in_short(pair) for hour in hours for pair in _lines(hour)]
    of_clock = {clock: [pair for pair in recorded if pair[clock]] for clock in CLOCKS}
    for clock, pairs in of_clock.items():
        for effect in (SLOWER_BY, 0.0):
            yield resampled_row(pairs, clock, effect)
    gates = list(_lines(trials))
    for clock, effect in dict.fromkeys((gate["clock"], gate["slower_by"]) for gate in gates):
        of_it = [gate for gate in gates if (gate["clock"], gate["slower_by"]) == (clock, effect)]
        counts = _counts([(gate["verdict"], gate["seconds"]) for gate in of_it])
        row = {"system": "trainmark", "what": "live", "clock": clock, "slower_by": effect} | counts
        known = ("slowdown", "low", "high", "confidence", "rounds", "blocks", "seconds", "load")
        yield row | {"gates": [{name: gate.get(name) for name in known} for gate in of_it]}
    for clock, pairs in of_clock.items():
        medians = [median_and_error(differences(pair, clock)) for pair in pairs]
        seconds = [pair["setup_s"] + pair["block_s"] * pair["blocks"] for pair in pairs]
        yield {
            "system": "trainmark",
            "what": "recorded",
            "run": RUN,
            "clock": clock,
            "minutes": round(sum(seconds) / 60, 1),
            "error_of_a_pair_quartiles": _quantiles([error for _, error in medians]),
            "median_over_error_sd": round(float(np.std([m / e for m, e in medians])), 3),
            "load_quartiles": _quantiles([pair["load"] for pair in pairs]),
        }
    yield {"system": "trainmark", "what": "pairs", "run": RUN, "pairs": recorded}


def _quantiles(values: Sequence[float]) -> list[float]:
    return [round(float(value), 5) for value in np.quantile(values, [0.25, 0.5, 0.75])]


def _in_short(pair: Row) -> Row:
    """The differences of its blocks by both clocks, as text: a line of the results each."""
    blocks = [
        Block(base=_turns(block["base"]), candidate=_turns(block["candidate"]))
        for block in pair["blocks"]
    ]
    steps = [s for block in blocks for turn in block.base + block.candidate for s in turn.wall_s]
    has_cpu = bool(blocks[0].base[0].cpu_s)
    by_clock = {
        clock: " ".join(f"{block.difference(clock):.4f}" for block in blocks)
        if clock == "wall" or has_cpu
        else ""
        for clock in CLOCKS
    }
    return {
        "load": round(pair["load"], 2),
        "setup_s": round(pair["setup_s"], 2),
        "block_s": round(pair["block_s"], 4),
        "blocks": len(blocks),
        "median_step_ms": round(1e3 * float(np.median(steps)), 2),
    } | by_clock


def _turns(turns: Sequence[Row]) -> list[Turn]:
    return [Turn(**turn) for turn in turns]


def _append(path: Path, row: Row) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def _lines(path: Path) -> Iterator[Row]:
    for line in path.read_text().splitlines():
        yield json.loads(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    recording = verbs.add_parser("record")
    recording.add_argument("hour", type=Path)
    recording.add_argument("--minutes", type=float, default=60.0)
    gates = verbs.add_parser("live")
    gates.add_argument("trials", type=Path)
    gates.add_argument("--count", type=int, default=10)
    gates.add_argument("--clock", choices=CLOCKS, default="wall")
    results = verbs.add_parser("results")
    results.add_argument("hours", type=Path, nargs="+")
    results.add_argument("--trials", type=Path, required=True)
    given = parser.parse_args()
    if given.verb == "record":
        record(given.hour, given.minutes)
    elif given.verb == "live":
        live(given.trials, given.count, given.clock)
    else:
        print(write_results("gate_cpu", list(rows(given.hours, given.trials))))


if __name__ == "__main__":
    main()
