"""DLRM on one GPU: what the exchange between ranks costs, and tables in host memory.

    PYTHONPATH=. python benchmarks/dlrm_exchange_gpu.py                       a CUDA machine
    PYTHONPATH=. python benchmarks/dlrm_exchange_gpu.py --only exchange
    PYTHONPATH=. python benchmarks/dlrm_exchange_gpu.py --tiny --output DIR   anywhere

Rows, each batch 65536 with power-law ids, bf16 MLPs and SGD:

    native      dlrm-small as a user gets it on one GPU: the fused step
    direct      the same with the fused engine put into the model by hand
    exchange    the same with `--force-exchange`: ids, rows and gradients go through NCCL, to the
                rank itself; `extra_bytes` are the bytes above those of the fused step
    eager       the same without CUDA graphs, as on several ranks
    host        dlrm-xlarge, its largest tables cut to what the host's memory holds, and kept there
    int8        all of dlrm-xlarge in 8 bits on the device, to compare with

`links` of `host` are measured in the same process: bytes per step over each link, its bandwidth,
and the milliseconds that this takes. A link that takes as long as the step binds it.

NCCL copies what a rank sends to itself, so this time is `copy` in `split_ms`; `exchange` are the
kernels that read and write host memory.

Cases have processes of their own, but for `native` and `direct`, whose windows alternate. A row is
printed and written as soon as it is measured; a later call keeps the rows of other cases.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor

from benchmarks import common
from benchmarks.dlrm_clicks import Ids
from benchmarks.dlrm_systems import (
    mlps_in,
    random_clicks,
    resolved,
    steps_of,
    tables_in,
    trainer_for,
    with_changes,
)
from benchmarks.timing import GIB, memory_gib, profiled, synchronize, warm_up, windows
from trainmark.config import SYNTHETIC
from trainmark.distributed.mesh import single
from trainmark.embeddings.fused import FusedEngine
from trainmark.embeddings.tables.formats import Formats
from trainmark.embeddings.tables.host import HostStore
from trainmark.kernels.copy_rows import copy_rows_triton, read_rows_into, write_rows_from
from trainmark.training.precision import compute_dtype
from trainmark.workloads.dlrm.model import build_model, init_weights, table_rule
from trainmark.workloads.dlrm.runs import RUNS, DlrmRun
from trainmark.workloads.dlrm.sizes import table_formats
from trainmark.workloads.dlrm.step import build_trainer

RESULT = "dlrm_exchange_h200"
BATCH = 65536
IDS: Ids = "power_law"
ROUNDS = 3  # of alternating windows
HOST_TABLES = 5  # the largest
LEFT_TO_THE_REST = 20 * GIB  # of host memory
TABLE_BYTES = 4  # of a weight
TINY: dict[str, Any] = {
    "table_rows": (3000, 40, 150, 7, 2000, 1000, 700, 600),
    "embedding_dim": 16,
    "bottom_mlp": (32, 16),
    "top_mlp": (64, 1),
}


@dataclass(frozen=True, kw_only=True)
class Options(common.Options):
    """How to measure."""

    host_gib: float

    @property
    def batch(self) -> int:
        return BATCH // 256 if self.tiny else BATCH


def config(size: str, options: Options, changes: dict[str, Any]) -> DlrmRun:
    """A named run with this benchmark's batch and precisions, and some changes."""
    run = with_changes(
        RUNS[f"dlrm-{size}"](), {"data": SYNTHETIC} | ({"model": TINY} if options.tiny else {})
    )
    batch = {"global_batch": options.batch, "micro_batch": options.batch}
    return resolved(run, batch | mlps_in("bf16") | changes, options.device)


# --- the fused step and the exchange


def measure_native(options: Options) -> Iterator[dict[str, Any]]:
    """The fused step, twice: what a user gets, and the engine put in by hand."""
    began = time.perf_counter()
    cfg = config("small", options, {})
    found = {"native": trainer_for(cfg, options.device), "direct": by_hand(cfg, options.device)}
    losses = {name: steps_of(trainer, options.device)(IDS) for name, trainer in found.items()}
    for steps in losses.values():
        warm_up(steps, options.device)
    ready_s = time.perf_counter() - began
    measured: dict[str, list[float]] = {name: [] for name in losses}
    for _ in range(ROUNDS):
        for name, steps in losses.items():
            measured[name] += windows(steps, options.seconds / ROUNDS, options.device)
    for name, steps in losses.items():
        yield _row(name, "small", options, measured[name], steps) | {
            "engine": type(found[name].model.tables).__name__,
            "ready_s": ready_s,
            "memory_gib": None,  # both are there
        }


def by_hand(cfg: DlrmRun, device: torch.device) -> Any:
    """A trainer with the fused engine, whatever the configuration would choose."""
    model = build_model(cfg)
    rule = table_rule(cfg)
    formats = Formats(of_tables=table_formats(cfg), seed=cfg.seed)
    model.tables = FusedEngine(cfg.model.table_rows, cfg.model.embedding_dim, rule, formats)
    if device.type == "cuda":
        model.bottom.fused_dtype = model.top.fused_dtype = compute_dtype(cfg.precision)
    init_weights([model], cfg, device)
    return build_trainer([model], single(device), cfg)


def measure_exchange(options: Options) -> Iterator[dict[str, Any]]:
    yield _exchange_row("exchange", options, {})


def measure_eager(options: Options) -> Iterator[dict[str, Any]]:
    yield _exchange_row("eager", options, {"eager": True})


def _exchange_row(case: str, options: Options, changes: dict[str, Any]) -> dict[str, Any]:
    cfg = config("small", options, {"sharding": {"force_exchange": True}} | changes)
    row, trainer = _measured(case, "small", cfg, options)
    features, dim = len(cfg.model.table_rows), cfg.model.embedding_dim
    element = compute_dtype(cfg.precision).itemsize
    return row | {
        "exchanged_bytes": exchanged_bytes(options.batch, features, dim, element),
        "sent_bytes": trainer.sent_bytes_per_step(),  # to other ranks: there are none
        "extra_bytes": extra_bytes(options.batch, features, dim, element),
        "device_gb_s": device_bandwidth(options.device),
    }


def exchanged_bytes(batch: int, features: int, dim: int, element: int) -> dict[str, int]:
    """What goes through the process group in a step."""
    lookups = batch * features
    rows = lookups * dim * element
    return {"ids": 4 * lookups, "rows": rows, "gradients": rows}


def extra_bytes(batch: int, features: int, dim: int, element: int) -> dict[str, int]:
    """Bytes that the exchange reads and writes above the fused step, for one rank.

    Both sort ids, write gradient rows once and read them in the update. Table rows are counted by
    lookups, without caches.
    """
    exchanged = exchanged_bytes(batch, features, dim, element)
    lookups, rows = batch * features, exchanged["rows"]
    in_table = lookups * dim * TABLE_BYTES
    extra = {
        "ids written to be sent": exchanged["ids"],
        "ids exchanged": 2 * exchanged["ids"],  # read and written
        "places of rows read": 2 * 8 * lookups - 2 * 4 * lookups,  # instead of ids
        "rows gathered": rows,  # written; the fused forward reads them, too
        "rows exchanged": 2 * rows,
        "rows read by the forward pass": rows,
        "rows read by the backward pass": rows - in_table,  # instead of the table's
        "gradients exchanged": 2 * rows,
    }
    return extra | {"total": sum(extra.values())}


# --- host memory


def measure_host(options: Options) -> Iterator[dict[str, Any]]:
    row_bytes = TABLE_BYTES * config("xlarge", options, {}).model.embedding_dim
    rows = cut_rows(RUNS["dlrm-xlarge"]().model.table_rows, options.host_gib * GIB / row_bytes)
    if options.tiny:
        rows = TINY["table_rows"]
    changes = {"model": {"table_rows": rows}, "sharding": {"host_tables": largest(rows)}}
    row, trainer = _measured("host", "xlarge", config("xlarge", options, changes), options)
    (store,) = [s for s in trainer.model.tables.stores if isinstance(s, HostStore)]
    clicks = random_clicks(trainer.cfg.model, options.batch, IDS, options.device)
    distinct = statistics.mean(_distinct(ids_FB, rows) for _, ids_FB, _ in clicks)
    yield row | {
        "table_rows": rows,
        "host_gib": store.weight.nbytes / GIB,
        "lookups_on_host": options.batch * HOST_TABLES,
        "distinct_rows_on_host": distinct,
        "links": links(store, distinct * row_bytes, options),
        "gb_s_by_programs": by_programs(store, options) if options.device.type == "cuda" else None,
    }


def largest(rows: tuple[int, ...]) -> tuple[int, ...]:
    """The tables to keep in host memory."""
    return tuple(sorted(sorted(range(len(rows)), key=lambda i: -rows[i])[:HOST_TABLES]))


def cut_rows(rows: tuple[int, ...], room: float) -> tuple[int, ...]:
    """The largest tables cut to one height, so that they have `room` rows together."""
    kept = [rows[table] for table in largest(rows)]
    low, high = 0, max(kept)
    while low < high:
        middle = (low + high + 1) // 2
        fits = sum(min(count, middle) for count in kept) <= room
        low, high = (middle, high) if fits else (low, middle - 1)
    return tuple(min(count, low) if i in largest(rows) else count for i, count in enumerate(rows))


def _distinct(ids_FB: Tensor, rows: tuple[int, ...]) -> int:
    return sum(ids_FB[table].unique().numel() for table in largest(rows))


def links(store: HostStore, step_bytes: float, options: Options) -> dict[str, dict[str, float]]:
    """Bytes of a step over each link, GB/s measured there, and ms that it takes at least."""
    device, on_gpu = options.device, options.device.type == "cuda"
    random, listed = _random_rows(store, options)
    block = torch.zeros(2**20 if options.tiny else GIB, dtype=torch.uint8, pin_memory=on_gpu)
    there, other = torch.zeros_like(block, device=device), torch.zeros_like(block)
    store.flush()
    measured = {
        # Random rows, as a step reads and writes them; then one block by the copy engines.
        "device reads host rows": (
            listed.nbytes, lambda: read_rows_into(listed, store.weight, random),
        ),
        "device writes host rows": (
            listed.nbytes, lambda: write_rows_from(listed, store.weight, random),
        ),
        "block to the device": (block.nbytes, lambda: there.copy_(block, non_blocking=True)),
        "block to the host": (block.nbytes, lambda: block.copy_(there, non_blocking=True)),
        "host memory, read and written": (2 * block.nbytes, lambda: other.copy_(block)),
    }  # fmt: skip
    # Every row crosses the link, and the host's memory, once in each direction.
    of_step = {"host memory, read and written": 2 * step_bytes}
    found = {}
    for name, (size, move) in measured.items():
        bandwidth, needed = size / _fastest(move, device), of_step.get(name, step_bytes)
        found[name] = {
            "bytes": needed, "gb_s": bandwidth / 1e9, "ms": needed / bandwidth * 1e3
        }  # fmt: skip
    return found


def _random_rows(store: HostStore, options: Options) -> tuple[Tensor, Tensor]:
    """Distinct rows in order, and room for them on the device."""
    count = 1000 if options.tiny else 400_000
    rows = torch.randperm(len(store.weight), device=options.device)[:count].int().sort().values
    return rows, torch.zeros(count, store.width, device=options.device)


def by_programs(store: HostStore, options: Options) -> dict[str, dict[int, float]]:
    """How many programs of the copying kernel it takes to fill the link."""
    rows, listed = _random_rows(store, options)

    def speed(programs: int, to_table: bool) -> float:
        def copy() -> None:
            copy_rows_triton(store.weight, rows, listed, to_table=to_table, programs=programs)

        return listed.nbytes / _fastest(copy, options.device) / 1e9

    counts = (8, 16, 32, 64, 132, 264)
    ways = {"read": False, "written": True}  # in this order: what is written was there before
    return {name: {n: speed(n, to_table) for n in counts} for name, to_table in ways.items()}


def device_bandwidth(device: torch.device) -> float:
    """GB/s read and written by a large copy on the device."""
    source = torch.zeros(GIB if device.type == "cuda" else 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _fastest(lambda: target.copy_(source), device) / 1e9


def _fastest(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of the fastest of a few calls."""
    times = []
    for _ in range(5):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times)


def measure_int8(options: Options) -> Iterator[dict[str, Any]]:
    row, _ = _measured("int8", "xlarge", config("xlarge", options, tables_in("int8")), options)
    yield row


# --- rows


def _measured(case: str, size: str, cfg: DlrmRun, options: Options) -> tuple[dict[str, Any], Any]:
    """A row, and the trainer that it measured."""
    began = time.perf_counter()
    trainer = trainer_for(cfg, options.device)
    synchronize(options.device)
    built_s = time.perf_counter() - began
    print(f"{case}: built in {built_s:.1f} s", flush=True)
    losses = steps_of(trainer, options.device)(IDS)
    warm_up(losses, options.device)
    ready_s = time.perf_counter() - began
    row = _row(case, size, options, windows(losses, options.seconds, options.device), losses)
    engine = type(trainer.model.tables).__name__
    return row | {"engine": engine, "built_s": built_s, "ready_s": ready_s}, trainer


def _row(
    case: str, size: str, options: Options, steps_s: list[float], losses: Iterator[Tensor]
) -> dict[str, Any]:
    assert torch.isfinite(next(losses))
    step_s = statistics.median(steps_s)
    split_ms, kernels_ms = profiled(losses, options.device)
    return {
        "system": "trainmark",
        "case": case,
        "size": size,
        "batch": options.batch,
        "indices": IDS,
        "samples_per_s": options.batch / step_s,
        "step_ms": step_s * 1e3,
        "split_ms": split_ms,
        "kernels_ms": kernels_ms,
        "memory_gib": memory_gib(options.device),
    }


CASES = {
    "native": measure_native,
    "exchange": measure_exchange,
    "eager": measure_eager,
    "host": measure_host,
    "int8": measure_int8,
}


def measure(case: str, options: Options) -> None:
    """Every row of a case: printed and written at once."""
    for row in CASES[case](options):
        print(json.dumps({k: v for k, v in row.items() if k != "kernels_ms"}), flush=True)
        name = "dlrm_exchange_tiny" if options.tiny else RESULT
        earlier = common.read_rows(name, options.output)
        rows = {old["case"]: old for old in earlier} | {row["case"]: row}
        options.write(name, with_ratios(rows))


def with_ratios(rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the same model say how their step compares with the fused one's."""
    fused = rows.get("direct")
    return [
        row | {"ratio_to_fused": row["step_ms"] / fused["step_ms"]}
        if fused and row["size"] == fused["size"]
        else row
        for row in rows.values()
    ]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--seconds", type=float, default=1.5, help="of steps per row")
    parser.add_argument("--host-gib", type=float, default=96, help="of tables in host memory")
    args = parser.parse_args()
    free = psutil.virtual_memory().available - LEFT_TO_THE_REST
    options = Options(
        device=torch.device("cpu") if args.tiny else torch.device("cuda", 0),
        tiny=args.tiny,
        seconds=args.seconds,
        host_gib=min(args.host_gib, free / GIB),
        output=args.output,
        commit=args.commit,
    )
    for case in args.only:
        if not common.in_a_process(partial(measure, case, options)):
            print(f"{case}: failed", flush=True)


if __name__ == "__main__":
    main()
