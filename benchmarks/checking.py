"""What `--check-every` costs, in one process per run, with and without, by turns.

    python benchmarks/checking.py FOLDER                 # on a GPU
    python benchmarks/checking.py FOLDER --small         # on a CPU, to try it

Steps are checked more often than one would, so that noise does not hide what it costs; a row has
the speeds, and the cost of checking one step in 200. A check that finds a difference fails the run.
"""

import argparse
import shutil
import statistics
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.common import in_a_process, write_results
from trainmark.cli import main
from trainmark.files import read_json
from trainmark.run.loop import Training
from trainmark.run.result import FILE_NAME

COMMON = ("--evals-per-epoch", "0", "--checkpoint-every", "never")
Runs = dict[str, tuple[list[str], int, int]]
"""By name: flags, steps, and how many of them lie between two that are checked."""
GPU_RUNS: Runs = {
    "dlrm-small fp32": (["dlrm-small", "--data", "terabyte"], 2000, 19),
    "distilbert-sst2": (["distilbert-sst2", "--data", "synthetic", "--no-compile"], 200, 19),
    "llama3-1b": (["llama3-1b", "--data", "synthetic", "--no-compile"], 27, 5),
}
SMALL_RUNS: Runs = {
    "dlrm-demo": (["dlrm-demo", "--synthetic-rows", "400000", "--global-batch", "512"], 500, 19),
    "distilbert-demo": (["distilbert-demo"], 100, 19),
    "llama3-demo": (["llama3-demo"], 300, 19),
}


def measure(flags: list[str], steps: int, output: Path, every: int | None) -> None:
    """One run, into its folder."""
    line = ["train", *flags, *COMMON, "--output", str(output), "--max-steps", str(steps)]
    line += [] if every is None else ["--check-every", str(every)]
    with (  # nobody asks how well these runs predict
        mock.patch.object(Training, "_evaluate"),
        mock.patch.object(Training, "final_predictions", return_value={}),
    ):
        if main(line) != 0:
            raise RuntimeError(f"{line} failed")


def speed(flags: list[str], steps: int, folder: Path, every: int | None) -> float | None:
    """Samples per second; None if the run failed."""
    output = folder / "checking"
    shutil.rmtree(output, ignore_errors=True)
    if not in_a_process(lambda: measure(flags, steps, output, every)):
        return None
    found: float = read_json(output / FILE_NAME)["throughput"]["p_train"]
    return found


def rows(runs: Runs, folder: Path, repeats: int) -> list[dict[str, Any]]:
    found = []
    for name, (flags, steps, every) in runs.items():
        speeds: dict[int | None, list[float | None]] = {every: [], None: []}
        for _ in range(repeats):
            for chosen, of_runs in speeds.items():
                of_runs.append(speed(flags, steps, folder, chosen))
        row: dict[str, Any] = {"system": "trainmark", "run": name, "steps": steps, "every": every}
        row |= {"checked": speeds[every], "unchecked": speeds[None]}
        with_checks = [value for value in speeds[every] if value]
        without = [value for value in speeds[None] if value]
        if with_checks and without:
            cost = statistics.median(without) / statistics.median(with_checks) - 1
            row["cost_of_1_in_200"] = cost * every / 200
        found.append(row)
        print(row, flush=True)
    shutil.rmtree(folder / "checking", ignore_errors=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--results", type=Path, help="write the results here instead")
    options = parser.parse_args()
    runs = SMALL_RUNS if options.small else GPU_RUNS
    measured = rows(runs, options.folder, options.repeats)
    device = "cpu" if options.small else torch.device("cuda", 0)
    name = "checking" if options.small else "checking_h200"
    write_results(name, measured, device, folder=options.results)
