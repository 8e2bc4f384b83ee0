"""Latency of predictions on a GPU: `trainmark infer`'s way beside plain PyTorch, in one run.

    python -m benchmarks.inference_gpu                          all rows (a CUDA machine)
    python -m benchmarks.inference_gpu --tiny --output DIR      the same code, anywhere

Models have random weights, which take as long as trained ones. Ids follow a power law. Requests lie
in pinned memory, in the types of the dataset, unless `request` says otherwise. PyTorch computes
with the exported model (`standalone.py`), eagerly and compiled, with the same weights under
autocast; its requests are two pinned tensors, numbers and ids of 32 bits.
"""

import argparse
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import write_results
from benchmarks.dlrm_gpu import TINY
from benchmarks.dlrm_systems import (
    click_batch,
    mlps_in,
    random_clicks,
    resolved,
    tables_in,
    trainer_for,
    with_changes,
)
from trainmark.config import SYNTHETIC
from trainmark.embeddings.tables.batch import IdGroup
from trainmark.inference import latency
from trainmark.training.precision import autocast, set_matmul_precision
from trainmark.workloads.dlrm import export, standalone
from trainmark.workloads.dlrm.data import ClickBatch
from trainmark.workloads.dlrm.runs import RUNS, for_prediction
from trainmark.workloads.dlrm.step import build_predictor

OURS, EAGER, COMPILED = "trainmark", "PyTorch, eager", "PyTorch, compiled"
PINNED, PAGEABLE = "pinned, the dataset's types", "pageable, float32 and int64"
PEERS_OWN = "pinned, float16 and int32"
SIZES = (1, 64, 2048, 4096, 32768, 65536)
FEW_SIZES = (1, 2048, 32768, 65536)
MOST_CLIENTS = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows of one model in one precision: (batch, clients), and what else to ask it."""

    run: str = "dlrm-small"
    precision: str = "fp16"
    tables: str = "fp32"
    ours: Sequence[tuple[int, int]] = tuple((size, 1) for size in FEW_SIZES)
    pageable: Sequence[int] = ()
    eager: Sequence[int] = ()
    compiled: Sequence[int] = ()
    host_tables: tuple[int, ...] = ()


CASES: tuple[Case, ...] = (
    Case(
        ours=(
            *((size, 1) for size in SIZES),
            *((size, n) for size in (2048, 32768, 65536) for n in (2, MOST_CLIENTS)),
        ),
        pageable=(64, 2048, 65536),
        eager=SIZES,
    ),
    Case(precision="bf16"),
    Case(precision="fp8", ours=(*((size, 1) for size in FEW_SIZES), (65536, MOST_CLIENTS))),
    Case(host_tables=(0,), ours=((2048, 1),)),
    Case(run="dlrm-xlarge", tables="int8", ours=((1, 1), (2048, 1), (65536, 1), (65536, 4))),
    Case(tables="int8", ours=(*((size, 1) for size in FEW_SIZES), (65536, MOST_CLIENTS))),
    Case(tables="bf16", ours=((2048, 1), (65536, 1))),
    Case(precision="tf32"),
    Case(precision="fp32", ours=((1, 1), (2048, 1), (32768, 1)), eager=(2048, 32768)),
    Case(ours=(), compiled=(2048, 65536)),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    device: torch.device
    tiny: bool
    requests: int


def built(case: Case, options: Options) -> Any:
    """A trainer of the model, with random weights."""
    changes: dict[str, Any] = mlps_in(case.precision) | tables_in(case.tables)
    if case.host_tables:
        changes["sharding"] = {"host_tables": case.host_tables}
    named = with_changes(
        RUNS[case.run](), {"data": SYNTHETIC} | ({"model": TINY} if options.tiny else {})
    )
    set_matmul_precision(case.precision)
    return trainer_for(resolved(for_prediction(named), changes, options.device), options.device)


def rows_of(case: Case, options: Options) -> Iterator[dict[str, Any]]:
    """Measured one after another."""
    trainer = built(case, options)
    model = trainer.cfg.model
    if case.eager or case.compiled:  # first: with weights that prediction casts
        yield from _peers(case, trainer, options)
    most = max((clients for _, clients in case.ours), default=0)
    predictors = [build_predictor(trainer) for _ in range(most)]
    for size, clients in case.ours:
        yield _row(OURS, case, predictors[:clients], _requests(model, size, options), options)
    for size in case.pageable:
        wide = [_wide(batch) for batch in _requests(model, size, options)]
        yield _row(OURS, case, predictors[:1], wide, options, request=PAGEABLE)


def _row(
    system: str,
    case: Case,
    predictors: Sequence[Callable[[Any], Any]],
    given: Sequence[Any],
    options: Options,
    request: str = PINNED,
) -> dict[str, Any]:
    size = given[0].samples
    steps = min(options.requests, max(40, 2**24 // size)) * (2 if len(predictors) > 1 else 1)
    found = latency.measure_size(predictors, size, list(given), steps, print)
    row = {
        "system": system,
        "run": case.run,
        "batch": size,
        "precision": case.precision,
        "tables_precision": case.tables,
        "tables_memory": "host" if case.host_tables else "device",
        "request": request,
        "clients": found.clients,
        "requests": found.requests,
        "median_ms": round(found.median_ms, 4),
        "p99_ms": round(found.p99_ms, 4),
        "samples_per_s": round(found.samples_per_s, 1),
    }
    print(*row.values(), sep="  ", flush=True)
    return row


# --- requests


def _requests(model: Any, size: int, options: Options) -> list[ClickBatch]:
    """Different ones, in pinned memory."""
    pin = partial(_in_host_memory, pinned=options.device.type == "cuda")
    clicks = random_clicks(model, size, "power_law", options.device)
    batches = [click_batch(model.table_rows, *parts) for parts in clicks]
    return [
        dataclasses.replace(
            batch,
            numerical=pin(batch.numerical),
            labels=pin(batch.labels),
            groups=[IdGroup(group.features, pin(group.ids)) for group in batch.groups],
        )
        for batch in batches
    ]


def _in_host_memory(tensor: Tensor, *, pinned: bool) -> Tensor:
    return tensor.cpu().pin_memory() if pinned else tensor.cpu()


def _ids(batch: ClickBatch) -> Tensor:
    """[B, F] of 64 bits."""
    ids = torch.empty(batch.samples, sum(len(g.features) for g in batch.groups), dtype=torch.int64)
    for group in batch.groups:
        ids[:, group.features] = group.ids.t().long()
    return ids


def _wide(batch: ClickBatch) -> ClickBatch:
    """As a program hands it over that knows nothing of pinned memory."""
    ids_FB = _ids(batch).t().contiguous()
    groups = [IdGroup(list(range(len(ids_FB))), ids_FB)]
    return dataclasses.replace(batch, numerical=batch.numerical.float().clone(), groups=groups)


# --- plain PyTorch


@dataclass(frozen=True)
class _Request:
    numbers_BN: Tensor
    ids_BF: Tensor

    @property
    def samples(self) -> int:
        return len(self.ids_BF)


def _peers(case: Case, trainer: Any, options: Options) -> Iterator[dict[str, Any]]:
    model = standalone.Dlrm(export.description(trainer.cfg), trainer.weights()).eval()
    device, precision = options.device, case.precision

    def answering(logits: Callable[[Tensor, Tensor], Tensor]) -> Callable[[_Request], Tensor]:
        @torch.inference_mode()
        def predict(request: _Request) -> Tensor:
            numbers, ids = (
                tensor.to(device, non_blocking=True)
                for tensor in (request.numbers_BN, request.ids_BF)
            )
            with autocast(precision, device):
                return logits(numbers, ids).float().cpu()

        return predict

    ways = [(EAGER, size, model.logits) for size in case.eager]
    if case.compiled:
        mode = "reduce-overhead" if device.type == "cuda" else "default"
        compiled = torch.compile(model.logits, mode=mode, dynamic=False)
        ways += [(COMPILED, size, compiled) for size in case.compiled]
    for system, size, logits in ways:
        pin = partial(_in_host_memory, pinned=device.type == "cuda")
        given = [
            _Request(pin(batch.numerical), pin(_ids(batch).int()))
            for batch in _requests(trainer.cfg.model, size, options)
        ]
        yield _row(system, case, [answering(logits)], given, options, request=PEERS_OWN)


# --- what takes the time


def profile(case: Case, options: Options, path: Path) -> None:
    """Of each size; after all that is timed, because a profiler leaves launches slower."""
    trainer = built(case, options)
    predict, activity = build_predictor(trainer), options.device.type
    for size in sorted({size for size, _ in case.ours}):
        given = _requests(trainer.cfg.model, size, options)
        predict(given[0])
        with torch.profiler.profile(activities=[_ACTIVITIES[activity]]) as found:
            for batch in given[:5]:
                predict(batch)
        table = found.key_averages().table(
            sort_by=f"self_{activity}_time_total", row_limit=30, max_name_column_width=90
        )
        with path.open("a") as file:
            file.write(f"{case}, batch {size}, 5 requests\n{table}\n")


_ACTIVITIES = {
    "cuda": torch.profiler.ProfilerActivity.CUDA,
    "cpu": torch.profiler.ProfilerActivity.CPU,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after them")
    parser.add_argument("--profile", type=Path, help="append there what the kernels take")
    parser.add_argument("--output", type=Path, help="a folder in the place of results/")
    parser.add_argument("--commit")
    chosen = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = Options(device=device, tiny=chosen.tiny, requests=chosen.requests)
    began, rows, cases = time.monotonic(), [], CASES
    if device.type == "cpu":
        cases = tuple(case for case in CASES if case.precision in ("fp32", "bf16"))
    for case in cases:
        if time.monotonic() - began > chosen.seconds:
            print(f"no time for {case}")
            continue
        try:
            for row in rows_of(case, options):
                rows.append(row)
        except Exception as error:  # the others are still worth it
            print(f"{case}: {error!r:.2000}", flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        write_results("inference_h200", rows, device, folder=chosen.output, commit=chosen.commit)
    if chosen.profile:
        profile(cases[0], options, chosen.profile)


if __name__ == "__main__":
    main()
