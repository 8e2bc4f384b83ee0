"""DLRM on a CPU: trainmark beside the plain PyTorch way, in one run of about five minutes.

The plain way is what a competent user writes: one `nn.EmbeddingBag(mode="sum", sparse=True)` per
table, `torch.optim.SGD` over everything, the same MLPs and dot interaction, BCE with logits. It
gets its batches ready-made (int64 ids, float32 numbers); ours widens its narrow ones in every
step, as the training loop does. Ours also trains with `keep_freed_memory` and OpenMP's threads spin
briefly, as `trainmark train` has it on a CPU, so the plain way is measured a second time with both.

Every measurement has a process of its own: one system is in memory at a time, and no allocator
state leaks. The machine may be noisy, so systems alternate over several rounds; a round gives
its median step, and a ratio is the median over rounds of the ratio within a round. The parts of
a step come from a second pass.

    PYTHONPATH=. python benchmarks/dlrm_cpu.py            writes benchmarks/results/dlrm_cpu.json
    PYTHONPATH=. python benchmarks/dlrm_cpu.py --cores 1 2 4 8 16      dlrm_cpu_cores.json: how both
                                                          scale, one round of each, in about six
                                                          minutes; rows of other numbers of cores
                                                          stay
    ... --tiny --results FOLDER                           whether all of it runs
"""

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.common import read_rows, write_results
from benchmarks.dlrm_peers import mlp
from trainmark.cli import SPIN_COUNT
from trainmark.distributed.mesh import Mesh
from trainmark.embeddings.engine import LocalEngine
from trainmark.hardware.allocator import keep_freed_memory
from trainmark.workloads.dlrm.data import ClickBatch, build_data
from trainmark.workloads.dlrm.model import build_model, init_weights
from trainmark.workloads.dlrm.runs import DlrmRun, Model
from trainmark.workloads.dlrm.step import build_trainer

BATCH = 8192
LR = 0.01
POOL = 16  # different batches, so that no step finds the rows of the one before in a cache
TABLE_VALUE = 0.01  # drawing 1.7 billion random values takes longer than the measurement
WARMUP_STEPS = 3
ROUNDS = 3
PARTS = ("prepare", "lookup and interaction", "MLPs forward", "backward", "update")
OURS, PEER, PEER_KEEPING = "trainmark", "pytorch", "pytorch+kept"  # + keep_freed_memory


Measured = dict[tuple[str, str], list[dict[str, Any]]]
"""What each round found, by (shape, system)."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A network and how many steps of it a round measures."""

    about: str
    model: Model
    steps: int

    @property
    def cfg(self) -> DlrmRun:
        return DlrmRun(
            name="dlrm-cpu",
            data="synthetic",
            device="cpu",
            model=self.model,
            global_batch=BATCH,
            micro_batch=BATCH,
            synthetic_rows=BATCH * POOL,
            precision="fp32",
        )


def _narrow(tables: int, rows: int) -> Model:
    return Model(
        table_rows=(rows,) * tables, embedding_dim=64, bottom_mlp=(128, 64), top_mlp=(128, 128, 1)
    )


SHAPES = {
    "embeddings": Shape(
        about="26 tables of 1 M rows, MLPs of width 128", model=_narrow(26, 1_000_000), steps=24
    ),
    "full-size": Shape(
        about="26 tables of 1 M rows, full-size MLPs",
        model=Model(
            table_rows=(1_000_000,) * 26,
            embedding_dim=64,
            bottom_mlp=(512, 256, 64),
            top_mlp=(1024, 1024, 512, 256, 1),
        ),
        steps=8,
    ),
    "rows-100k": Shape(
        about="4 tables of 100 k rows, MLPs of width 128", model=_narrow(4, 100_000), steps=48
    ),
    "rows-10m": Shape(
        about="4 tables of 10 M rows, MLPs of width 128", model=_narrow(4, 10_000_000), steps=48
    ),
}

SCALED = [
    (shape, system) for shape in ("embeddings", "full-size") for system in (OURS, PEER_KEEPING)
]

CASES = [
    ("embeddings", OURS),
    ("embeddings", PEER),
    ("embeddings", PEER_KEEPING),
    ("full-size", OURS),
    ("full-size", PEER),
    ("full-size", PEER_KEEPING),
    ("rows-100k", OURS),
    ("rows-10m", OURS),
]


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The steps of one case over those of another, and what they should be."""

    about: str
    over: tuple[str, str]
    under: tuple[str, str]
    at_least: float | None = None
    at_most: float | None = None

    def row(self, found: Measured) -> dict[str, Any]:
        pairs = zip(found[self.over], found[self.under], strict=True)
        value = statistics.median(a["step_s"] / b["step_s"] for a, b in pairs)
        reached = (self.at_least or 0) <= value <= (self.at_most or float("inf"))
        limits = {"at_least": self.at_least, "at_most": self.at_most}
        target = {name: limit for name, limit in limits.items() if limit is not None}
        return {"about": self.about, "value": value, "target": target, "reached": reached}


def _speedup(shape: str, peer: str, at_least: float | None) -> Ratio:
    about = f"{shape}: {OURS} is times as fast as {peer}"
    return Ratio(about=about, over=(shape, peer), under=(shape, OURS), at_least=at_least)


RATIOS = [
    _speedup("embeddings", PEER, at_least=1.3),
    _speedup("embeddings", PEER_KEEPING, at_least=None),
    _speedup("full-size", PEER, at_least=1.0),
    _speedup("full-size", PEER_KEEPING, at_least=None),
    Ratio(
        about="a step at 10 M rows takes times the step at 100 k",
        over=("rows-10m", OURS),
        under=("rows-100k", OURS),
        at_most=1.5,
    ),
]


# --- the plain PyTorch way


class PlainDlrm(nn.Module):
    """DLRM as its first PyTorch implementations have it."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.lower: Tensor
        dim, num_vectors = model.embedding_dim, len(model.table_rows) + 1
        self.tables = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(
                torch.full((rows, dim), TABLE_VALUE), freeze=False, mode="sum", sparse=True
            )
            for rows in model.table_rows
        )
        self.bottom = mlp([model.numerical_features, *model.bottom_mlp], last_relu=True)
        num_dots = num_vectors * (num_vectors - 1) // 2
        self.top = mlp([dim + num_dots, *model.top_mlp], last_relu=False)
        row, column = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.register_buffer("lower", row * num_vectors + column)

    def forward(self, numerical: Tensor, ids: list[Tensor], offsets: Tensor) -> Tensor:
        x = self.bottom(numerical)
        return self.top(self.lookup_and_interact(x, ids, offsets)).squeeze(-1)

    def lookup_and_interact(self, x: Tensor, ids: list[Tensor], offsets: Tensor) -> Tensor:
        rows = [table(i, offsets) for table, i in zip(self.tables, ids, strict=True)]
        vectors = torch.stack([x, *rows], dim=1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))
        # Faster in the backward pass than the dots[:, row, column] of the published models.
        lower = dots.flatten(1).index_select(1, self.lower)
        return torch.cat([x, lower], dim=1)


class PlainTrainer:
    def __init__(self, cfg: DlrmRun) -> None:
        self.model = PlainDlrm(cfg.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.offsets = torch.arange(BATCH)

    def loss(self, numerical: Tensor, ids: list[Tensor], labels: Tensor) -> Tensor:
        logits = self.model(numerical, ids, self.offsets)
        return binary_cross_entropy_with_logits(logits, labels)

    def update(self) -> None:
        self.optimizer.step()

    def step(self, batch: tuple[Tensor, list[Tensor], Tensor]) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(*batch)
        loss.backward()
        self.update()
        return loss.detach()


# --- one measurement, in a process of its own

Step = Callable[[Any], Tensor]


@dataclass(frozen=True)
class System:
    """Something that trains."""

    step: Step
    keep: Callable[[ClickBatch], Any]
    """How a batch waits in the pool."""
    parts: dict[str, tuple[Any, str]]
    """Methods whose time the second pass takes: (object, name)."""


def trainmark_system(cfg: DlrmRun) -> System:
    mesh = Mesh(torch.device("cpu"))
    model = build_model(cfg)
    tables = model.tables
    assert isinstance(tables, LocalEngine)
    store = tables.store  # whose weights are allocated anew before they are filled

    def fill(seed: int, bound: float | None = None) -> None:
        store.weight.fill_(TABLE_VALUE)

    tables.init_weights = fill  # type: ignore[method-assign]
    init_weights([model], cfg, mesh.device)
    trainer = build_trainer([model], mesh, cfg)
    parts = {
        "prepare": (trainer, "prepare"),
        "interaction": (tables, "lookup_and_interact"),
        "loss": (trainer, "_loss"),
        "check": (trainer, "_finish_gradients"),
        "update": (trainer, "_update"),
    }
    return System(
        lambda batch: trainer.step(trainer.prepare(batch), LR)[0], lambda batch: batch, parts
    )


def pytorch_system(cfg: DlrmRun) -> System:
    trainer = PlainTrainer(cfg)
    parts = {
        "interaction": (trainer.model, "lookup_and_interact"),
        "loss": (trainer, "loss"),
        "update": (trainer, "update"),
    }
    return System(trainer.step, _ready_made, parts)


def _ready_made(batch: ClickBatch) -> tuple[Tensor, list[Tensor], Tensor]:
    (group,) = batch.groups
    return batch.numerical.float(), list(group.ids.long()), batch.labels.float()


def measure(shape: Shape, system: str) -> dict[str, Any]:
    """The median step, and the parts of one."""
    if system in (OURS, PEER_KEEPING):
        keep_freed_memory()
    trained = (trainmark_system if system == OURS else pytorch_system)(shape.cfg)
    pool = [trained.keep(batch) for batch in build_data(shape.cfg, "train", 0, 1)]
    assert len(pool) == POOL
    batches = itertools.cycle(pool)
    _times(trained.step, batches, WARMUP_STEPS)
    times = _times(trained.step, batches, shape.steps)
    clocks: dict[str, float] = {}
    for name, (owner, method) in trained.parts.items():
        setattr(owner, method, _clocked(getattr(owner, method), name, clocks))
    splits = []
    for _ in range(shape.steps // 3):
        clocks.clear()
        (whole,) = _times(trained.step, batches, 1)
        splits.append(_split(whole, clocks))
    return {
        "step_s": statistics.median(times),
        "split_s": {part: statistics.median(s[part] for s in splits) for part in PARTS},
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _times(step: Step, batches: Iterator[Any], count: int) -> list[float]:
    times = []
    for _ in range(count):
        batch = next(batches)
        began = time.perf_counter()
        loss = step(batch)
        times.append(time.perf_counter() - began)
        assert torch.isfinite(loss)
    return times


def _clocked(function: Callable[..., Any], name: str, clocks: dict[str, float]) -> Any:
    def clocked(*args: Any) -> Any:
        began = time.perf_counter()
        result = function(*args)
        clocks[name] = time.perf_counter() - began
        return result

    return clocked


def _split(whole: float, clocks: dict[str, float]) -> dict[str, float]:
    """The parts of one step; the update includes the look for gradients that are not finite."""
    prepare, update = clocks.get("prepare", 0.0), clocks["update"] + clocks.get("check", 0.0)
    return {
        "prepare": prepare,
        "lookup and interaction": clocks["interaction"],
        "MLPs forward": clocks["loss"] - clocks["interaction"],
        "backward": whole - prepare - clocks["loss"] - update,
        "update": update,
    }


# --- all measurements, and what they say


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default {ROUNDS}")
    parser.add_argument("--measure", nargs=2, metavar=("SHAPE", "SYSTEM"), help=argparse.SUPPRESS)
    parser.add_argument("--cores", type=int, nargs="+", help="measure how the steps scale")
    parser.add_argument("--results", type=Path, help="another folder for the results")
    parser.add_argument("--tiny", action="store_true", help="small tables: no figures")
    args = parser.parse_args()
    if args.measure:
        shape = SHAPES[args.measure[0]]
        print(json.dumps(measure(_tiny(shape) if args.tiny else shape, args.measure[1])))
        return
    tiny = ["--tiny"] if args.tiny else []
    if args.cores:
        scaled = {_scale_key(row): row for row in read_rows("dlrm_cpu_cores", args.results)}
        for cores in args.cores:
            for row in _scaled(cores, tiny):
                scaled[_scale_key(row)] = row
                write_results("dlrm_cpu_cores", list(scaled.values()), folder=args.results)
        return
    found = _alternate(args.rounds, tiny)
    rows = [_row(shape, system, found) for shape, system in CASES]
    _show(rows)
    print(write_results("dlrm_cpu", rows, folder=args.results))


def _tiny(shape: Shape) -> Shape:
    """The same network with tables of few rows, and few steps."""
    few = tuple(min(rows, 1000) for rows in shape.model.table_rows)
    return replace(shape, model=replace(shape.model, table_rows=few), steps=8)


def _scale_key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["system"], row["shape"], row["cores"]


def _scaled(cores: int, more: list[str]) -> Iterator[dict[str, Any]]:
    """What is to be known of scaling, on some of the machine's cores, with a thread each."""
    chosen = sorted(os.sched_getaffinity(0))[:cores]
    for case in SCALED:
        done = subprocess.run(
            [sys.executable, __file__, "--measure", *case, *more],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env=_settings(case[1]) | {"OMP_NUM_THREADS": str(cores)},
            preexec_fn=lambda: os.sched_setaffinity(0, chosen),
        )
        found = json.loads(done.stdout)
        print(f"{cores} cores: {' '.join(case)}: {found['step_s'] * 1e3:.1f} ms", flush=True)
        shape, system = case
        name = OURS if system == OURS else PEER
        samples = {"samples_per_s": BATCH / found["step_s"]}
        yield {"system": name, "shape": shape, "cores": cores} | samples | found


def _settings(system: str) -> dict[str, str]:
    """Environment variables, which are read when torch is loaded."""
    spinning = {} if system == PEER else {"GOMP_SPINCOUNT": SPIN_COUNT}
    return spinning | os.environ


def _alternate(rounds: int, more: list[str]) -> Measured:
    """Every measurement once per round, in an order that turns round with every round."""
    found: Measured = {case: [] for case in CASES}
    for number in range(rounds):
        for case in CASES if number % 2 == 0 else CASES[::-1]:
            began = time.perf_counter()
            command = [sys.executable, __file__, "--measure", *case, *more]
            env = _settings(case[1])
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
            found[case].append(json.loads(done.stdout))
            step_ms = found[case][-1]["step_s"] * 1e3
            took = time.perf_counter() - began
            print(f"round {number + 1}: {' '.join(case)}: {step_ms:.1f} ms ({took:.0f} s)")
    return found


def _row(shape: str, system: str, found: Measured) -> dict[str, Any]:
    model, rounds = SHAPES[shape].model, found[shape, system]
    step_s = statistics.median(r["step_s"] for r in rounds)
    row = {
        "system": OURS if system == OURS else PEER,
        "freed_memory_kept": system != PEER,
        "shape": shape,
        "about": SHAPES[shape].about,
        "embedding_dim": model.embedding_dim,
        "bottom_mlp": model.bottom_mlp,
        "top_mlp": model.top_mlp,
        "global_batch": BATCH,
        "threads": torch.get_num_threads(),
        "samples_per_s": BATCH / step_s,
        "step_s": step_s,
        "step_s_of_rounds": [r["step_s"] for r in rounds],
        "split_s": {p: statistics.median(r["split_s"][p] for r in rounds) for p in PARTS},
        "peak_bytes": max(r["peak_bytes"] for r in rounds),
    }
    if system == OURS:
        row["ratios"] = [r.row(found) for r in RATIOS if (shape, system) in (r.under, r.over)]
    return row


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table("shape", "system", "samples/s", "step", *PARTS, title="milliseconds, medians")
    for row in rows:
        keeping = row["system"] == PEER and row["freed_memory_kept"]
        table.add_row(
            row["shape"],
            PEER_KEEPING if keeping else row["system"],
            f"{row['samples_per_s']:,.0f}",
            *(f"{seconds * 1e3:.1f}" for seconds in (row["step_s"], *row["split_s"].values())),
        )
    console = Console()
    console.print(table)
    ratios = {r["about"]: r for row in rows for r in row.get("ratios", [])}
    for about, ratio in ratios.items():
        limits = ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in ratio["target"].items())
        verdict = "reached" if ratio["reached"] else "MISSED"
        console.print(f"{ratio['value']:.2f}  {about}" + (f" ({limits}: {verdict})" * bool(limits)))


if __name__ == "__main__":
    main()
