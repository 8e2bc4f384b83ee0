"""DLRM over 1, 2 and 4 CPU ranks: trainmark's engine beside TorchRec's, in one run.

Three systems train the same batches with the same sharding, optimiser and dtype (fp32), one thread
per rank, over gloo:

    native         trainmark's own engine
    torchrec       `--engine torchrec`: TorchRec's tables in trainmark's step
    torchrec-own   TorchRec's trainer as its users run it: DistributedModelParallel over tables and
                   MLPs (with DDP), optimiser fused into the backward pass, TrainPipelineSparseDist

All have trainmark's MLPs and interaction (compiled, where numba is installed), int32 ids, and freed
memory kept (`keep_freed_memory`, which helps every one of them). TorchRec's own trainer gets wide,
ready-made batches and may return features in its own order; the other two widen and sort them in
each step.

The systems of a case live in the same processes and take turns, a few steps each, round after
round: a noisy machine troubles all alike. A round gives a mean step between two barriers; a figure
is the median over rounds, a ratio that of the ratios within rounds. Beside the time on the clock
stands the processor time of all ranks and their threads, which others on the machine trouble less.

Bytes and the share of communication come from a second pass: bytes that a rank sends to others, on
average over ranks (all-reduce and its like as rings); share of the step's time that a rank's thread
is blocked in collectives, so what is hidden behind computation does not count. DDP communicates
out of sight, so neither is known of torchrec-own.

    PYTHONPATH=. python benchmarks/dlrm_scaling.py       writes results/dlrm_scaling_cpu.json
    PYTHONPATH=. python benchmarks/dlrm_scaling.py --cases 3 --rounds 9   one case again
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.collectives import Communication
from benchmarks.common import read_rows, write_results
from benchmarks.dlrm_scaling_systems import CPU, Step, own_step, trainmark_step
from trainmark.distributed import mesh as meshes
from trainmark.embeddings.placement.placement import (
    Placement,
    Shard,
    TablePlacement,
    even_ranges,
    to_json,
)
from trainmark.hardware.allocator import keep_freed_memory
from trainmark.hardware.devices import Cluster
from trainmark.workloads import resolve
from trainmark.workloads.dlrm.data import build_data
from trainmark.workloads.dlrm.runs import DlrmRun, Model, Optimizer, Sharding

NAME = "dlrm_scaling_cpu"
BATCH = 8192
POOL = 8  # different batches, so that no step finds the rows of the one before in a cache
NATIVE, ENGINE, OWN = "native", "torchrec", "torchrec-own"
SYSTEMS = (NATIVE, ENGINE, OWN)
LEAST = {
    "embeddings": {1: 1.5, 2: 1.5, 4: 1.2},
    "full-size": {1: 1.0, 2: 1.0, 4: 1.0},
    "several ids": {2: 1.3},
}
"""How many times as fast as TorchRec native should be, by shape and ranks."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    about: str
    bottom_mlp: tuple[int, ...]
    top_mlp: tuple[int, ...]
    hotness: tuple[int, ...] | None = None

    @property
    def systems(self) -> tuple[str, ...]:
        """TorchRec's own trainer is fed one id per feature."""
        return SYSTEMS if self.hotness is None else (NATIVE, ENGINE)


SHAPES = {
    "embeddings": Shape(
        about="26 tables of 200 k rows, dim 64, MLPs of width 128",
        bottom_mlp=(128, 64),
        top_mlp=(128, 128, 1),
    ),
    "full-size": Shape(
        about="26 tables of 200 k rows, dim 64, full-size MLPs",
        bottom_mlp=(512, 256, 64),
        top_mlp=(1024, 1024, 512, 256, 1),
    ),
    "several ids": Shape(
        about="26 tables of 200 k rows, dim 64, MLPs of width 128, 1 to 27 ids per feature",
        bottom_mlp=(128, 64),
        top_mlp=(128, 128, 1),
        # MLPerf's, but for one feature of 100 ids.
        hotness=(
            3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 10, 27, 10, 3, 1, 1,
        ),
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    shape: str
    ranks: int
    sharding: str = "table_wise"
    optimizer: str = "sgd"

    def __str__(self) -> str:
        return f"{self.shape}, {self.optimizer}, {self.ranks} ranks, {self.sharding}"


CASES = [
    *(Case(shape="embeddings", ranks=ranks) for ranks in (1, 2, 4)),
    *(Case(shape="full-size", ranks=ranks) for ranks in (1, 2, 4)),
    *(Case(shape="embeddings", ranks=ranks, sharding="row_wise") for ranks in (2, 4)),
    *(Case(shape="embeddings", ranks=ranks, sharding="column_wise") for ranks in (2, 4)),
    *(Case(shape="embeddings", ranks=r, optimizer="rowwise_adagrad") for r in (1, 2, 4)),
    *(
        Case(shape="several ids", ranks=2, sharding=sharding, optimizer=optimizer)
        for sharding in ("table_wise", "row_wise")
        for optimizer in ("sgd", "adagrad", "rowwise_adagrad")
    ),
]


# --- the run that all systems train


def configuration(case: Case, engine: str, rows: int, folder: Path) -> DlrmRun:
    shape = SHAPES[case.shape]
    path = folder / "placement.json"
    if dist.get_rank() == 0:
        path.write_text(to_json(_placement(case, rows)))
    dist.barrier()
    run = DlrmRun(
        name="dlrm-scaling",
        data="synthetic",
        device="cpu",
        model=Model(
            table_rows=(rows,) * 26,
            embedding_dim=64,
            bottom_mlp=shape.bottom_mlp,
            top_mlp=shape.top_mlp,
            hotness=shape.hotness,
        ),
        multi_hot="data" if shape.hotness is None else "uniform",
        optimizer=Optimizer(name=case.optimizer),  # type: ignore[arg-type]
        sharding=Sharding(engine=engine, placement=str(path)),  # type: ignore[arg-type]
        global_batch=BATCH,
        synthetic_rows=BATCH * POOL,
        precision="fp32",
    )
    return resolve(run, Cluster("cpu", 1, case.ranks))


def _placement(case: Case, rows: int) -> Placement:
    def shards(table: int) -> Iterator[Shard]:
        if case.sharding == "table_wise":
            yield Shard(device=table % case.ranks, rows=(0, rows), columns=(0, 64))
            return
        cut = even_ranges(rows if case.sharding == "row_wise" else 64, case.ranks)
        for device, part in enumerate(cut):
            if case.sharding == "row_wise":
                yield Shard(device=device, rows=part, columns=(0, 64))
            else:
                yield Shard(device=device, rows=(0, rows), columns=part)

    tables = tuple(
        TablePlacement(table=t, sharding=case.sharding, shards=tuple(shards(t)))  # type: ignore[arg-type]
        for t in range(26)
    )
    return Placement(devices=case.ranks, tables=tables)


# --- one rank of one case


def measure(case: Case, rank: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Step times of all systems by round, bytes sent and time blocked per step, of this rank."""
    torch.set_num_threads(1)
    keep_freed_memory()
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", store, rank=rank, world_size=case.ranks)
    mesh = meshes.build(CPU, {"dp": case.ranks})
    steps: dict[str, Step] = {}
    systems = SHAPES[case.shape].systems
    for system in systems:
        engine = "native" if system == NATIVE else "torchrec"
        cfg = configuration(case, engine, options.rows, folder)
        data = build_data(cfg, "train", mesh.dp_rank, mesh.dp_size)
        pool = list(itertools.islice(data, POOL))
        one = mesh if case.ranks > 1 else meshes.single(CPU)
        steps[system] = (own_step if system == OWN else trainmark_step)(cfg, one, pool)
    losses: dict[str, list[float]] = {system: [] for system in systems}
    times: dict[str, list[float]] = {system: [] for system in systems}
    cpu_times: dict[str, list[float]] = {system: [] for system in systems}
    for number in range(options.rounds + 1):
        for system in systems if number % 2 else systems[::-1]:
            began, cpu_began = _together(), time.process_time()
            losses[system] += [steps[system]().item() for _ in range(options.steps)]
            cpu_times[system].append((time.process_time() - cpu_began) / options.steps)
            times[system].append((_together() - began) / options.steps)
    _check_losses(losses)
    result: dict[str, Any] = {}
    for system in systems:
        found = Communication(case.ranks)
        began = _together()
        with found.watched():
            for _ in range(options.steps):
                steps[system]()
        took = _together() - began
        result[system] = {
            "step_s": times[system][1:],  # the first round warms up
            "cpu_s": cpu_times[system][1:],
            "bytes": found.bytes / options.steps,
            "share": found.seconds / took,
        }
    dist.destroy_process_group()
    return result


def _together() -> float:
    """Now, when all ranks are here."""
    dist.barrier()
    return time.perf_counter()


def _check_losses(losses: dict[str, list[float]]) -> None:
    """Systems that do not train the same cannot be compared.

    Of the first time through the batches: later they are known by heart, and Adagrad makes large
    steps of what rounding has left of a gradient.
    """
    native, engine = (torch.tensor(losses[system][:POOL]) for system in (NATIVE, ENGINE))
    torch.testing.assert_close(engine, native, rtol=1e-4, atol=1e-5)
    assert all(torch.tensor(found).isfinite().all() for found in losses.values())


# --- all cases, and what they say


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="of each system in a round")
    parser.add_argument("--rows", type=int, default=200_000, help="of each table")
    parser.add_argument("--cases", type=int, nargs="*", help="some of them, by number")
    parser.add_argument(
        "--rank", nargs=3, metavar=("CASE", "RANK", "FOLDER"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.rank:
        case, rank, folder = CASES[int(options.rank[0])], int(options.rank[1]), options.rank[2]
        print(json.dumps(measure(case, rank, Path(folder), options)))
        return
    numbers = range(len(CASES)) if options.cases is None else options.cases
    measured: list[dict[str, Any]] = []
    kept = _rows_of_other_cases(numbers)
    for number in numbers:
        measured += _rows(number, options)
        write_results(NAME, sorted([*kept, *measured], key=_case_number))
    _show(measured)


def _rows_of_other_cases(numbers: Iterable[int]) -> list[dict[str, Any]]:
    """What the file has of the cases that are not measured now."""
    return [row for row in read_rows(NAME) if _case_number(row) not in set(numbers)]


def _case_number(row: Mapping[str, Any]) -> int:
    keys = ("shape", "ranks", "sharding", "optimizer")
    return CASES.index(Case(**{key: row[key] for key in keys}))


def _rows(number: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per system."""
    case, load = CASES[number], os.getloadavg()
    print(f"{case} (load average {load[0]:.1f})", flush=True)
    of_ranks = _start_ranks(number, options)
    rows = []
    for system in SHAPES[case.shape].systems:
        found = [of_rank[system] for of_rank in of_ranks]
        step_s = statistics.median(found[0]["step_s"])
        cpu_s = [sum(of_ranks) for of_ranks in zip(*(f["cpu_s"] for f in found), strict=True)]
        known = system != OWN or case.ranks == 1
        rows.append(
            {
                "system": "trainmark" if system == NATIVE else "torchrec",
                "engine": system,
                "shape": case.shape,
                "about": SHAPES[case.shape].about,
                "ranks": case.ranks,
                "sharding": case.sharding,
                "optimizer": case.optimizer,
                "table_rows": options.rows,
                "global_batch": BATCH,
                "threads_per_rank": 1,
                "steps_per_round": options.steps,
                "samples_per_s": BATCH / step_s,
                "bytes_per_step": statistics.mean(f["bytes"] for f in found) if known else None,
                "communication_share": statistics.mean(f["share"] for f in found)
                if known
                else None,
                "step_s": step_s,
                "step_s_of_rounds": found[0]["step_s"],
                "cpu_s": statistics.median(cpu_s),
                "cpu_s_of_rounds": cpu_s,
                "load_average_before": load,
            }
        )
    rows[0]["ratios"] = [_ratio(case, rows[0], peer) for peer in rows[1:]]
    return rows


def _ratio(case: Case, native: dict[str, Any], peer: dict[str, Any]) -> dict[str, Any]:
    def of(key: str) -> float:
        return statistics.median(p / n for p, n in zip(peer[key], native[key], strict=True))

    value, least = of("step_s_of_rounds"), LEAST[case.shape][case.ranks]
    return {
        "about": f"{case}: native is times as fast as {peer['engine']}",
        "value": value,
        "at_least": least,
        "reached": value >= least,
        "of_processor_time": of("cpu_s_of_rounds"),
    }


def _start_ranks(number: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--rounds", str(options.rounds)]
        command += ["--steps", str(options.steps), "--rows", str(options.rows)]
        ranks = []
        for rank in range(CASES[number].ranks):
            ranks.append(
                subprocess.Popen(
                    [*command, "--rank", str(number), str(rank), folder],
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            )
        outputs = [rank.communicate()[0] for rank in ranks]
        assert all(rank.returncode == 0 for rank in ranks), [r.returncode for r in ranks]
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table(
        "shape", "optimizer", "ranks", "sharding", "engine", "samples/s", "MB sent", "comm."
    )
    for row in rows:
        sent, share = row["bytes_per_step"], row["communication_share"]
        table.add_row(
            *(str(row[key]) for key in ("shape", "optimizer", "ranks", "sharding", "engine")),
            f"{row['samples_per_s']:,.0f}",
            "" if sent is None else f"{sent / 1e6:.1f}",
            "" if share is None else f"{share:.0%}",
        )
    console = Console()
    console.print(table)
    for ratio in (ratio for row in rows for ratio in row.get("ratios", [])):
        verdict = "reached" if ratio["reached"] else "MISSED"
        console.print(
            f"{ratio['value']:.2f} ({ratio['of_processor_time']:.2f} by processor time)  "
            f"{ratio['about']} ({ratio['at_least']}: {verdict})"
        )


if __name__ == "__main__":
    main()
