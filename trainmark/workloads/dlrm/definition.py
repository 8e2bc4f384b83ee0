"""DLRM as the registry knows it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainmark.contract import Definition, Exporter, Workload
from trainmark.scoring import EncodedFiles, RawFiles, ScoredRows, Scorer, Served
from trainmark.workloads.dlrm import auto, fitted, plan, runs, sizes
from trainmark.workloads.dlrm.resolve import (
    check_data,
    check_weights,
    grown_tables,
    on_other_data,
    resolve,
)
from trainmark.workloads.dlrm.runs import DlrmRun


def _encode_files(cfg: DlrmRun, raw: RawFiles, folder: Path) -> EncodedFiles:
    from trainmark.workloads.dlrm.raw_files import encode_files

    return encode_files(cfg, raw, folder)


def _exporters() -> Mapping[str, Exporter[DlrmRun]]:
    from trainmark.workloads.dlrm.export import LAYOUTS

    return LAYOUTS


def _load_scorer(served: Served[DlrmRun]) -> Scorer:
    from trainmark.workloads.dlrm.serving import load

    return load(served)


def _score_files(
    served: Served[DlrmRun], raw: RawFiles, folder: Path, done: int
) -> Iterator[ScoredRows] | None:
    from trainmark.workloads.dlrm.raw_files import score_files

    return score_files(served, raw, folder, done)


def _load() -> Workload[DlrmRun, Any, Any, Any, Any]:
    from trainmark.workloads.dlrm.workload import DLRM

    return DLRM


DLRM = Definition(
    name="dlrm",
    runs=runs.RUNS,
    resolve=resolve,
    closed=fitted.closed,
    sizes=sizes.sizes,
    precisions=runs.PRECISIONS,
    layout_fields=frozenset({"sharding", "page_cache"}),
    fitted_fields=fitted.fitted_fields,
    notes=runs.notes,
    smaller=sizes.smaller,
    for_prediction=runs.for_prediction,
    on_other_data=on_other_data,
    check_data=check_data,
    encode_files=_encode_files,
    like_the_earlier=auto.like_the_earlier,
    check_weights=check_weights,
    candidates=auto.candidates,
    grown_tables=grown_tables,
    best_possible=lambda cfg: cfg.best_auc,
    plan=plan.plan,
    alternatives=plan.alternatives,
    inference_batches=runs.INFERENCE_BATCHES,
    tables_precision=lambda cfg: cfg.table_format.table_precision,
    exported_types=("dlrm",),
    exporters=_exporters,
    load_scorer=_load_scorer,
    score_files=_score_files,
    load=_load,
)
