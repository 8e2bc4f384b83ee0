"""What a run says about itself: `result.json`.

`docs/metrics.md` defines every number here. Nothing in this file computes one: formulas live in
`metrics/`, times and counts come from `clocks.py`.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainmark import checksums
from trainmark.errors import InputError
from trainmark.files import read_json, write_atomically
from trainmark.metrics.binary import Assessment
from trainmark.validation import parse

SCHEMA = "trainmark.result/1"
FILE_NAME = "result.json"

_STRICT = {"extra": "forbid"}


@dataclass(frozen=True, kw_only=True)
class Steps:
    all: int
    """Optimiser steps attempted."""
    warmup: int
    """First steps, left out of p_train and p_core."""
    skipped: int
    """Steps whose update was not applied (loss-scale overflow)."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds, the maximum over ranks."""

    e2e: float
    init: float
    whole: float
    train: float
    core: float
    evaluation: float
    checkpoint: float
    """How long training stood still to save."""
    checkpoint_background: float = 0.0
    """How long threads wrote checkpoints beside it; no part of any other time."""
    input_wait: float
    warmup: float


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Samples (or tokens) per second; null where nothing was measured."""

    p_whole: float | None
    p_train: float | None
    p_core: float | None
    unit: str = "samples/s"


@dataclass(frozen=True, kw_only=True)
class Mfu:
    convention: str
    value: float
    low: float | None = None
    high: float | None = None
    peak_flops: float
    peak_dtype: str
    peak_source: str


@dataclass(frozen=True, kw_only=True)
class Quality:
    metric: str
    split: str
    value: float | None
    target: float | None
    better: str
    """`higher` or `lower`."""
    reached: bool | None
    """Null where the run has no target."""
    at_sample: int | None = None
    at_s: float | None = None
    best_possible: float | None = None
    """What no model can beat on this data, where it is known."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    at_sample: int
    split: str
    metrics: dict[str, float | None]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best evaluation so far, of the split that patience watches, and its checkpoint's step."""

    step: int
    at_sample: int
    split: str
    metric: str
    value: float
    since: int = 0
    """Evaluations of the split after it, none of which was better."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes. The peak as the device reports it, the maximum over devices."""

    peak_bytes: int
    allocated_peak_bytes: int | None
    total_bytes: int
    host_peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Energy:
    """Energy of the devices, by their own counters; null, with a reason, where nothing counts."""

    source: str | None
    joules: float | None
    """Energy of all devices, from the first allocation to the last evaluation."""
    train_joules: float | None
    """Energy in the time that p_train is measured in."""
    joules_per_sample: float | None
    joules_per_token: float | None
    samples_per_joule: float | None
    mean_power_w: float | None
    """Power of all devices, in the time that p_train is measured in."""
    peak_power_w: float | None
    """The highest sample of one device."""
    reason: str | None
    cost: float | None = None
    cost_per_epoch: float | None = None
    grams_co2: float | None = None
    grams_co2_per_epoch: float | None = None


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What the planner said before the first step; null for what it could not tell."""

    step_s: float | None
    p_train: float | None
    memory_bytes: int | None
    """Memory of the fullest device."""
    memory_parts: dict[str, int]
    parts: dict[str, float]
    """Seconds of a step on the device that the others wait for."""
    bound_by: str | None
    reason: str | None
    """Why there is no time."""
    planner: str
    """The planner's version."""
    constants: dict[str, float]
    """Constants that the times were computed with."""
    sources: list[str]
    """Sources of these constants and of the device's figures."""
    interval_s: tuple[float, float] | None = None
    """Between which the time of a step was expected; older results have none."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    first: float | None
    last: float | None
    curve: str = "loss.csv"


@dataclass(frozen=True, kw_only=True)
class Aligned:
    reference: str
    error: float
    passed: bool


@dataclass(frozen=True, kw_only=True)
class Result:
    __pydantic_config__ = _STRICT

    schema: str = SCHEMA
    run: str
    workload: str
    case: str
    precision: str
    parallel: dict[str, int | dict[str, float]]
    """Degree per axis; where ranks exchange rows also `sent_bytes_per_step`, by what is sent."""
    division: str
    """`closed`: comparable with the published rows; `open`: `changed` lists what differs."""
    changed: list[str]
    samples: int
    samples_measured: int
    tokens: int | None
    steps: Steps
    time_s: Times
    throughput: Throughput
    tokens_per_device_s: float | None
    tokens_per_device_s_spread: list[float] | None = None
    """The slowest and the fastest stretch between two looks at the loss (`log_every`)."""
    mfu: list[Mfu]
    mfu_reason: str | None = None
    """Why `mfu` is empty."""
    quality: Quality
    evaluations: list[Evaluation]
    assessments: dict[str, Assessment] = field(default_factory=dict)
    """Where labels are yes or no: all metrics of the final weights on each held-out split, with
    their uncertainty. Older results have none."""
    best: Best | None = None
    """With patience, the evaluation of the weights that the quality is measured on."""
    ended: str | None = None
    """Why training ended: `target`, `patience`, `max_steps` or `epochs`. Null in older results."""
    aligned: Aligned | None = None
    memory: Memory
    energy: Energy | None = None
    """Older results have none."""
    predicted: Predicted | None = None
    """Older results have none."""
    loss: Loss
    notes: list[str] = field(default_factory=list)
    """What a reader must know to trust the numbers: partial batches, resumes, debug modes."""
    warnings: list[str] = field(default_factory=list)
    """Why the result should not be trusted as it is, and what to do. Older results have none."""
    config: dict[str, Any]
    hardware: dict[str, Any]
    software: dict[str, Any]
    started: str

    @property
    def joules_per_sample(self) -> float | None:
        return self.energy.joules_per_sample if self.energy else None

    def final_metrics(self) -> dict[str, dict[str, float | None]]:
        """The metrics of the run's final weights, by split."""
        return final_metrics(self.evaluations, self.best)

    def write(self, folder: Path) -> Path:
        path = folder / FILE_NAME
        write_atomically(path, checksums.dumps(dataclasses.asdict(self)))
        return path


def final_metrics(
    evaluations: list[Evaluation], best: Best | None
) -> dict[str, dict[str, float | None]]:
    """The metrics of the best weights or, without patience, of the last ones, by split."""
    final = [e for e in evaluations if best is None or e.at_sample == best.at_sample]
    return {evaluation.split: evaluation.metrics for evaluation in final}


def read(folder: Path) -> Result:
    """The result of a finished run, from its folder or its `result.json`."""
    path = folder if folder.is_file() else folder / FILE_NAME
    if not path.is_file():
        raise InputError(
            f"{folder} has no {FILE_NAME}: expected the output folder of a finished run."
        )
    data = read_json(path)
    if data.get("schema") != SCHEMA:
        raise InputError(f"{path}: expected schema {SCHEMA!r}, received {data.get('schema')!r}.")
    return parse(Result, data, str(path))
