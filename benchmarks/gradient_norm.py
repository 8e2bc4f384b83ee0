"""What the norm of the gradient costs, and `--check-every`: steps with them, and with neither.

    python benchmarks/gradient_norm.py               # on a GPU, some 2 minutes
    python benchmarks/gradient_norm.py --small       # on a CPU, some 2 minutes

The variants take turns in one process, with one trainer, on the same batches; DLRM's CUDA graphs
keep what they were captured with, so that each variant has its own. Their costs are medians, over
all turns, of a turn's time against that of the one without anything.

    norm      as trainmark trains: the norm, from which it also knows that gradients are finite
    again     the same once more: what two of one kind differ by
    finite    sums of absolute values, which tell that alone
    neither   nothing looks at the gradients
    checked   loss and gradients are computed twice, and compared

Llama-3 clips by the norm, so it has no `finite`. A last row is the time to write curves.csv.
"""

import argparse
import dataclasses
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.common import write_results
from trainmark import workloads
from trainmark.config import filled
from trainmark.distributed.mesh import single
from trainmark.hardware.backends import synchronizer
from trainmark.hardware.devices import Cluster, identify
from trainmark.run.curves import CurveWriter, Step, Stretch
from trainmark.run.loop import build_trainer
from trainmark.workloads.dlrm.slots import Slots


def finite(gradients: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Without a norm."""
    sums = torch._foreach_norm([*gradients, *others], ord=1, dtype=torch.float32)
    return torch.zeros_like(sums[0]), torch.isfinite(torch.stack(sums).sum()).float()


def neither(gradients: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """A gate that is always open."""
    return torch.zeros_like(others[0].sum()), torch.ones_like(others[0].sum())


PLACES: dict[str, tuple[str, list[Callable[..., Any]]]] = {
    "dlrm": ("trainmark.workloads.dlrm.step.gradient_norm", [finite, neither]),
    "distilbert": ("trainmark.workloads.distilbert.step.gradient_norm", [finite, neither]),
    "llama3": (
        "trainmark.workloads.llama3.step.LlamaTrainer._norm",
        [lambda trainer, gradients: torch.ones((), device=trainer.mesh.device)],
    ),
}
"""Of each workload: what computes the norm, and what stands in for it."""
FEWEST_TURNS = 10
STEPS_OF_A_TURN = {"dlrm": 20, "distilbert": 4, "llama3": 1}
"""On a GPU. On a CPU it is one: a thread's own time, which others on the machine hardly change."""
Runs = dict[str, dict[str, Any]]
GPU_RUNS: Runs = {
    "dlrm-small": {"data": "synthetic"},
    "distilbert-sst2": {"data": "synthetic", "compile": False},
    "llama3-1b": {"data": "synthetic", "compile": False},
}
CPU_RUNS: Runs = {"dlrm-demo": {}, "distilbert-demo": {}, "llama3-demo": {}}


def costs(
    run: str, changes: dict[str, Any], device: torch.device, turns: int, budget_s: float
) -> dict[str, Any]:
    """One row: seconds of a step by variant, and the costs of norm and checks."""
    cluster = Cluster(identify(device).key, 1, 1)
    named = dataclasses.replace(workloads.named_run(run), device=device.type, **changes)
    cfg = workloads.resolve(named, cluster)
    place, stand_ins = PLACES[cfg.workload]
    others = ["finite", "neither"] if len(stand_ins) == 2 else ["neither"]
    names = ["norm", "again", *others, "checked"]
    workload = workloads.load(cfg.workload)
    trainer = build_trainer(cfg, workload, single(device))
    batches = list(itertools.islice(workload.build_data(cfg, "train", 0, 1), 4))
    steps = {
        name: _stepper(trainer, batches, place, stand_in)
        for name, stand_in in zip(names, [None, None, *stand_ins], strict=False)
    }
    checked = filled(workload.checked_step)
    steps["checked"] = _stepper(trainer, batches, place, None, checked)
    of_step: dict[str, list[float]] = {name: [] for name in steps}
    began = time.monotonic()
    for turn in range(-2, turns):
        spent = 0 if device.type == "cpu" else time.monotonic() - began
        if turn >= FEWEST_TURNS and spent > budget_s:
            turns = turn
            break
        for name in random.sample(names, len(names)):
            seconds = steps[name]()
            if turn >= 0:
                of_step[name].append(seconds)
    row: dict[str, Any] = {"system": "trainmark", "run": run, "turns": turns}
    row["step_ms"] = {name: 1e3 * statistics.median(all_) for name, all_ in of_step.items()}

    def cost(name: str, against: str) -> float:
        pairs = zip(of_step[name], of_step[against], strict=True)
        return statistics.median(a / b - 1 for a, b in pairs)

    row |= {f"cost_of_{name}": cost(name, "neither") for name in ["norm", "again", *others[:-1]]}
    return row | {"cost_of_checking_1_in_200": cost("checked", "norm") / 200}


def _stepper(
    trainer: Any,
    batches: list[Any],
    place: str,
    stand_in: Any,
    step: Callable[[Any, Any, float], Any] = lambda trainer, *given: trainer.step(*given),
) -> Callable[[], float]:
    """What makes some steps, and returns the seconds of one."""
    device = trainer.mesh.device
    wait, found = synchronizer(device), itertools.cycle(batches)
    on_cpu = device.type == "cpu"
    count = 1 if on_cpu else STEPS_OF_A_TURN[trainer.cfg.workload]
    now = time.process_time if on_cpu else time.perf_counter
    # CUDA graphs of this variant alone, captured in its first steps.
    slots = Slots(trainer._copy, trainer._train_in_slot) if _has_slots(trainer) else None

    def steps() -> float:
        if slots is not None:
            trainer._slots = slots
        with mock.patch(place, stand_in) if stand_in else nullcontext():
            wait()
            began = now()
            for batch in itertools.islice(found, count):
                prepared = trainer.prepare(batch)
                if prepared.ready is not None:
                    prepared.ready.wait()
                step(trainer, prepared, 1e-4)
            wait()
            seconds = now() - began
        return seconds / count

    return steps


def _has_slots(trainer: Any) -> bool:
    return getattr(trainer, "_slots", None) is not None


def writing(steps: int = 100, looks: int = 200) -> dict[str, Any]:
    """The host's time to write both curves, of one step."""
    made = [
        Step(step=i, samples=65536 * i, loss=0.12345678 + i, lr=24.0 / 7, gradient_norm=1.2 / 7)
        for i in range(10**6, 10**6 + steps)
    ]
    with tempfile.TemporaryDirectory() as folder:
        writer, taken = CurveWriter(Path(folder), 0), []
        for _ in range(looks):
            began = time.perf_counter()
            writer.add(made, Stretch(time_s=1.0, samples_per_s=2.0, power_w=3.0))
            taken.append(time.perf_counter() - began)
        writer.close()
    return {"system": "trainmark", "run": "writing", "us": 1e6 * statistics.median(taken) / steps}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20, help="of a run's turns on a GPU")
    parser.add_argument("--runs", nargs="+", help="some of the named runs only")
    parser.add_argument("--results", type=Path, help="write the results here instead")
    options = parser.parse_args()
    device = torch.device("cpu") if options.small else torch.device("cuda", 0)
    chosen = CPU_RUNS if options.small else GPU_RUNS
    chosen = {run: chosen[run] for run in options.runs or chosen}
    torch.set_num_threads(1)
    rows = []
    for run, changes in chosen.items():
        rows.append(costs(run, changes, device, options.turns, options.seconds))
        print(rows[-1], flush=True)
    rows.append(writing())
    print(rows[-1], flush=True)
    name = "gradient_norm_cpu" if options.small else "gradient_norm_h200"
    write_results(name, rows, device, folder=options.results)
