"""The constants of a DLRM's kernels on one GPU, fitted again to `results/plan_sweep_h200.json`.

    PYTHONPATH=. python benchmarks/plan_fit.py

Prints each constant of `workloads/dlrm/gpu_time.py` that belongs to a part of a step whose kernels
the sweep timed, as the planner has it and as the rows that are not held out give it: least squares
of relative errors, one part at a time. A step's time is linear in all of them, so a constant's
share of it is what is missing without the constant. What the planner has is rounded, and was fitted
to single kernels where a part has several; so were the shares of matrix products
(`hardware/products.py`), whose single times the results do not have. Nothing is written.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.common import read_rows
from benchmarks.plan_errors import SWEEP, configured
from trainmark.config import filled
from trainmark.hardware.devices import Cluster
from trainmark.hardware.machine import machine
from trainmark.hardware.products import rates_of
from trainmark.workloads.dlrm import gpu_time, sharding
from trainmark.workloads.dlrm.runs import DlrmRun

CLUSTER = Cluster("h200", 1, 1)
LIMITS = ("STRETCH", "HOST_S")  # of whole steps


@dataclass(frozen=True, kw_only=True)
class Part:
    """Kernels that were timed together."""

    timed: str
    constants: Sequence[str]
    without: Sequence[str] = ()
    """Constants of other parts that multiply these."""
    fp32: bool | None = None
    """Whether only rows of fp32 count, or only others."""


PARTS = (
    Part(
        timed="forward",
        constants=("VECTOR_BYTES", "PAIR_BYTES", "TWO_STORES"),
        without=("BACKWARD",),
        fp32=False,
    ),
    Part(timed="backward", constants=("BACKWARD",), fp32=False),
    Part(
        timed="update",
        constants=(
            "GRADIENT_ROW", "CHANGED_ROW", "LOOKED_UP", "SUMMED", "ADAGRAD", "SUMMED_WIDE",
            "STORE_S",
        ),
    ),
    Part(timed="loss", constants=("LOSS",)),
    Part(timed="masks", constants=("MASKED", "MASKED_CODES")),
    Part(timed="small", constants=("STEP_S", "FP8_S", "ADAGRAD_LAYER_S", "PARAMETER")),
)  # fmt: skip


@contextmanager
def without(*names: str) -> Iterator[None]:
    """With these constants 0."""
    kept = {name: getattr(gpu_time, name) for name in names}
    for name in names:
        setattr(gpu_time, name, 0.0)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(gpu_time, name, value)


def step_s(cfg: DlrmRun) -> float:
    rates = rates_of(CLUSTER, machine(CLUSTER), cfg.precision)
    assert not isinstance(rates, str), rates
    samples = filled(cfg.micro_batch)
    return gpu_time.gpu_time(cfg, rates, samples, sharding.profiles(cfg)).total


def share_s(cfg: DlrmRun, constant: str) -> float:
    """Seconds of a step for each 1 of a constant."""
    whole = step_s(cfg)
    with without(constant):
        less = step_s(cfg)
    return (whole - less) / float(getattr(gpu_time, constant))


def fitted(part: Part, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Constants as these rows give them; those that none of them depends on are left out."""
    shares, seconds = [], []
    for row in rows:
        cfg = configured(row, CLUSTER)
        assert isinstance(cfg, DlrmRun)
        timed = row["kernels_us"].get(part.timed)
        if timed and part.fp32 in (None, cfg.precision == "fp32"):
            with without(*LIMITS, *part.without):
                shares.append([share_s(cfg, name) for name in part.constants])
            seconds.append(timed * 1e-6)
    relative = np.array(shares) / np.array(seconds)[:, None]
    used = np.flatnonzero(relative.any(axis=0)).tolist()
    scale = relative[:, used].max(axis=0)
    found, *_ = np.linalg.lstsq(relative[:, used] / scale, np.ones(len(seconds)), rcond=None)
    names = [part.constants[place] for place in used]
    return dict(zip(names, map(float, found / scale), strict=True))


def main() -> None:
    rows = [row for row in read_rows(SWEEP) if row["workload"] == "dlrm" and not row["held_out"]]
    for part in PARTS:
        for name, value in fitted(part, rows).items():
            print(f"{part.timed:10} {name:16} {getattr(gpu_time, name):10.4g} {value:10.4g}")


if __name__ == "__main__":
    main()
