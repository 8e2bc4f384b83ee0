"""How often `trainmark gate` is right on a noisy machine, and how long it takes.

    python benchmarks/gate_cpu.py record HOUR.jsonl         # an hour of two equal sides, by turns
    python benchmarks/gate_cpu.py live TRIALS.jsonl         # gates of a commit that is 3 % slower
    python benchmarks/gate_cpu.py results HOUR.jsonl TRIALS.jsonl

`record` starts a fresh pair of processes every minute and keeps what every block's steps took.
`results` lets gates begin at random minutes of that hour and go on from there as they would have,
once with 3 % more for every step of the candidate and once without. `live` gates, in a clone,
commits whose loop waits after each step for 3 % of its time, and commits that change nothing.
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
from trainmark.metrics.slowdown import block_difference, compare, median_and_error
from trainmark.verbs.gate import ENDLESS, ROUND_BLOCKS, TREE
from trainmark.verbs.gate_turns import Side, resident, train_by_turns
from trainmark.verbs.options import GateOptions

RUN = "dlrm-demo"
SLOWER_BY = 0.03
ROUND_S = 60.0
BUDGET_S = GateOptions().budget
RESAMPLED = 1000
SEED = 0
Row = dict[str, Any]


# --- an hour


def record(target: Path, minutes: float) -> None:
    """Append a line for each pair of processes."""
    ends, coin = time.monotonic() + 60 * minutes, random.Random(SEED)
    base = Side(name="base", tree=TREE, words=[RUN, *ENDLESS])
    candidate = dataclasses.replace(base, name="candidate")
    while time.monotonic() < ends:
        starting = time.monotonic()
        with (
            tempfile.TemporaryDirectory() as folder,
            resident(base, candidate, Path(folder)) as workers,
        ):
            turns = train_by_turns(*workers, coin)
            blocks = [next(turns)]
            ready = time.monotonic()
            while time.monotonic() < ready + ROUND_S:
                blocks.append(next(turns))
            measured_s = time.monotonic() - ready
        row = {
            "load": os.getloadavg()[0],
            "setup_s": ready - starting,
            "block_s": measured_s / (len(blocks) - 1),
            "blocks": [[block.base_s, block.candidate_s] for block in blocks],
        }
        _append(target, row)
        print(f"load {row['load']:.1f}, {len(blocks)} blocks", flush=True)


# --- gates that begin at random minutes of it


def resampled(hour: Sequence[Row], effect: float, rng: np.random.Generator) -> tuple[str, float]:
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
        for difference in pair["differences"].split()[:ROUND_BLOCKS]:
            rounds[-1].append(sign * float(difference) + math.log1p(effect))
            seconds += pair["block_s"]
            found = compare(rounds, SLOWER_BY)
            verdict = found.verdict if found else "undecided"
            if verdict != "undecided" or seconds >= BUDGET_S:
                return verdict, seconds


def resampled_row(hour: Sequence[Row], effect: float, trials: int = RESAMPLED) -> Row:
    rng = np.random.default_rng(SEED)
    found = [resampled(hour, effect, rng) for _ in range(trials)]
    return {"system": "trainmark", "what": "resampled", "slower_by": effect} | _counts(found)


def _counts(found: Sequence[tuple[str, float]]) -> Row:
    verdicts, seconds = [verdict for verdict, _ in found], [seconds for _, seconds in found]
    counts = {verdict: verdicts.count(verdict) for verdict in ("slower", "not slower", "undecided")}
    quantiles = {
        "median_s": round(float(np.median(seconds)), 1),
        "p90_s": round(float(np.quantile(seconds, 0.9)), 1),
    }
    return {"trials": len(found), "budget_s": BUDGET_S} | counts | quantiles


# --- live


def live(target: Path, trials: int) -> None:
    """Gate as CI would, in a clone: a commit that is slower, then one that is not, and so on."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        _git(TREE, "clone", "--quiet", "--shared", str(TREE), str(clone))
        for trial in range(trials):
            slower = trial % 2 == 0
            _git(clone, "checkout", "--quiet", "--detach", "origin/HEAD")
            if slower:
                _slow_down(clone / "trainmark" / "run")
            _git(clone, "commit", "--quiet", "--all", "--allow-empty", "--message", "candidate")
            done = subprocess.run(
                [sys.executable, "-P", "-m", "trainmark", "gate", RUN, "--base", "HEAD~1"],
                env={**os.environ, "PYTHONPATH": str(clone)},
                stdout=subprocess.PIPE,
                check=False,
            )
            row = {"slower_by": SLOWER_BY if slower else 0.0, "exit_code": done.returncode}
            row |= json.loads(done.stdout) | {"load": os.getloadavg()[0]}
            _append(target, row)
            print(row, flush=True)


def _slow_down(folder: Path) -> None:
    """Wait after each step, for a share of the time that it and its batch took."""
    _replace(
        folder / "feed.py",
        "        self._waits.begin()\n",
        "        self.began = time.perf_counter()\n        self._waits.begin()\n",
    )
    _replace(
        folder / "loop.py",
        "                profiler.step_done(progress.step)\n",
        "                profiler.step_done(progress.step)\n"
        "                now = time.perf_counter()\n"
        f"                ends = now + {SLOWER_BY} * (now - self.feed.began)\n"
        "                while time.perf_counter() < ends:\n"
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


def rows(hour: Path, trials: Path) -> Iterator[Row]:
    recorded = [_with_differences(pair) for pair in _lines(hour)]
    medians = [
        median_and_error(list(map(float, pair["differences"].split())))[0] for pair in recorded
    ]
    seconds = [pair["setup_s"] + pair["block_s"] * pair["blocks"] for pair in recorded]
    yield {
        "system": "trainmark",
        "what": "recorded",
        "run": RUN,
        "minutes": round(sum(seconds) / 60, 1),
        "sd_of_medians": round(float(np.std(medians)), 5),
        "pairs": recorded,
    }
    for effect in (SLOWER_BY, 0.0):
        yield resampled_row(recorded, effect)
    gates = list(_lines(trials))
    for effect in (SLOWER_BY, 0.0):
        of_it = [gate for gate in gates if gate["slower_by"] == effect]
        counts = _counts([(gate["verdict"], gate["seconds"]) for gate in of_it])
        yield (
            {"system": "trainmark", "what": "live", "slower_by": effect}
            | counts
            | {"gates": [{k: v for k, v in gate.items() if k != "slower_by"} for gate in of_it]}
        )


def _with_differences(pair: Row) -> Row:
    steps = [step for block in pair["blocks"] for side in block for step in side]
    return {
        "load": round(pair["load"], 2),
        "setup_s": round(pair["setup_s"], 2),
        "block_s": round(pair["block_s"], 4),
        "blocks": len(pair["blocks"]),
        "step_ms": [round(1e3 * float(q), 2) for q in np.quantile(steps, [0.1, 0.5, 0.9])],
        "differences": " ".join(f"{block_difference(a, b):.4f}" for a, b in pair["blocks"]),
    }


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
    results = verbs.add_parser("results")
    results.add_argument("hour", type=Path)
    results.add_argument("trials", type=Path)
    given = parser.parse_args()
    if given.verb == "record":
        record(given.hour, given.minutes)
    elif given.verb == "live":
        live(given.trials, given.count)
    else:
        print(write_results("gate_cpu", list(rows(given.hour, given.trials))))


if __name__ == "__main__":
    main()
