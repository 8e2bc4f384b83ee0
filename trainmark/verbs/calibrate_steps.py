"""Whole steps of a small DLRM on CPUs, for `calibrate`.

Their parts were measured one by one. What a step takes beyond what the planner makes of these
becomes two figures: that of a step with hardly a sample, and that of each id of a sample. Python,
threads that wait for each other, reading of rows and ranks out of step are in them.
"""

import dataclasses
import itertools
import statistics
import time
from typing import Any

import torch

from trainmark import workloads
from trainmark.config import Run, filled
from trainmark.distributed import mesh as meshes
from trainmark.distributed.mesh import Mesh
from trainmark.hardware import known
from trainmark.hardware.known import Known
from trainmark.run.loop import build_trainer
from trainmark.run.memory import this_cluster

FEW, MANY = 16, 4096
"""Samples of a rank in one step."""
STEPS = {FEW: 100, MANY: 30}
ROUNDS = 3


def with_whole_steps(found: Known, here: torch.device) -> Known:
    """Add `step_s` and `id_s` of the ranks of this machine to what was measured."""
    mesh = meshes.build(here, {"dp": meshes.launched_ranks()})
    cluster = this_cluster(mesh)
    runs = {samples: _run(samples, mesh) for samples in (FEW, MANY)}
    missing, taken_s = {}, _measured_s(runs, mesh)
    for samples, run in runs.items():
        with known.described(found):
            plan = filled(workloads.definition(run).plan)(run, cluster)
        missing[samples] = taken_s[samples] - filled(plan.step_s)
    ids = len(runs[FEW].model.table_rows)
    id_s = max(missing[MANY] - missing[FEW], 0.0) / (ids * (MANY - FEW))
    step_s = max(missing[FEW] - FEW * ids * id_s, 0.0)
    measured = dataclasses.replace(
        found.measured, step_s=step_s or None, id_s=id_s / cluster.devices or None
    )
    return dataclasses.replace(found, measured=measured)


def _run(samples: int, mesh: Mesh) -> Any:
    """Steps of so many samples on every rank."""
    batch = samples * mesh.world_size
    changes: dict[str, Any] = {"data": "synthetic", "device": "cpu", "global_batch": batch}
    changes |= {"synthetic_rows": 2 * STEPS[samples] * batch, "epochs": 1000}
    run = dataclasses.replace(workloads.named_run(workloads.CALIBRATED), **changes)
    return workloads.resolve(run, this_cluster(mesh))


def _measured_s(runs: dict[int, Run], mesh: Mesh) -> dict[int, float]:
    """Seconds of a step of each run: the median of rounds in which the runs take turns."""
    workload = workloads.load(runs[MANY].workload)
    trainer = build_trainer(runs[MANY], workload, mesh)
    batches = {
        samples: iter(workload.build_data(run, "train", mesh.dp_rank, mesh.dp_size))
        for samples, run in runs.items()
    }

    def step_s(samples: int) -> float:
        begin = time.perf_counter()
        for batch in itertools.islice(batches[samples], STEPS[samples]):
            trainer.step(trainer.prepare(batch), 0.0)
        return (time.perf_counter() - begin) / STEPS[samples]

    rounds = [[step_s(samples) for samples in runs] for _ in range(1 + ROUNDS)]
    medians = [statistics.median(found) for found in zip(*rounds[1:], strict=True)]
    return dict(zip(runs, mesh.max_over_ranks(medians), strict=True))
