"""The published results that a run can be put beside.

`published_results.json` holds every figure as its authors printed it. FlagPerf's DLRM rows
count every sample 2 x devices times, so they come twice: as printed, and divided by that.
"""

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from trainmark.validation import parse


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published result; a figure that its authors do not give is None."""

    run: str
    """Our named run that trains the same model on the same data."""
    system: str
    """A key of `systems()`."""
    hardware: str
    case: str
    precision: str | None = None
    parallel: str | None = None
    fix_hp: str | None = None
    global_batch: int | None = None
    e2e_time_s: float | None = None
    p_whole: float | None = None
    p_train: float | None = None
    p_core: float | None = None
    metric: str | None = None
    quality: float | None = None
    validation: float | None = None
    """The same metric on the other held-out split."""
    target: float | None = None
    tokens_per_device_s: float | None = None
    aligned: bool | None = None
    mfu: list[float] | None = None
    """One value, or the lowest and the highest where the peak is a matter of view (fp8)."""
    mem_gib: float | None = None
    mem_total_gib: float | None = None
    overcount: int = 1
    """How often the source counts each sample."""
    time_speedup: float | None = None
    """Speed-up of mixed precision over the same row in full precision, as printed."""
    throughput_speedup: float | None = None
    cpu_speedup: float | None = None
    """Speed-up over a row of CPUs alone, as printed."""
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Model:
    """What a system says about the size of a model."""

    run: str
    system: str
    name: str
    """What the system calls it."""
    frequency_threshold: int | None = None
    parameters: float | None = None
    gib: float | None = None
    table_rows: list[int] | None = None


@dataclass(frozen=True, kw_only=True)
class InferenceRow:
    """Latency and throughput of a trained model at one batch size."""

    run: str
    system: str
    hardware: str
    case: str
    precision: str
    batch: int
    samples_per_s: float
    mean_ms: float
    throughput_speedup: float | None = None
    """Speed-up of mixed precision over the same row in full precision, as printed."""


@dataclass(frozen=True, kw_only=True)
class System:
    like: str
    """The form of table that its page has: a key of `report.like.FORMS`."""
    by: str
    """Who published it."""
    workload: str
    source: str
    dataset: str
    note: str | None


@dataclass(frozen=True, kw_only=True)
class Published:
    """Everything that the pages print."""

    systems: dict[str, System]
    rows: list[Row]
    models: list[Model]
    inference: list[InferenceRow]


def systems() -> dict[str, System]:
    """Where the rows come from."""
    return everything().systems


def rows_of(system: str) -> list[Row]:
    """All result rows of a system's page."""
    return [v for row in everything().rows if row.system == system for v in _versions(row)]


def models_of(system: str) -> list[Model]:
    """The models that a system's page lists."""
    return [model for model in everything().models if model.system == system]


def inference_of(system: str) -> list[InferenceRow]:
    """All rows on inference of a system's page."""
    return [row for row in everything().inference if row.system == system]


def for_run(run: str) -> list[Row]:
    """The published rows that compare with a named run; none for a run of our own."""
    rows = [row for row in everything().rows if row.run == run]
    return [version for row in rows for version in _versions(row)]


def _versions(row: Row) -> list[Row]:
    """The row as printed and, where samples were over-counted, also with the true count."""
    if row.overcount == 1:
        return [row]
    printed = {name: getattr(row, name) for name in ("p_whole", "p_train", "p_core")}
    true = {name: rate / row.overcount for name, rate in printed.items() if rate is not None}
    corrected = replace(row, **true, overcount=1, note=f"corrected, ÷ {row.overcount}")
    return [replace(row, note="as printed"), corrected]


@cache
def everything() -> Published:
    """The file, read once."""
    text = resources.files(__package__).joinpath("published_results.json").read_text()
    return parse(Published, json.loads(text), "published_results.json")
