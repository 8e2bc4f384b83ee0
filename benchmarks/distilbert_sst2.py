"""How well `trainmark train distilbert-sst2` fine-tunes a pretrained encoder on SST-2.

    PYTHONPATH=. python benchmarks/distilbert_sst2.py --data DATA --weights FOLDER       (CUDA)
    PYTHONPATH=. python benchmarks/distilbert_sst2.py --tiny --output build/tiny         (a CPU)

Every row is one call of the command. Recipes are tried packed, most promising first, until one
ends at the accuracy asked for; the best of them by its last evaluation is then trained padded, and
packed with other seeds, by which nothing was chosen. `last` is the accuracy at the end, `best` the
highest of all evaluations (one after every epoch), which flatters.

With `--to-target` both modes are trained as the published run is: evaluated often, and stopped by
the first evaluation that reaches the target. Such a run ends with the accuracy that it stopped for.

Rows of earlier calls stay.
Small batches leave a large GPU idle, so `--together` lets several calls share it; their times are
then those of a shared GPU.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks import common

WANTED = 0.90
EVALUATIONS = 8  # an epoch, on the way to the target
SEEDS = (1, 2)
SENTENCES = 67_349


@dataclass(frozen=True, kw_only=True)
class Recipe:
    lr: float
    batch: int
    epochs: int
    warmup: float = 0.1
    """Share of the steps."""
    weight_decay: float = 0.01
    precision: str = "bf16"


# Most promising first. Published fine-tunings of 6-layer MiniLMs reach 0.90 to 0.92 with 3e-5 to
# 5e-5, a warm-up, and their best after two to four epochs. Here, recipes of three to five epochs
# ended at 0.892 to 0.899, but had passed 0.901 after their second: so two come first.
RECIPES = (
    Recipe(lr=5e-5, batch=32, epochs=2),
    Recipe(lr=3e-5, batch=32, epochs=2),
    Recipe(lr=1e-4, batch=64, epochs=2),
    Recipe(lr=3e-5, batch=16, epochs=2),
    Recipe(lr=5e-5, batch=32, epochs=3),
    Recipe(lr=1e-4, batch=64, epochs=4),
    Recipe(lr=5e-5, batch=32, epochs=3, precision="tf32"),  # whether 16 bits cost accuracy
    Recipe(lr=3e-5, batch=32, epochs=5),
    Recipe(lr=1e-4, batch=32, epochs=3),
    Recipe(lr=3e-5, batch=16, epochs=3),
    Recipe(lr=2e-4, batch=128, epochs=5),
    Recipe(lr=5e-5, batch=256, epochs=10, warmup=0.0, weight_decay=0.0),  # the published one
)


def flags(recipe: Recipe, mode: str, seed: int, to_target: bool) -> list[str]:
    """A recipe as flags of the command."""
    steps = -(-SENTENCES // recipe.batch) * recipe.epochs
    stops = f"--stop-at-target --evals-per-epoch {EVALUATIONS}"
    return shlex.split(
        f"--mode {mode} --seed {seed} --precision {recipe.precision} --lr {recipe.lr} "
        f"--epochs {recipe.epochs} --global-batch {recipe.batch} --micro-batch {recipe.batch} "
        f"--eval-batch 436 --optimizer.weight-decay {recipe.weight_decay} "
        f"--schedule.warmup-steps {round(recipe.warmup * steps)} "
        f"--target {WANTED} {stops if to_target else '--no-stop-at-target'} "
        "--log-every 500 --checkpoint-every never"
    )


def trainmark(command: list[str]) -> None:
    """The command, in a process of its own."""
    words = [sys.executable, "-m", "trainmark", *command]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


class Study:
    """Runs the command, and writes all rows after each."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self._name = "distilbert_sst2_tiny" if options.tiny else "distilbert_sst2_h200"
        self.rows = common.read_rows(self._name)
        self.began, self._lock = time.perf_counter(), Lock()

    def run_all(self, wanted: Sequence[tuple[Recipe, str, int]]) -> list[dict[str, Any]]:
        """Calls that share the GPU; their rows in order."""
        if len(wanted) == 1:
            return [self.run(*wanted[0])]
        with ThreadPoolExecutor(len(wanted)) as pool:
            return list(pool.map(lambda call: self.run(*call), wanted))

    def run(self, recipe: Recipe, mode: str, seed: int) -> dict[str, Any]:
        options = self.options
        where = options.runs / f"{mode}-{RECIPES.index(recipe)}-{seed}"
        given = flags(recipe, mode, seed, options.to_target)
        given += TINY if options.tiny else real_data(options)
        command = ["train", "distilbert-sst2", *given, "--output", str(where)]
        started = time.perf_counter()
        trainmark(command)
        row = as_row(json.loads((where / "result.json").read_text()))
        row |= {"command": shlex.join(["trainmark", *command])}
        row |= {"commit": options.commit}
        row |= {"wall_s": round(time.perf_counter() - started, 1), "together": options.together}
        with self._lock:
            self._write(row)
        return row

    def _write(self, row: dict[str, Any]) -> None:
        options = self.options
        self.rows = [old for old in self.rows if old["command"] != row["command"]] + [row]
        print(
            json.dumps({key: value for key, value in row.items() if key != "command"}), flush=True
        )
        device = "cpu" if options.tiny else "cuda"
        common.write_results(
            self._name, self.rows, device, folder=options.output, commit=options.commit
        )

    def has_time_for(self, seconds: float) -> bool:
        """Whether a run that long still fits."""
        return self.options.seconds - (time.perf_counter() - self.began) > seconds


TINY = shlex.split(
    "--data synthetic --device cpu --precision fp32 --sequence-length 64 --synthetic-sentences 64 "
    "--global-batch 32 --micro-batch 32 --epochs 1 --schedule.warmup-steps 0 --warmup-clock 0 "
    "--model.vocabulary 50 --model.hidden 16 --model.layers 1 --model.heads 2 "
    "--model.feed-forward 16"
)
"""Flags that come last and so win: a toy network on made-up sentences."""


def real_data(options: argparse.Namespace) -> list[str]:
    return ["--data", str(options.data), "--weights", str(options.weights)]


def as_row(result: dict[str, Any]) -> dict[str, Any]:
    """What counts of a result.json."""
    cfg = result["config"]
    accuracies = [found["metrics"]["accuracy"] for found in result["evaluations"]]
    return {
        "system": "trainmark",
        "mode": cfg["mode"],
        "precision": cfg["precision"],
        "lr": cfg["lr"],
        "batch": cfg["global_batch"],
        "epochs": cfg["epochs"],
        "stops_at_target": cfg["stop_at_target"],
        "warmup_steps": cfg["schedule"]["warmup_steps"],
        "weight_decay": cfg["optimizer"]["weight_decay"],
        "seed": cfg["seed"],
        "last": accuracies[-1],
        "best": max(accuracies),
        "accuracies": [round(accuracy, 4) for accuracy in accuracies],
        "samples_per_s": result["throughput"]["p_train"],
        "memory_gib": round(result["memory"]["peak_bytes"] / 2**30, 2),
        "e2e_s": round(result["time_s"]["e2e"], 1),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", type=Path, help="made by 'trainmark prepare sst2'")
    parser.add_argument("--weights", type=Path, help="Hugging Face folder of the encoder")
    parser.add_argument("--runs", type=Path, default=Path("build/distilbert_sst2"))
    parser.add_argument("--seconds", type=float, default=420, help="no run begins that may not end")
    parser.add_argument("--together", type=int, default=1, help="calls that share the GPU")
    parser.add_argument("--to-target", action="store_true", help="stop where the target is reached")
    options = parser.parse_args(arguments)
    if not options.tiny and not (options.data and options.weights):
        parser.error("--data and --weights are needed")
    study = Study(options)
    if options.to_target:
        study.run_all(
            [(RECIPES[0], mode, seed) for mode in ("padded", "packed") for seed in (0, 1)]
        )
    else:
        search(study)


def search(study: Study) -> None:
    """Find a recipe, then train it padded and with other seeds."""
    options = study.options
    tried: list[tuple[Recipe, dict[str, Any]]] = []
    for recipes in batched(RECIPES[:2] if options.tiny else RECIPES, options.together):
        rows = study.run_all([(recipe, "packed", 0) for recipe in recipes])
        tried += zip(recipes, rows, strict=True)
        # A padded run of the best is still to come, and takes about three times as long.
        slowest = max(row["wall_s"] for row in rows)
        if max(row["last"] for row in rows) >= WANTED or not study.has_time_for(4 * slowest):
            break
    best, row = max(tried, key=lambda pair: pair[1]["last"])
    others = [(best, "padded", 0), *((best, "packed", seed) for seed in SEEDS)]
    for calls in batched(others, options.together):
        if calls[0][1] == "padded" or study.has_time_for(row["wall_s"]):
            study.run_all(calls)


def batched(items: Sequence[Any], count: int) -> Iterator[Sequence[Any]]:
    return (items[i : i + count] for i in range(0, len(items), count))


if __name__ == "__main__":
    main()
