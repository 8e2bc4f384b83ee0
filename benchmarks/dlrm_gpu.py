"""DLRM on one GPU: samples per second beside plain PyTorch, FBGEMM and TorchRec.

    PYTHONPATH=. python benchmarks/dlrm_gpu.py                       all rows (a CUDA machine)
    PYTHONPATH=. python benchmarks/dlrm_gpu.py --only trainmark,small,65536,resident
    PYTHONPATH=. python benchmarks/dlrm_gpu.py --tiny --output DIR   the same code, anywhere

Every timed step is a whole one, at the clock that the device holds: the first third is not counted,
and the mean is taken, because a clock at its power limit swings. `resident` batches lie on the
device, several of them in turn; what a system does with their ids (ours: `prepare`, which sorts
them one step ahead) is done again in every step. `disk` rows are `trainmark train` on a dataset
that was written and then dropped from the page cache, which is left out of the reading, too, as
with a dataset that is larger than memory: `samples_per_s` is p_train, and p_core and the input wait
are beside it.

`split_ms` comes from a second, profiled pass: device time of the kernels of one step, by what they
do. Kernels of several streams can overlap, so parts may add up to more than the step. Matrix
products of the peers' interaction count as `mlp`.

Each case has a process of its own. A row is printed and written as soon as it is measured; a later
call replaces the rows that it measures again, and keeps the others.
"""

import dataclasses
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import common, dlrm_peers
from benchmarks.dlrm_clicks import Ids
from benchmarks.dlrm_dataset import write_dataset
from benchmarks.dlrm_systems import (
    LR,
    mlps_in,
    peer_system,
    resolved,
    tables_in,
    trainmark_system,
    with_changes,
)
from benchmarks.timing import PARTS, memory_gib, profiled, warm_up, windows
from trainmark.config import SYNTHETIC
from trainmark.errors import InputError
from trainmark.hardware.monitor import Monitor
from trainmark.workloads.dlrm.runs import RUNS, DlrmRun, Model

OURS = "trainmark"
RESULT = "dlrm_gpu_h200"
INDICES: tuple[Ids, ...] = ("power_law", "uniform")
TINY = {
    "table_rows": (300, 40_000, 150, 7),
    "embedding_dim": 16,
    "bottom_mlp": (32, 16),
    "top_mlp": (64, 1),
}
GIB = 2**30
KEY = ("system", "size", "batch", "indices", "source", "tables_precision", "mlp_precision")


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured in one process: a row for each kind of indices."""

    system: str
    size: str
    batch: int
    source: str = "resident"
    tables_precision: str = "fp32"
    mlp_precision: str = "bf16"
    indices: tuple[Ids, ...] = INDICES

    @property
    def changes(self) -> dict[str, Any]:
        """How its configuration differs from that of the named run."""
        batch = {"global_batch": self.batch, "micro_batch": self.batch}
        return batch | tables_in(self.tables_precision) | mlps_in(self.mlp_precision)

    def name(self) -> str:
        return " ".join(str(v) for k, v in dataclasses.asdict(self).items() if k != "indices")


def _cases() -> list[Case]:
    """The rows that matter most come first: device time may end."""
    small, large = 65536, 262144
    ours = [
        Case(system=OURS, size="small", batch=small),
        Case(system=OURS, size="small", batch=small, source="disk", indices=("power_law",)),
        Case(system=OURS, size="xlarge", batch=small, tables_precision="int8"),
        Case(system=OURS, size="large", batch=small),
        *(
            Case(system=OURS, size="small", batch=small, tables_precision=t, mlp_precision=m)
            for t, m in (("bf16", "bf16"), ("int8", "bf16"), ("fp32", "fp8"), ("int8", "fp8"))
        ),
        Case(system=OURS, size="small", batch=large),
        Case(system=OURS, size="large", batch=large),
        Case(system=OURS, size="xlarge", batch=large, tables_precision="int8"),
    ]
    peers = [
        Case(system=peer, size=size, batch=batch)
        for size, batch in (("small", small), ("small", large), ("large", small))
        for peer in dlrm_peers.PEERS
    ]
    more_from_disk = [
        Case(system=OURS, size="small", batch=large, source="disk", indices=("power_law",)),
        Case(system=OURS, size="small", batch=small, source="disk", indices=("uniform",)),
        Case(system=OURS, size="large", batch=small, source="disk", indices=("power_law",)),
        Case(
            system=OURS, size="xlarge", batch=small, source="disk", tables_precision="int8",
            indices=("power_law",),
        ),
    ]  # fmt: skip
    first = len(dlrm_peers.PEERS)
    return ours[:1] + peers[:first] + ours[1:] + peers[first:] + more_from_disk


@dataclass(frozen=True, kw_only=True)
class Options(common.Options):
    """How to measure."""

    disk_rows: int
    scratch: Path


def named_run(case: Case, options: Options) -> DlrmRun:
    run = RUNS[f"dlrm-{case.size}"]()
    return with_changes(run, {"data": SYNTHETIC} | ({"model": TINY} if options.tiny else {}))


# --- measuring resident rows


def measure_resident(case: Case, options: Options) -> Iterator[dict[str, Any]]:
    began, device = time.perf_counter(), options.device
    cfg = resolved(named_run(case, options), case.changes, device)
    if case.system == OURS:
        system = trainmark_system(cfg, device)
    else:
        system = peer_system(case.system, cfg, device)
    for ids in case.indices:
        losses = system(ids)
        warm_up(losses, device)
        ready_s = time.perf_counter() - began
        with Monitor(device, interval_s=0.25) as monitor:
            step_s = statistics.mean(windows(losses, options.seconds, device))
        assert torch.isfinite(next(losses))
        split_ms, kernels_ms = profiled(losses, device)
        yield _row(case, ids) | {
            "samples_per_s": case.batch / step_s,
            "step_ms": step_s * 1e3,
            "split_ms": split_ms,
            "memory_gib": memory_gib(device),
            "kernels_ms": kernels_ms,
            "power_w": monitor.summary()["power_w"]["max"],
            "ready_s": ready_s,
        }
        began = time.perf_counter()


def _row(case: Case, ids: Ids) -> dict[str, Any]:
    return {name: ids if name == "indices" else getattr(case, name) for name in KEY}


# --- measuring rows from disk


def measure_disk(case: Case, options: Options) -> Iterator[dict[str, Any]]:
    """Write a dataset, and let `trainmark train` say how fast it went."""
    model = named_run(case, options).model
    for ids in case.indices:
        data, output = options.scratch / "data", options.scratch / "run"
        shutil.rmtree(output, ignore_errors=True)
        began = time.perf_counter()
        rows = options.disk_rows // case.batch * case.batch
        size = write_dataset(data, model.table_rows, model.numerical_features, rows, ids)
        print(f"wrote {size / 1e9:.1f} GB in {time.perf_counter() - began:.0f} s", flush=True)
        result = _train(case, options, model, data, output)
        yield _row(case, ids) | disk_row(result, case.batch)
        shutil.rmtree(data)


def _train(case: Case, options: Options, model: Model, data: Path, output: Path) -> dict[str, Any]:
    changes = case.changes | {
        "lr": LR,
        "evals_per_epoch": 0,
        "checkpoint_every": "never",
        "page_cache": "bypass",
        "warmup_clock": 2 if options.tiny else 100,
        "device": options.device.type,
        "model": dataclasses.asdict(model),
    }
    config = options.scratch / "changes.json"
    config.write_text(json.dumps(changes))
    command = [sys.executable, "-m", "trainmark", "train", f"dlrm-{case.size}"]
    command += ["--data", str(data), "--output", str(output), "--config", str(config)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads((output / "result.json").read_text())


def disk_row(result: dict[str, Any], batch: int) -> dict[str, Any]:
    """The numbers of a row, from a result.json."""
    p_train, steps = result["throughput"]["p_train"], result["samples_measured"] / batch
    return {
        "samples_per_s": p_train,
        "step_ms": batch / p_train * 1e3,
        "split_ms": {"input_wait": result["time_s"]["input_wait"] / steps * 1e3},
        "memory_gib": result["memory"]["peak_bytes"] / GIB,
        "p_core": result["throughput"]["p_core"],
        "samples": result["samples_measured"],
    }


# --- all cases, and what they say


def measure(case: Case, options: Options) -> None:
    """Every row of a case: printed and written at once."""
    measured = measure_disk if case.source == "disk" else measure_resident
    for row in measured(case, options):
        print(json.dumps({k: v for k, v in row.items() if k != "kernels_ms"}), flush=True)
        rows = {key_of(old): old for old in read_rows(options)} | {key_of(row): row}
        options.write(result_name(options), with_ratios([*rows.values()]))


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)


def result_name(options: Options) -> str:
    return "dlrm_gpu_tiny" if options.tiny else RESULT


def read_rows(options: Options) -> list[dict[str, Any]]:
    return common.read_rows(result_name(options), options.output)


def with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Our rows say how many times as fast as each peer they are, where all but precision agrees."""
    same = ("size", "batch", "indices", "source")
    found = []
    for row in rows:
        peers = {
            peer["system"]: row["samples_per_s"] / peer["samples_per_s"]
            for peer in rows
            if peer["system"] != OURS and all(peer[k] == row[k] for k in same)
        }
        found.append(row | {"ratio": peers} if row["system"] == OURS else row)
    return found


def skipped(case: Case, options: Options) -> str | None:
    """Why a case cannot be measured here; None if it can."""
    try:
        resolved(named_run(case, options), case.changes, options.device)
    except InputError as error:
        return str(error)
    return None if case.system == OURS else dlrm_peers.missing(case.system)


def _in_a_process(case: Case, options: Options) -> None:
    def work() -> None:
        if reason := skipped(case, options):
            print(f"{case.name()}: skipped: {reason}", flush=True)
        else:
            measure(case, options)

    if not common.in_a_process(work):
        print(f"{case.name()}: failed", flush=True)


def measured_already(case: Case, options: Options) -> bool:
    there = {key_of(row) for row in read_rows(options)}
    return all(key_of(_row(case, ids)) in there for ids in case.indices)


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(*KEY, "M samples/s", "step ms", *PARTS, "GiB", "ratio", title="one GPU")
    for row in rows:
        parts = (f"{row['split_ms'][p]:.2f}" if p in row["split_ms"] else "" for p in PARTS)
        ratios = ", ".join(f"{v:.1f} x {name}" for name, v in row.get("ratio", {}).items())
        speed = (f"{row['samples_per_s'] / 1e6:.2f}", f"{row['step_ms']:.2f}")
        memory = "" if row["memory_gib"] is None else f"{row['memory_gib']:.1f}"
        table.add_row(*(str(row[k]) for k in KEY), *speed, *parts, memory, ratios)
    Console(width=200).print(table)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--only", default="", help="cases that have all these words, by commas")
    parser.add_argument("--seconds", type=float, default=4, help="of steps per row")
    parser.add_argument("--budget", type=float, default=540, help="no case starts after seconds")
    parser.add_argument("--disk-rows", type=int, help="90 bytes each; 100 M, or tiny 100 k")
    parser.add_argument("--scratch", type=Path, default=Path("build/dlrm_gpu"))
    parser.add_argument("--missing", action="store_true", help="leave out what is there already")
    args = parser.parse_args()
    device = torch.device("cpu") if args.tiny else torch.device("cuda", 0)
    options = Options(
        device=device, tiny=args.tiny, seconds=args.seconds,
        disk_rows=args.disk_rows or (100_000 if args.tiny else 100_000_000),
        scratch=args.scratch, output=args.output, commit=args.commit,
    )  # fmt: skip
    options.scratch.mkdir(parents=True, exist_ok=True)
    words = {word for word in args.only.split(",") if word}
    began = time.perf_counter()
    for case in _cases():
        if args.tiny:
            case = dataclasses.replace(case, batch=case.batch // 256)
        if not words <= set(case.name().split()):
            continue
        if args.missing and measured_already(case, options):
            continue
        if time.perf_counter() - began > args.budget:
            print(f"{case.name()}: no time left", flush=True)
            continue
        _in_a_process(case, options)
    show(read_rows(options))


if __name__ == "__main__":
    main()
