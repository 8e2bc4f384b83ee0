"""The registry of workloads. Each workload is a folder; the folders have the same file names.

This is the only place in shared code that names them. Nothing that it imports loads torch.
"""

from collections.abc import Callable
from typing import Any

from trainmark.contract import AnyWorkload, Definition, RunT
from trainmark.errors import unknown
from trainmark.hardware.devices import Cluster
from trainmark.resolve import resolve_run
from trainmark.workloads.distilbert.definition import DISTILBERT
from trainmark.workloads.dlrm.definition import DLRM
from trainmark.workloads.llama3.definition import LLAMA3

DEFINITIONS: dict[str, Definition[Any]] = {
    workload.name: workload for workload in (DLRM, DISTILBERT, LLAMA3)
}
CALIBRATED = "dlrm-demo"
"""The run whose whole steps `trainmark calibrate` times on CPUs."""


def definition(run: RunT) -> Definition[RunT]:
    """The definition of the workload that `run` configures."""
    return DEFINITIONS[run.workload]


def load(name: str) -> AnyWorkload:
    """The workload's functions (imports torch)."""
    return DEFINITIONS[name].load()


def named_runs() -> dict[str, Callable[[], Any]]:
    """Every named run, in the order of the workloads."""
    return {name: make for known in DEFINITIONS.values() for name, make in known.runs.items()}


def named_run(name: str) -> Any:
    """The configuration of a named run."""
    known = named_runs()
    if name not in known:
        raise unknown("run", name, known)
    return known[name]()


def resolve(run: RunT, cluster: Cluster) -> RunT:
    """Fill in and check everything, for one kind of machine; all problems are told at once."""
    return resolve_run(run, cluster, definition(run))
