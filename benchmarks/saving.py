"""How long training stands still to save, and what the thread beside it costs.

    python benchmarks/saving.py FOLDER           # on a GPU, some 2 minutes; FOLDER takes 40 GB
    python benchmarks/saving.py FOLDER --small   # on a CPU, half a minute, to try it

Each run saves twice: while it trains, with a copy in host memory, which a thread writes while
training goes on; and at its end, as if there were no room for a copy. A row has what each of them
took, the speed before the first one and behind it, and how long a thread took to pin memory.
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
from trainmark.run.loop import Training
from trainmark.run.result import FILE_NAME

COMMON = ("--evals-per-epoch", "0", "--keep-checkpoints", "1")
GPU_RUNS: dict[str, tuple[list[str], int]] = {
    # name: (flags, steps between two saves)
    "dlrm-small fp32": (["dlrm-small", "--data", "terabyte"], 2000),
    "dlrm-small int8": (["dlrm-small", "--data", "terabyte", "--table-precision", "int8"], 1000),
    "llama3-1b bf16": (["llama3-1b", "--data", "synthetic", "--no-compile"], 20),
}
SMALL_RUNS: dict[str, tuple[list[str], int]] = {
    "dlrm-demo": (["dlrm-demo", "--synthetic-rows", "20000", "--global-batch", "512"], 10),
    "llama3-demo": (["llama3-demo"], 20),
}


class Saves:
    """What the saves of a run took, and how fast it trained before each of them."""

    def __init__(self, *, beside_only: bool) -> None:
        self._beside_only = beside_only
        self.save_s: list[float] = []
        self.pin_s: list[float] = []
        self._trained: list[tuple[int, float]] = [(0, 0.0)]

    def save(self, training: Training, save: Callable[[Training], Path]) -> Path:
        """In the place of `Training._save`."""
        totals = training.clocks.so_far()
        self._trained.append((totals.samples - totals.samples_warmup, totals.train))
        if self.save_s:
            training._wait_for_save()
            if self._beside_only:
                return training.output
            training._saver._memory = None
        began = time.perf_counter()
        folder = save(training)
        self.save_s.append(time.perf_counter() - began)
        return folder

    def pin(self, memory: saver.HostMemory, pin: Callable[[saver.HostMemory], None]) -> None:
        """In the place of `HostMemory._pin`."""
        began = time.perf_counter()
        pin(memory)
        self.pin_s.append(time.perf_counter() - began)

    @property
    def samples_per_s(self) -> list[float]:
        """Before the first save, and from there to the second: while the thread writes."""
        stretches = zip(self._trained[1:], self._trained, strict=False)
        return [(samples - s) / (seconds - b) for (samples, seconds), (s, b) in stretches]


def measure(name: str, flags: list[str], every: int, output: Path, *, beside_only: bool) -> None:
    """One run; its row goes to a file beside its output."""
    saves, save, pin = Saves(beside_only=beside_only), Training._save, saver.HostMemory._pin
    line = ["train", *flags, *COMMON, "--output", str(output), "--max-steps", str(every * 3 // 2)]
    with (
        # Nobody asks how well these runs predict.
        mock.patch.object(Training, "_evaluate"),
        mock.patch.object(Training, "final_predictions", return_value={}),
        mock.patch.object(Training, "_save", lambda training: saves.save(training, save)),
        mock.patch.object(saver.HostMemory, "_pin", lambda memory: saves.pin(memory, pin)),
    ):
        if main([*line, "--checkpoint-every", f"{every} steps"]) != 0:
            raise RuntimeError(f"{line} failed")
    found = read_json(output / FILE_NAME)
    row = {
        "system": "trainmark",
        "run": name,
        "checkpoint_bytes": sum(
            file.stat().st_size for file in output.glob("checkpoints/*/*.safetensors")
        ),
        "stall_s": saves.save_s[0],
        "background_s": found["time_s"]["checkpoint_background"],
        "stall_without_a_copy_s": None if beside_only else saves.save_s[1],
        "samples_per_s_before": saves.samples_per_s[0],
        "samples_per_s_while_writing": saves.samples_per_s[1],
        "pin_s": saves.pin_s,
        "time_s": found["time_s"],
        "notes": found["notes"],
    }
    write_results("row", [row], folder=output)


def rows(
    runs: dict[str, tuple[list[str], int]], folder: Path, *, beside_only: bool
) -> list[dict[str, Any]]:
    found, output = [], folder / "saving"
    for name, (flags, every) in runs.items():
        shutil.rmtree(output, ignore_errors=True)

        def work(name: str = name, flags: list[str] = flags, every: int = every) -> None:
            measure(name, flags, every, output, beside_only=beside_only)

        if in_a_process(work):
            found += read_json(output / "row.json")["rows"]
            print(found[-1], flush=True)
    shutil.rmtree(output, ignore_errors=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--beside-only", action="store_true", help="save once, with a copy")
    parser.add_argument("--runs", nargs="+", choices=[*GPU_RUNS, *SMALL_RUNS], help="only these")
    parser.add_argument("--results", type=Path, help="write the results here instead")
    options = parser.parse_args()
    runs = SMALL_RUNS if options.small else GPU_RUNS
    chosen = {name: run for name, run in runs.items() if name in (options.runs or runs)}
    measured = rows(chosen, options.folder, beside_only=options.beside_only)
    device = "cpu" if options.small else torch.device("cuda", 0)
    write_results("saving" if options.small else "saving_h200", measured, device,
                  folder=options.results)  # fmt: skip
