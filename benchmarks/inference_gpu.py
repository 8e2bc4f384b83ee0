"""Latency of predictions on a GPU: `trainmark infer`'s way beside plain PyTorch, in one run.

    python -m benchmarks.inference_gpu                              all rows (a CUDA machine)
    python -m benchmarks.inference_gpu --only host-tables xlarge    these parts; others' rows stay
    python -m benchmarks.inference_gpu --tiny --output DIR          the same code, anywhere

On an H200 the parts from fp16 to fp32 took 65 s together. Nobody has timed the others: of xlarge
113 GB of tables are filled first, and compiled waits for torch.compile twice. Rows are written as
they come, so that a limit of time costs those that are still missing, and no more; what fails is
told, and costs its own row.

Models have random weights, which take as long as trained ones. Ids follow a power law. Requests lie
in pinned memory, in the types of the dataset, unless `request` says otherwise. PyTorch computes
with the exported model (`standalone.py`), eagerly and compiled, with the same weights under
autocast; its requests are two pinned tensors, numbers and ids of 32 bits.

`host_p99_to_median` of a row is what the host alone made of that latency at that time: a loop that
only counts, cut into as many steps as take the median. A p99 cannot be expected below it.
"""

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import common
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
from trainmark.hardware.environment import environment
from trainmark.inference import latency
from trainmark.metrics import latency_ms
from trainmark.training.precision import autocast, set_matmul_precision
from trainmark.workloads.dlrm import standalone
from trainmark.workloads.dlrm.data import ClickBatch
from trainmark.workloads.dlrm.description import description
from trainmark.workloads.dlrm.runs import RUNS, for_prediction
from trainmark.workloads.dlrm.step import build_predictor

OURS, EAGER, COMPILED = "trainmark", "PyTorch, eager", "PyTorch, compiled"
PINNED, PAGEABLE = "pinned, the dataset's types", "pageable, float32 and int64"
PEERS_OWN = "pinned, float16 and int32"
SIZES = (1, 64, 2048, 4096, 32768, 65536)
FEW_SIZES = (1, 2048, 32768, 65536)
MOST_CLIENTS = 4
COUNTING_S = 0.5


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


CASES: dict[str, Case] = {
    "fp16": Case(
        ours=(
            *((size, 1) for size in SIZES),
            *((size, n) for size in (2048, 32768, 65536) for n in (2, MOST_CLIENTS)),
        ),
        pageable=(64, 2048, 65536),
    ),
    "bf16": Case(precision="bf16"),
    "fp8": Case(precision="fp8", ours=(*((size, 1) for size in FEW_SIZES), (65536, MOST_CLIENTS))),
    "host-tables": Case(host_tables=(0,), ours=((2048, 1),)),
    "xlarge": Case(
        run="dlrm-xlarge", tables="int8", ours=((1, 1), (2048, 1), (65536, 1), (65536, 4))
    ),
    "int8-tables": Case(
        tables="int8", ours=(*((size, 1) for size in FEW_SIZES), (65536, MOST_CLIENTS))
    ),
    "bf16-tables": Case(tables="bf16", ours=((2048, 1), (65536, 1))),
    "tf32": Case(precision="tf32"),
    "fp32": Case(precision="fp32", ours=((1, 1), (2048, 1), (32768, 1)), eager=(2048, 32768)),
    "eager": Case(ours=(), eager=SIZES),
    "compiled": Case(ours=(), compiled=(2048, 65536)),
}
"""By the name of the part that they are of the whole."""


@dataclass(frozen=True, kw_only=True)
class Options:
    device: torch.device
    tiny: bool
    requests: int


def tiny(case: Case) -> Case:
    """The same rows of requests that a CPU answers in no time, in a precision that it has."""

    def smaller(sizes: Sequence[int]) -> list[int]:
        return [max(1, size // 64) for size in sizes]

    return dataclasses.replace(
        case,
        precision="bf16" if case.precision == "bf16" else "fp32",
        ours=[(max(1, size // 64), clients) for size, clients in case.ours],
        pageable=smaller(case.pageable),
        eager=smaller(case.eager),
        compiled=smaller(case.compiled),
    )


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


Measure = Callable[[], dict[str, Any]]
"""A row, once it is called."""


def measurements(case: Case, options: Options) -> Iterator[Measure]:
    """To be called one after another: each may fail without the others."""
    trainer = built(case, options)
    model = trainer.cfg.model
    if case.eager or case.compiled:  # first: with weights that prediction casts
        yield from _peers(case, trainer, options)
    most = max((clients for _, clients in case.ours), default=0)
    predictors = [build_predictor(trainer) for _ in range(most)]

    def ours(size: int, clients: int) -> dict[str, Any]:
        return _row(OURS, case, predictors[:clients], _requests(model, size, options), options)

    def pageable(size: int) -> dict[str, Any]:
        wide = [_wide(batch) for batch in _requests(model, size, options)]
        return _row(OURS, case, predictors[:1], wide, options, request=PAGEABLE)

    yield from (partial(ours, *asked) for asked in case.ours)
    yield from (partial(pageable, size) for size in case.pageable)


def _row(
    system: str,
    case: Case,
    predictors: Sequence[Callable[[Any], Any]],
    given: Sequence[Any],
    options: Options,
    request: str = PINNED,
) -> dict[str, Any]:
    size = given[0].samples
    steps = min(options.requests, max(40, 2**26 // size)) * (2 if len(predictors) > 1 else 1)
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
        "host_p99_to_median": round(_host_alone(found.median_ms / 1e3), 3),
    }
    print(*row.values(), sep="  ", flush=True)
    return row


def _host_alone(request_s: float) -> float:
    """p99 to median of the time that equal numbers of counts take, which is about `request_s`."""
    began, counted = time.perf_counter(), [time.perf_counter()]
    while counted[-1] < began + COUNTING_S:
        counted.append(time.perf_counter())
    of_a_request = max(1, round(request_s / np.median(np.diff(counted))))
    found = latency_ms(np.diff(counted[::of_a_request]).tolist())
    return found["p99_ms"] / found["median_ms"]


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


def _peers(case: Case, trainer: Any, options: Options) -> Iterator[Measure]:
    model = standalone.Dlrm(description(trainer.cfg), trainer.weights()).eval()
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

    def row(system: str, size: int, logits: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Any]:
        pin = partial(_in_host_memory, pinned=device.type == "cuda")
        given = [
            _Request(pin(batch.numerical), pin(_ids(batch).int()))
            for batch in _requests(trainer.cfg.model, size, options)
        ]
        return _row(system, case, [answering(logits)], given, options, request=PEERS_OWN)

    yield from (partial(row, *way) for way in ways)


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


KEY = (
    "system", "run", "batch", "precision", "tables_precision", "tables_memory", "request", "clients"
)  # fmt: skip
"""What there is one row of."""


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in KEY)


def measure(name: str, case: Case, options: Options) -> Iterator[dict[str, Any]]:
    """The rows of a part; what cannot be measured is told, and left out."""
    try:
        for row in measurements(case, options):
            try:
                yield row()
            except Exception as error:
                print(f"{name}, a row: {error!r:.2000}", flush=True)
    except Exception as error:  # of the model
        print(f"{name}: {error!r:.2000}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--requests", type=int, default=10_000, help="of a row, at most")
    parser.add_argument("--profile", type=Path, help="append there what the kernels take")
    chosen = parser.parse_args(arguments)
    device = torch.device("cpu" if chosen.tiny else "cuda")
    options = Options(device=device, tiny=chosen.tiny, requests=chosen.requests)
    file = "inference_tiny" if chosen.tiny else "inference_h200"
    commit = chosen.commit or environment(device)[1]["commit"]
    earlier = common.read_rows(file, chosen.output) or common.read_rows(file)
    rows = {_key(row): {"commit": None} | row for row in earlier}
    for name in chosen.only:
        for row in measure(name, tiny(CASES[name]) if chosen.tiny else CASES[name], options):
            rows[_key(row)] = row | {"commit": commit}
            every = list(rows.values())
            common.write_results(file, every, device, folder=chosen.output, commit=commit)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if chosen.profile:
        first = CASES[chosen.only[0]]
        profile(tiny(first) if chosen.tiny else first, options, chosen.profile)


if __name__ == "__main__":
    main()
