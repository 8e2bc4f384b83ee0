"""How long training stands still to save, and what the thread beside it costs.

    python benchmarks/saving.py FOLDER           # on a GPU, some 4 minutes; FOLDER takes 40 GB
    python benchmarks/saving.py FOLDER --small   # on a CPU, half a minute, to try it

Each run saves once while it trains and once at its end: with a copy in host memory, which a thread
writes while training goes on, then as if there were no room for it. Rows have the seconds of both
saves (the second waits for the first), the speed, and how long the thread took to pin memory.
"""

import argparse
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.common import in_a_process, write_results
from trainmark.checkpoint import saver
from trainmark.cli import main
from trainmark.files import read_json
from trainmark.run import memory
from trainmark.run.loop import Training
from trainmark.run.result import FILE_NAME

COMMON = ("--evals-per-epoch", "0", "--keep-checkpoints", "1")
GPU_RUNS: dict[str, tuple[list[str], int]] = {
    # name: (flags, steps between two saves)
    "dlrm-small fp32": (["dlrm-small", "--data", "terabyte"], 2000),
    "dlrm-small int8": (["dlrm-small", "--data", "terabyte", "--table-precision", "int8"], 1500),
    "llama3-1b bf16": (["llama3-1b", "--data", "synthetic", "--no-compile"], 20),
}
SMALL_RUNS: dict[str, tuple[list[str], int]] = {
    "dlrm-demo": (["dlrm-demo", "--synthetic-rows", "20000", "--global-batch", "512"], 10),
    "llama3-demo": (["llama3-demo"], 20),
}


class Stopwatch:
    """Seconds of every call of some functions."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds.setdefault(name, []).append(time.perf_counter() - began)

        return timed


def measure(name: str, flags: list[str], every: int, output: Path, *, beside: bool) -> None:
    """One run; its row goes to a file beside its output."""
    watch = Stopwatch()
    steps = every * 3 // 2
    line = ["train", *flags, *COMMON, "--output", str(output), "--max-steps", str(steps)]
    line += ["--checkpoint-every", f"{every} steps"]
    room = memory._SHARE_FOR_COPIES if beside else 0
    with (
        mock.patch.object(memory, "_SHARE_FOR_COPIES", room),
        # Nobody asks how well these runs predict.
        mock.patch.object(Training, "_evaluate"),
        mock.patch.object(Training, "final_predictions", return_value={}),
        mock.patch.object(Training, "_save", watch.around("save_s", Training._save)),
        mock.patch.object(saver.HostMemory, "_pin", watch.around("pin_s", saver.HostMemory._pin)),
    ):
        if main(line) != 0:
            raise RuntimeError(f"{line} failed")
    found = read_json(output / FILE_NAME)
    size = sum(f.stat().st_size for f in output.glob("checkpoints/*/*.safetensors"))
    row = {
        "system": "trainmark" if beside else "trainmark, training waits",
        "run": name,
        "checkpoint_bytes": size,
        "time_s": found["time_s"],
        "p_train": found["throughput"]["p_train"],
        "notes": found["notes"],
        **watch.seconds,
    }
    write_results("row", [row], folder=output)


def rows(runs: dict[str, tuple[list[str], int]], folder: Path) -> list[dict[str, Any]]:
    found = []
    for name, (flags, every) in runs.items():
        for beside in (True, False):
            output = folder / "saving"
            shutil.rmtree(output, ignore_errors=True)

            def work(
                name: str = name, flags: list[str] = flags, every: int = every, here: bool = beside
            ) -> None:
                measure(name, flags, every, folder / "saving", beside=here)

            if in_a_process(work):
                found += read_json(output / "row.json")["rows"]
                print(found[-1], flush=True)
    shutil.rmtree(folder / "saving", ignore_errors=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--runs", nargs="+", choices=[*GPU_RUNS, *SMALL_RUNS], help="only these")
    parser.add_argument("--results", type=Path, help="write the results here instead")
    options = parser.parse_args()
    runs = SMALL_RUNS if options.small else GPU_RUNS
    chosen = {name: run for name, run in runs.items() if name in (options.runs or runs)}
    measured = rows(chosen, options.folder)
    device = "cpu" if options.small else torch.device("cuda", 0)
    write_results("saving" if options.small else "saving_h200", measured, device,
                  folder=options.results)  # fmt: skip
