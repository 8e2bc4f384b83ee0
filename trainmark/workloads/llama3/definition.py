"""Llama-3 as the registry knows it."""

from collections.abc import Mapping
from typing import Any

from trainmark.contract import Definition, Exporter, Workload
from trainmark.hardware.devices import PRECISIONS
from trainmark.workloads.llama3 import plan, runs
from trainmark.workloads.llama3.resolve import resolve
from trainmark.workloads.llama3.runs import LlamaRun


def _exporters() -> Mapping[str, Exporter[LlamaRun]]:
    from trainmark.workloads.llama3.export import LAYOUTS

    return LAYOUTS


def _load() -> Workload[LlamaRun, Any, Any, Any, Any]:
    from trainmark.workloads.llama3.workload import LLAMA3

    return LLAMA3


LLAMA3 = Definition(
    name="llama3",
    runs=runs.RUNS,
    resolve=resolve,
    mesh_axes=runs.mesh_axes,
    closed=runs.closed,
    sizes=runs.sizes,
    precisions=PRECISIONS,
    layout_fields=frozenset({"parallel", "pipeline", "data_parallel"}),
    notes=runs.notes,
    smaller=runs.smaller,
    plan=plan.plan,
    alternatives=plan.alternatives,
    for_prediction=runs.for_prediction,
    exported_types=("llama",),
    exporters=_exporters,
    load=_load,
)
