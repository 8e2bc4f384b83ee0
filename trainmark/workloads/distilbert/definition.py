"""DistilBERT as the registry knows it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainmark.contract import Definition, Exporter, Workload
from trainmark.scoring import RawFiles, ScoredRows, Scorer, Served
from trainmark.workloads.distilbert import plan, runs
from trainmark.workloads.distilbert.resolve import resolve
from trainmark.workloads.distilbert.runs import DistilbertRun


def _exporters() -> Mapping[str, Exporter[DistilbertRun]]:
    from trainmark.workloads.distilbert.export import LAYOUTS

    return LAYOUTS


def _load_scorer(served: Served[DistilbertRun]) -> Scorer:
    from trainmark.workloads.distilbert.serving import load

    return load(served)


def _score_files(
    served: Served[DistilbertRun], raw: RawFiles, folder: Path, done: int
) -> Iterator[ScoredRows]:
    from trainmark.workloads.distilbert.predictions import score_files

    return score_files(served, raw, folder, done)


def _load() -> Workload[DistilbertRun, Any, Any, Any, Any]:
    from trainmark.workloads.distilbert.workload import DISTILBERT

    return DISTILBERT


DISTILBERT = Definition(
    name="distilbert",
    runs=runs.RUNS,
    resolve=resolve,
    closed=runs.closed,
    sizes=runs.sizes,
    notes=runs.notes,
    plan=plan.plan,
    alternatives=plan.alternatives,
    inference_batches=runs.INFERENCE_BATCHES,
    exported_types=("distilbert", "bert"),
    exporters=_exporters,
    load_scorer=_load_scorer,
    score_files=_score_files,
    load=_load,
)
