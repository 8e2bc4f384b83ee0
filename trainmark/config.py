"""Run configuration: one frozen dataclass per workload, named runs, files, flags.

Settings come from the named run, then a file (`--config`), then flags. `resolve.py` fills in the
rest and checks everything. Nothing here imports torch.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import tyro

from trainmark import checksums
from trainmark.bounds import (
    Count,
    CountOrZero,
    Finite,
    NotNegative,
    Part,
    Positive,
    Repeats,
    Seed,
)
from trainmark.errors import InputError, unknown
from trainmark.hardware.backends import DeviceChoice
from trainmark.hardware.devices import Precision
from trainmark.validation import parse, read_mapping

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
"""What every workload computes in; one that can do more says so in `Definition.precisions`."""
SYNTHETIC = "synthetic"
Hidden = Annotated[str, tyro.conf.Suppress]
"""A field that is no flag."""
Better = Literal["higher", "lower"]
"""Which values of a metric are better."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate over optimiser steps, as a factor of the peak `lr`: warm-up, then a decay,
    then constant."""

    warmup_steps: CountOrZero = 0
    """Steps over which the rate rises linearly to its peak."""
    decay_start: CountOrZero | None = None
    """Step at which the decay begins; None keeps the peak until the end."""
    decay_steps: CountOrZero = 0
    """Steps that the decay takes."""
    decay: Literal["polynomial", "cosine"] = "polynomial"
    """Form of the decay."""
    decay_power: Positive = 2.0
    """Exponent of the polynomial decay (1 is linear)."""
    end_factor: Part = 0.0
    """Factor that the decay ends at, and that every later step keeps."""
    first_step: Literal[0, 1] = 0
    """What the first step counts as: 0 in NVIDIA's TensorFlow DLRM, 1 in its PyTorch one."""

    def factor(self, step: int) -> float:
        """The factor for optimiser step `step`, where the first one is 0 whatever `first_step`."""
        count = step + self.first_step
        if count < self.warmup_steps:
            return count / self.warmup_steps
        if self.decay_start is None or count <= self.decay_start:
            return 1.0
        if count >= self.decay_start + self.decay_steps:
            return self.end_factor
        left = (self.decay_start + self.decay_steps - count) / self.decay_steps
        if self.decay == "cosine":
            shape = 0.5 * (1.0 - math.cos(math.pi * left))
            return self.end_factor + (1.0 - self.end_factor) * shape
        return max(math.pow(left, self.decay_power), self.end_factor)

    def problems(self) -> Iterator[str]:
        """What is wrong with these numbers, a sentence each."""
        if self.decay_start is None and self.decay_steps > 0:
            yield "schedule.decay_steps needs schedule.decay_start."
        if self.decay_start is not None:
            if self.decay_start < self.warmup_steps:
                yield (
                    f"schedule.decay_start ({self.decay_start}) must not come before the end of "
                    f"the warm-up ({self.warmup_steps} steps)."
                )
            if self.decay_steps == 0:
                yield "schedule.decay_start needs schedule.decay_steps above 0."


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the runs of all workloads have in common."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    metric: ClassVar[str]
    """What quality is judged by, and what `target` is a value of; each workload says which."""
    better: ClassVar[Better]

    name: Hidden
    """The named run that this started as."""
    workload: Hidden
    """The workload's folder under `trainmark/workloads/`."""

    data: str | None = None
    """Folder of train-ready data (see `trainmark prepare`), or `synthetic`."""
    seed: Seed = 0
    """Seed of initial weights, data order and synthetic data."""
    device: DeviceChoice = "auto"
    """Where to train; `auto` takes a GPU of NVIDIA or AMD if there is one."""
    precision: Precision = "fp32"
    """Precision of the dense computation; weights and optimiser states stay fp32."""
    loss_scale: Literal["dynamic"] | Positive = "dynamic"
    """Loss scale for fp16: `dynamic`, or a fixed number such as the published 1024."""
    compile: bool | None = None
    """Compile the dense part with torch.compile; by default on a GPU only."""
    eager: bool = False
    """Plain eager execution, whatever else is set: no torch.compile, no CUDA graph."""

    global_batch: Count | None = None
    """Samples per optimiser step = micro_batch x accumulate x data-parallel size."""
    micro_batch: Count | None = None
    """Samples that one device computes at a time."""
    accumulate: Count | None = None
    """Micro-batches whose gradients are added up before an optimiser step."""
    eval_batch: Count | None = None
    """Samples per evaluation batch and device; by default the micro-batch."""
    last_batch: Literal["keep", "drop"] = "keep"
    """What to do with an epoch's last samples when they do not fill a global batch."""

    lr: NotNegative = 0.1
    """Peak learning rate."""
    schedule: Schedule = Schedule()
    epochs: Count = 1
    """Passes over the training data."""
    max_steps: Count | None = None
    """Stop after exactly this many optimiser steps."""
    evals_per_epoch: CountOrZero = 1
    """Evaluations per epoch, evenly spaced, the last at its end; 0 leaves only the final one."""
    initial_evaluation: bool = False
    """Evaluate once before the first step."""
    target: Finite | None = None
    """Quality to reach on the quality split; by default the run's published target."""
    stop_at_target: bool = True
    """End the run at the first evaluation that reaches the target."""
    quality_split: Literal["test", "validation"] = "test"
    """Held-out data that the target is judged on."""
    patience: Count | None = None
    """End the run after this many evaluations without a better one, and keep the best checkpoint.
    The validation split decides, if there is one."""

    warmup_clock: CountOrZero = 10
    """First optimiser steps left out of p_train and p_core (compilation, caches)."""
    log_every: Count = 100
    """Steps between two readings of the loss, which find a loss that is not finite."""
    checkpoint_every: str = "10 minutes"
    """`never`, `N steps` or `N minutes`; a run that is asked to stop saves anyway."""
    keep_checkpoints: Count = 2
    """How many checkpoints to keep."""
    keep_scores: CountOrZero = 20_000_000
    """Keep the scores of splits of at most this many rows (5 bytes each), for `compare`."""
    check_every: Count | None = None
    """Compute loss and gradients of every N-th step twice and stop if a bit differs, to find
    faulty hardware. N = 200 costs 0.5 % on a CPU (docs/reliability.md)."""
    profile: str | None = None
    """START:STOP, the steps of rank 0 to trace with torch.profiler, into OUTPUT/profile.json."""
    tensorboard: bool = False
    """Also write the curves as TensorBoard's events (needs the `plots` extra)."""
    dllogger: bool = False
    """Also write the lines of NVIDIA's dllogger, into OUTPUT/dllogger.json."""
    submission: str | None = None
    """ORG,PLATFORM: submitter and platform, for OUTPUT/mlperf.log."""
    price_per_hour: NotNegative | None = None
    """Price per hour of all devices of the run, in any currency; adds the cost to the result."""
    grams_co2_per_kwh: NotNegative | None = None
    """CO2 of the electricity; adds the emissions of the devices' energy to the result."""


AnyRun = TypeVar("AnyRun", bound=Run)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The flags of this call come first, then those that configure the run."""

    output: Path | None = None
    """Folder for results and checkpoints (default runs/RUN); one with a checkpoint is continued."""
    fresh: bool = False
    """Refuse to continue: the output folder must be new or empty."""
    weights_from: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """Start a new run from the weights of this checkpoint (or run folder), on its data or on data
    that extend it (prepare --vocabulary OLD --grow)."""
    with_optimizer: bool = False
    """With --from, take the optimiser's state, too."""
    config: Path | None = None
    """Configuration file between the named run and the flags: TOML, or a run's result.json or
    config.json."""
    reference: Path | None = None
    """Loss curve to compare with at the end, as `align` does; the result says if they agree."""
    repeats: Repeats = 1
    """Train this many seeds, into OUTPUT/0, OUTPUT/1, ..."""
    dry_run: bool = False
    """Resolve, build without allocating, and print the bytes per device; needs no device."""
    cluster: str | None = None
    """Hardware to resolve for, as HARDWARExNODESxDEVICES (a100-40gx2x8); default cpux1x1."""
    hardware: Path | None = None
    """A hardware.toml that describes this device: its peak gives an MFU, its rates a prediction."""


# --- a file between the named run and the flags


def with_file(
    run: AnyRun, path: Path, on_other_data: Callable[[AnyRun], AnyRun] = lambda run: run
) -> AnyRun:
    """`run` with the fields that a TOML file sets, or a run's result.json or config.json.

    Args:
        on_other_data: removes what a finished run's configuration took from its data.
    """
    given = read_mapping(path)
    is_config_json = path.suffix == ".json" and {"name", "workload"} <= given.keys()
    is_of_a_run = "schema" in given or is_config_json
    if "schema" in given and not isinstance(given.get("config"), dict):
        raise InputError(f"{path} has no 'config': expected the result.json of a run.")
    given = checksums.checked(given, path)
    if "schema" in given:
        given = given["config"]
    for fixed in ("name", "workload"):
        if given.get(fixed, getattr(run, fixed)) != getattr(run, fixed):
            raise InputError(
                f"{path} configures {fixed} {given[fixed]!r}, but the run asked for has "
                f"{getattr(run, fixed)!r}."
            )
    _check_keys(run, given, str(path))
    if is_of_a_run:
        # It has all fields that its version knew. Later ones mean what their defaults say, whatever
        # the named run has now.
        return on_other_data(parse(type(run), given, str(path)))
    return parse(type(run), _merge(dataclasses.asdict(run), given), str(path))


def _check_keys(template: Any, data: dict[str, Any], where: str) -> None:
    known = [field.name for field in dataclasses.fields(template)]
    for key, value in data.items():
        if key not in known:
            error = unknown("field", key, known)
            raise InputError(f"{where}: {error}")
        nested = getattr(template, key)
        if dataclasses.is_dataclass(nested) and isinstance(value, dict):
            _check_keys(nested, value, f"{where}: {key}")


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _merge(base[key], value) if nested else value
    return merged


# --- comparing runs

# Fields that change how a run is watched and kept, but neither its course nor its numbers.
OBSERVATION = frozenset({
    "log_every", "checkpoint_every", "check_every", "keep_checkpoints", "keep_scores", "profile",
    "tensorboard", "dllogger", "submission", "price_per_hour", "grams_co2_per_kwh",
})  # fmt: skip
# Fields that a vendor may tune while a result stays comparable with the published one, whatever the
# workload. Each has more such fields (`contract.Definition.closed`).
TUNABLE = OBSERVATION | {
    "data", "seed", "device", "precision", "loss_scale", "compile", "eager", "micro_batch",
    "accumulate", "eval_batch", "evals_per_epoch", "initial_evaluation", "warmup_clock",
}  # fmt: skip
# Fields that say how far a run goes; a continued run may change them, too.
EXTENSION = frozenset({"epochs", "max_steps", "target", "stop_at_target", "patience"})
# Fields that lay the same arithmetic out over devices; a continued run may be on others. Workloads
# have more such fields (`contract.Definition.layout_fields`).
LAYOUT = frozenset({"micro_batch", "accumulate"})


def to_plain(run: Run) -> dict[str, Any]:
    """The configuration as JSON has it: dictionaries, lists and scalars."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(run)))
    return plain


def or_synthetic(run: AnyRun) -> AnyRun:
    """The run; on generated rows, with sizes of its own, where its data is still to be given."""
    return dataclasses.replace(run, data=run.data or SYNTHETIC)


def differences(a: Run, b: Run, ignore: frozenset[str] = frozenset()) -> list[str]:
    """Dotted names of the fields in which two configurations differ."""
    of_a, of_b = (dict(flatten(to_plain(run))) for run in (a, b))
    return sorted(
        name
        for name in of_a.keys() | of_b.keys()
        if of_a.get(name) != of_b.get(name) and name.partition(".")[0] not in ignore
    )


def flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested dictionaries as (dotted name, value) pairs."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def changed_fields(named: Run, run: Run, closed: frozenset[str]) -> list[str]:
    """Fields that keep `run` from being comparable with the published results of `named`."""
    changed = differences(named, run, ignore=closed)
    # Generated data says nothing about quality.
    if run.data == SYNTHETIC and named.data != SYNTHETIC:
        changed.append("data")
    return changed


def element_bytes(precision: str) -> int:
    """Bytes of a number in the dense computation; fp8 is for some matrix products alone."""
    return 4 if precision in ("fp32", "tf32") else 2


def filled(value: T | None) -> T:
    """A field that `resolve` has filled in, without its None."""
    if value is None:
        raise TypeError("This configuration has not been resolved.")
    return value


# --- fields that are written in a form of their own


def parse_profile(text: str) -> range:
    """`START:STOP` as the range of steps to trace."""
    match = re.fullmatch(r"(\d{1,18}):(\d{1,18})", text, re.ASCII)
    if not match or int(match[1]) >= int(match[2]):
        raise InputError(f"profile must be START:STOP with START < STOP. Received: {text!r}.")
    return range(int(match[1]), int(match[2]))


@dataclass(frozen=True)
class Interval:
    """How often to do something: every so many steps, every so many seconds, or never."""

    steps: int | None = None
    seconds: float | None = None

    @staticmethod
    def parse(text: str) -> "Interval":
        """From `never`, `N steps` or `N minutes`."""
        if text == "never":
            return Interval()
        match = re.fullmatch(
            r"(\d{1,18}) steps?|(\d{1,18}(?:\.\d{1,18})?) minutes?", text, re.ASCII
        )
        if match and match[1] and int(match[1]) > 0:
            return Interval(steps=int(match[1]))
        if match and match[2] and float(match[2]) > 0:
            return Interval(seconds=60 * float(match[2]))
        raise InputError(
            f"checkpoint_every must be 'never', 'N steps' or 'N minutes'. Received: {text!r}."
        )

    def due(self, step: int, seconds_since: float) -> bool:
        """Whether it is time after `step` steps, so many seconds after the last time."""
        if self.steps is not None:
            return step > 0 and step % self.steps == 0
        return self.seconds is not None and seconds_since >= self.seconds
