"""The constants of a DLRM on one GPU, fitted again to `results/plan_sweep_h200.json`.

    PYTHONPATH=. python benchmarks/plan_fit.py                     all of them
    PYTHONPATH=. python benchmarks/plan_fit.py --only small tf32   those of some parts

Fits the constants of `workloads/dlrm/gpu_time.py` and of `hardware/products.py` to the kernels of
the rows that are not held out, a part of the step at a time, and prints them beside those that the
planner has; then how far off whole steps are with either, held out and fitted to. What a part is
off by counts as a share of its step. Nothing is written: constants are rounded and copied by hand.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from benchmarks.common import read_rows
from benchmarks.plan_errors import SWEEP, configured
from trainmark.config import filled
from trainmark.hardware import products
from trainmark.hardware.devices import Cluster
from trainmark.hardware.machine import machine
from trainmark.hardware.products import Rates, rates_of
from trainmark.workloads.dlrm import gpu_time, sharding
from trainmark.workloads.dlrm.runs import DlrmRun

CLUSTER = Cluster("h200", 1, 1)
LIMITS = ("STRETCH", "HOST_S")  # of whole steps
HELD = 0.02  # of a step, for a constant that doubles
OUTLIER = 0.01  # of a step: what is off by more pulls less


@dataclass(frozen=True, kw_only=True)
class Part:
    """Kernels that were timed together, and what the planner says of them."""

    timed: Sequence[str]
    planned: Sequence[str]
    """Fields of `StepTime`."""
    constants: Sequence[str]
    without: Sequence[str] = ()
    """Constants of other kernels that these fields have."""
    precisions: Sequence[str] = ("bf16", "fp16", "fp8", "tf32", "fp32")


def of_products(precision: str, *besides: str) -> Part:
    names = [f"SHARES.{precision}.{kind}" for kind in products.SHARES[precision]]
    timed = {"bf16": ("bf16", "fp16")}.get(precision, (precision,))
    return Part(
        timed=("products", "masks"), planned=("products",), constants=(*names, *besides),
        precisions=timed,
    )  # fmt: skip


PARTS = {
    "forward": Part(
        timed=("forward",), planned=("forward",),
        constants=("VECTOR_BYTES", "PAIR_BYTES", "TWO_STORES"),
        precisions=("bf16", "fp16", "fp8", "tf32"),
    ),
    "update": Part(
        timed=("update",), planned=("update",),
        constants=(
            "GRADIENT_ROW", "CHANGED_ROW", "LOOKED_UP", "SUMMED", "ADAGRAD", "SUMMED_WIDE",
            "STORE_S",
        ),
        without=("SORTED",),
    ),
    "bf16": of_products("bf16"),
    "tf32": of_products("tf32"),
    "fp32": of_products("fp32"),
    "fp8": of_products("fp8"),
    "small": Part(
        timed=("small", "loss", "quantize"), planned=("passes", "starts"),
        constants=("STEP_S", "CAST_S", "FP8_S", "STATE_LAYER_S", "WEIGHT", "WEIGHT_WITH_STATE"),
        without=("BACKWARD", "FP32_BACKWARD"),
    ),
    "step": Part(timed=(), planned=(), constants=("STEP_S", "STRETCH", "RESTS", "SORTED")),
}  # fmt: skip


# --- constants by name


def constant(name: str) -> Any:
    first, *rest = name.split(".")
    found = getattr(products if hasattr(products, first) else gpu_time, first)
    for key in rest:
        found = found[key]
    return found


def set_constant(name: str, value: Any) -> None:
    first, *rest = name.split(".")
    if rest:
        constant(".".join([first, *rest[:-1]]))[rest[-1]] = value
    else:
        setattr(products if hasattr(products, first) else gpu_time, first, value)


@contextmanager
def constants_at(values: dict[str, Any]) -> Iterator[None]:
    kept = {name: constant(name) for name in values}
    for name, value in values.items():
        set_constant(name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            set_constant(name, value)


def nothing(name: str) -> Any:
    value = constant(name)
    return tuple(0.0 for _ in value) if isinstance(value, tuple) else 0.0


# --- rows


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A configuration and what it took."""

    row: dict[str, Any]
    cfg: DlrmRun
    rates: Rates
    profiles: Sequence[Any]

    @property
    def step_s(self) -> float:
        return float(self.row["measured_s"])

    def planned(self) -> gpu_time.StepTime:
        samples = filled(self.cfg.micro_batch)
        return gpu_time.gpu_time(self.cfg, self.rates, samples, self.profiles)

    def off(self) -> float:
        """The step's relative error."""
        return self.planned().total / self.step_s - 1


def measured(row: dict[str, Any]) -> Measured:
    cfg = configured(row, CLUSTER)
    assert isinstance(cfg, DlrmRun)
    rates = rates_of(CLUSTER, machine(CLUSTER), cfg.precision)
    return Measured(row=row, cfg=cfg, rates=rates, profiles=sharding.profiles(cfg))


def trained() -> list[Measured]:
    """By the engine that these constants are of, `others` of the design left out."""
    rows = [row for row in read_rows(SWEEP) if row["workload"] == "dlrm" and "error" not in row]
    return [
        found
        for row in rows
        if row["kind"] == "train" and gpu_time_is_of((found := measured(row)).cfg)
    ]


def gpu_time_is_of(cfg: DlrmRun) -> bool:
    sharding_, name = cfg.sharding, cfg.optimizer.name
    return not (sharding_.force_exchange or sharding_.host_tables or name == "adam")


# --- fits


def residuals(part: Part, rows: Sequence[Measured]) -> list[float]:
    """What each row's part is off by, as a share of its step."""
    if not part.timed:
        return [row.off() for row in rows]
    found = []
    with constants_at({name: nothing(name) for name in (*LIMITS, *part.without)}):
        for row in rows:
            kernels = row.row["kernels_us"]
            timed = 1e-6 * sum(kernels.get(name, 0.0) for name in part.timed)
            plan = row.planned()
            planned = sum(getattr(plan, name) for name in part.planned)
            found.append((planned - timed) / row.step_s)
    return found


def fitted(part: Part, rows: Sequence[Measured]) -> dict[str, float]:
    """Constants as these rows give them, none below 0."""
    of_part = [row for row in rows if row.cfg.precision in part.precisions]
    if part.timed:
        of_part = [row for row in of_part if "kernels_us" in row.row]
    start = np.array([constant(name) for name in part.constants])

    def off(factors: Any) -> Any:
        with constants_at(dict(zip(part.constants, map(float, factors * start), strict=True))):
            return residuals(part, of_part)

    # Sums of kernels do not tell all constants apart: each is held where it is, a little.
    best = least_squares(
        lambda f: [*off(f), *(HELD * (f - 1))], np.ones(len(start)), bounds=(0, np.inf),
        loss="soft_l1", f_scale=OUTLIER,
    )  # fmt: skip
    return dict(zip(part.constants, map(float, best.x * start), strict=True))


def report(rows: Sequence[Measured]) -> None:
    """Errors of whole steps."""
    for is_held_out in (True, False):
        own = [row for row in rows if row.row["held_out"] == is_held_out]
        errors = sorted((row.off() for row in own), key=abs)
        within = sum(abs(error) <= 0.06 for error in errors)
        words = "held out" if is_held_out else "fitted"
        median = statistics.median(map(abs, errors))
        print(f"  {words:9} {len(errors)} rows, median {median:.1%}, worst ", end="")
        print(f"{errors[-1]:+.1%}, within 6 %: {within}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    rows = trained()
    print("as the planner has them")
    report(rows)
    free = [row for row in rows if not row.row["held_out"]]
    for part in args.only:
        for name, value in fitted(PARTS[part], free).items():
            print(f"{part:8} {name:20} {constant(name):10.4g} {value:10.4g}")
            set_constant(name, value)
    print("as they are fitted")
    report(rows)
    for row in sorted(rows, key=lambda row: -abs(row.off()))[:12]:
        case = row.row["case"]
        print(f"  {row.off():+7.1%} {1e3 * row.step_s:8.2f} ms  {case}", end="")
        print(", held out" if row.row["held_out"] else "")


if __name__ == "__main__":
    main()
