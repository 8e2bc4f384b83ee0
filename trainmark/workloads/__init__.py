"""The workloads, one folder each, with the same file names in each.

A workload is plain functions; `Workload` is the list of them that the loop calls. `runs.py`,
`resolve.py` and the packages themselves import no torch, so that `trainmark list`, `plan` and
`--help` stay instant.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trainmark.errors import unknown

if TYPE_CHECKING:
    from trainmark.run.memory import MemoryPlan

NAMES = ("dlrm", "distilbert", "llama3")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What the training loop needs to know about a workload."""

    build_model: Callable[..., Any]
    """(cfg) -> the model, on the meta device, written for one device."""
    parallelize: Callable[..., list[Any]]
    """(model, mesh, cfg) -> the modules that this rank owns, still on the meta device."""
    init_weights: Callable[..., None]
    """(parts, cfg, device): allocate and fill in place from (seed, parameter name, global row)."""
    build_data: Callable[..., Any]
    """(cfg, split, dp_rank, dp_size) -> iterable of batches, one optimiser step's share each, with

    - steps_per_epoch;
    - restore({"samples": n}): begin after n global samples, before the first batch is asked for;
    - describe(position): which rows the global batch that ends at `position` holds.
    """
    build_trainer: Callable[..., Any]
    """(parts, mesh, cfg) -> an object with

    - prepare(batch): copy (sort, exchange) a batch, one or more ahead of its step; the result has
      samples, tokens, partial, position (global samples so far) and ready (a device event);
    - step(prepared, lr) -> loss, skipped: one optimiser step; scalars that stay on the device,
      the same on all ranks, so that all of them stop at a loss that is not finite;
    - weights() and state_dict(): name -> tensor, filled in place by a checkpoint;
    - host_state() and load_state_dict(host_state): what is no tensor, as JSON;
    - device_bytes(), optional: bytes of weights, gradients and optimizer on this device, where
      they are not those of weights(), the parameters and state_dict().
    """
    evaluate: Callable[..., dict[str, float | None]]
    """(trainer, data) -> metrics, on all ranks, each sample once."""
    held_out_splits: Callable[..., tuple[str, ...]]
    """(cfg) -> the splits that are evaluated at the end."""
    metric: str
    """The metric that the target is set for."""
    better: str
    """`higher` or `lower`."""
    flops: Callable[..., dict[str, float]]
    """(cfg, samples, tokens) -> floating-point operations of training, per convention."""
    activation_bytes: Callable[..., int]
    """(cfg) -> estimated bytes of activations on one device."""
    plan_devices: Callable[..., "list[MemoryPlan]"] = lambda cfg: []
    """(cfg) -> bytes on each device, where they may differ."""
    host_bytes: Callable[..., list[int]] = lambda cfg: []
    """(cfg) -> bytes that each device keeps in its host's memory."""
    notes: Callable[..., list[str]] = lambda cfg: []
    """(cfg) -> sentences that a reader of the result must know."""
    build_predictor: Callable[..., Any] | None = None
    """(trainer) -> a function that makes of a batch in host memory the scores of its samples, there
    too; None where a workload has none. The trainer can only predict from then on."""
    save_model: Callable[..., None] | None = None
    """(trainer, folder): write the trained model for other software, at the end of a run."""


def runs_module(name: str) -> ModuleType:
    """A workload's `runs.py`: configuration dataclass, named runs, sizes; no torch."""
    return import_module(f"{__name__}.{name}.runs")


def smaller_runs(cfg: Any) -> Iterable[tuple[str, Any]]:
    """Flags with which a run takes less memory, each with the run that it makes; no torch.

    What costs the least quality comes first. `resolve` may refuse some of them.
    """
    proposed = getattr(runs_module(cfg.workload), "smaller", None)
    return proposed(cfg) if proposed else ()


def as_long_as_the_run(cfg: Any) -> frozenset[str]:
    """Fields that follow from how far a run goes, and change with it; no torch."""
    found = getattr(runs_module(cfg.workload), "as_long_as_the_run", None)
    return found(cfg) if found else frozenset()


def to_predict(cfg: Any) -> Any:
    """The run without what only training needs, as far as its workload can tell; no torch."""
    leave_out = getattr(runs_module(cfg.workload), "to_predict", None)
    return leave_out(cfg) if leave_out else cfg


def resolver(name: str) -> Callable[..., tuple[Any, list[str]]]:
    """(cfg, cluster) -> the configuration filled in, and all that is wrong with it; no torch."""
    return import_module(f"{__name__}.{name}.resolve").resolve


def on_other_data(cfg: Any, data: str) -> Any:
    """A finished run's settings for other data: without what `resolve` took from its own."""
    found = getattr(import_module(f"{__name__}.{cfg.workload}.resolve"), "on_other_data", None)
    return found(cfg, data) if found else cfg


def load(name: str) -> Workload:
    """The workload's functions (imports torch)."""
    modules = {
        part: import_module(f"{__name__}.{name}.{part}")
        for part in ("model", "parallelize", "data", "step", "flops")
    }
    return Workload(
        build_model=modules["model"].build_model,
        init_weights=modules["model"].init_weights,
        parallelize=modules["parallelize"].parallelize,
        build_data=modules["data"].build_data,
        build_trainer=modules["step"].build_trainer,
        evaluate=modules["step"].evaluate,
        held_out_splits=modules["data"].held_out_splits,
        metric=runs_module(name).METRIC,
        better=runs_module(name).BETTER,
        flops=modules["flops"].flops,
        activation_bytes=modules["flops"].activation_bytes,
        **_optional(modules["flops"], "plan_devices"),
        **_optional(modules["flops"], "host_bytes"),
        **_optional(runs_module(name), "notes"),
        **_optional(modules["step"], "build_predictor"),
        **_optional(modules["step"], "save_model"),
    )


def _optional(module: ModuleType, function: str) -> dict[str, Any]:
    found = getattr(module, function, None)
    return {} if found is None else {function: found}


def named_runs() -> dict[str, Callable[[], Any]]:
    """Every named run, in the order of the workloads."""
    return {name: make for w in NAMES for name, make in runs_module(w).RUNS.items()}


def named_run(name: str) -> Any:
    """The configuration of a named run."""
    known = named_runs()
    if name not in known:
        raise unknown("run", name, known)
    return known[name]()
