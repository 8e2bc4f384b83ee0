"""What table and MLP precisions cost in quality: one pass over a billion planted samples each.

    PYTHONPATH=. python benchmarks/dlrm_quality.py --seeds 0       (a CUDA machine, minutes)
    PYTHONPATH=. python benchmarks/dlrm_quality.py --seeds 1 2     keeps the rows of seed 0
    PYTHONPATH=. python benchmarks/dlrm_quality.py --size bags --seeds 0 1 2    several ids per
                                                    feature, cross layers, element-wise Adagrad

All variants of a call train in lockstep: batches are drawn once, on the device, and every variant
takes its steps with them, through the product's own trainer. A variant is a change of
configuration, nothing else. The stream and the test rows are the same for all seeds, too: a seed is
other initial weights and another rounding. Differences to the reference of the same seed are
therefore paired, and their standard errors are DeLong's for correlated AUCs. They speak of the test
rows alone; how far training varies is what the seeds show.

The planted signal needs the large tables: each of their rows has a term of its own (a quarter of
the logit's variance) and a hidden vector that is multiplied with those of other features (a half).
Rows that one pass sees a few times only cannot be learned by anyone; fp32 ends 0.007 below the best
possible AUC. Row-wise Adagrad's steps do not depend on how rare a row is. Rounding to nearest loses
small ones: a row's largest weight always has the largest code and moves freely, but small changes
of the others, relative to it, are rounded away.

With `--size bags`, features get more ids as MLPerf's recommender does (`--multi-hot uniform`), and
Adagrad's sums of 16-bit and 8-bit tables are in bf16, as they have to be on one GPU there.

Rows are written at every milestone, so that a call that is cut short keeps its last one. A row
gives way to one of as many or more samples; delete the file to begin again.
"""

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks import common
from benchmarks.dlrm_clicks import Clicks, PlantedStream, Signal
from benchmarks.dlrm_systems import (
    click_batch,
    mlps_in,
    resolved,
    step,
    tables_in,
    trainer_for,
)
from benchmarks.timing import synchronize
from trainmark import metrics
from trainmark.config import SYNTHETIC, Schedule
from trainmark.errors import InputError
from trainmark.metrics import ranking
from trainmark.metrics.ranking import Placements
from trainmark.workloads.dlrm.data import ClickBatch
from trainmark.workloads.dlrm.runs import DlrmRun, Model, Optimizer

RESULT, RESULT_OF_BAGS = "dlrm_precision_quality", "dlrm_dcnv2_quality"
MLP_BASE = "bf16"  # of the variants that differ in their tables


@dataclass(frozen=True, kw_only=True)
class Study:
    """How large everything is."""

    signal: Signal
    samples: int
    test_rows: int
    batch: int
    block_rows: int
    """Samples that are drawn together, a multiple of any batch: the stream is always the same."""
    embedding_dim: int
    bottom_mlp: tuple[int, ...]
    top_mlp: tuple[int, ...]
    lr: float
    optimizer: Literal["sgd", "adagrad", "rowwise_adagrad", "adam"] = "rowwise_adagrad"
    milestones: int = 4
    """How often to evaluate and write, evenly spaced, the last at the end."""
    network: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the model."""
    result: str = RESULT
    """The file of its rows."""

    @property
    def blocks(self) -> int:
        return -(-self.samples // self.block_rows)

    @property
    def steps(self) -> int:
        return self.blocks * (self.block_rows // self.batch)

    @property
    def samples_in_full(self) -> int:
        """Of whole blocks."""
        return self.blocks * self.block_rows


def sizes(scale: float) -> tuple[int, ...]:
    """Four tables with most of the rows, and twelve of all smaller sizes."""
    large = [int(rows * scale) for rows in (8e6, 6e6, 4e6, 2.5e6)]
    return (*large, *(int(rows * scale**0.5) for rows in (200e3, 50e3, 20e3)),
            5000, 2000, 1000, 500, 200, 100, 50, 10, 3)  # fmt: skip


INTERACTING = (0, 1, 2, 3, 7, 10, 13, 14)
"""The features with large tables, and those of 5000, 500, 50 and 10 rows."""

STUDIES = {
    "full": Study(
        signal=Signal(table_rows=sizes(1.0), large_tables=4, interacting=INTERACTING),
        samples=1_000_000_000,
        test_rows=4_000_000,
        batch=65536,
        block_rows=1 << 20,
        embedding_dim=64,
        bottom_mlp=(256, 64),
        top_mlp=(768, 512, 256, 1),  # all but the last are large enough for fp8
        lr=0.03,
    ),
    # A hundredth of the large rows and of the samples, so that a row is seen as often.
    "hundredth": Study(
        signal=Signal(table_rows=sizes(0.01), large_tables=4, interacting=INTERACTING),
        samples=10_000_000,
        test_rows=500_000,
        batch=4096,
        block_rows=1 << 16,
        embedding_dim=16,
        bottom_mlp=(64, 16),
        top_mlp=(64, 64, 1),
        lr=0.05,
    ),
    "bags": Study(
        signal=Signal(table_rows=sizes(0.1), large_tables=4, interacting=INTERACTING),
        samples=100_000_000,
        test_rows=4_000_000,
        batch=16384,
        block_rows=1 << 20,
        embedding_dim=64,
        bottom_mlp=(256, 64),
        top_mlp=(768, 512, 256, 1),
        lr=0.01,
        optimizer="adagrad",
        network={
            "hotness": (10, 5, 3, 20, 3, 2, 1, 6, 1, 1, 3, 1, 1, 1, 1, 1),
            "interaction": "dcn",
            "cross_layers": 3,
            "cross_rank": 128,
        },
        result=RESULT_OF_BAGS,
    ),
    "tiny": Study(
        signal=Signal(
            table_rows=(3000, 1000, 50, 7), large_tables=2, interacting=(1, 2), numerical_features=3
        ),
        samples=3000,
        test_rows=1000,
        batch=256,
        block_rows=1024,
        embedding_dim=8,
        bottom_mlp=(16, 8),
        top_mlp=(16, 1),
        lr=0.1,
    ),
}


# --- variants


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A row of the study."""

    tables: str = "fp32"
    mlps: str = MLP_BASE
    seed: int = 0
    rounding: str = "stochastic"

    def changes(self, optimizer: str) -> dict[str, Any]:
        """How its configuration differs from the others'."""
        changed = tables_in(self.tables, self.rounding) | mlps_in(self.mlps)
        if optimizer == "adagrad" and self.tables != "fp32":
            changed["table_format"]["state_precision"] = "bf16"
        return changed | {"seed": self.seed}

    @property
    def reference(self) -> "Variant | None":
        """What it is compared with: tables with fp32 tables, then MLPs with fp32 MLPs, which are
        slow: seeds other than 0 have 16-bit ones in their place."""
        if self.tables != "fp32":
            return Variant(mlps=self.mlps, seed=self.seed)
        exact = "fp32" if self.seed == 0 else MLP_BASE
        return Variant(mlps=exact, seed=self.seed) if self.mlps not in ("fp32", exact) else None

    @property
    def tables_name(self) -> str:
        """As in a row, where what is rounded to nearest must not be taken for the product's way."""
        return self.tables if self.rounding == "stochastic" else f"{self.tables}_{self.rounding}"

    def __str__(self) -> str:
        return f"tables {self.tables_name}, MLPs {self.mlps}, seed {self.seed}"


def variants(seed: int) -> list[Variant]:
    """Three formats and fp8 MLPs for every seed; all others for seed 0 alone."""
    found = [Variant(tables=tables, seed=seed) for tables in ("fp32", "bf16", "int8")]
    found += [Variant(mlps="fp8", seed=seed)]
    if seed == 0:
        found += [Variant(tables=tables) for tables in ("fp16", "fp8")]
        found += [Variant(tables="int8", rounding="nearest")]
        found += [Variant(mlps=mlps) for mlps in ("fp32", "fp16")]
        found += [Variant(tables="bf16", mlps="fp8")]
    return found


def configuration(study: Study, variant: Variant, device: torch.device) -> DlrmRun:
    signal, steps = study.signal, study.steps
    run = DlrmRun(
        name=RESULT,
        data=SYNTHETIC,
        model=Model(
            numerical_features=signal.numerical_features,
            table_rows=signal.table_rows,
            embedding_dim=study.embedding_dim,
            bottom_mlp=study.bottom_mlp,
            top_mlp=study.top_mlp,
            **study.network,
        ),
        multi_hot="uniform" if "hotness" in study.network else "data",
        optimizer=Optimizer(name=study.optimizer),
        lr=study.lr,
        schedule=Schedule(
            warmup_steps=steps // 50,
            decay_start=steps // 3,
            decay_steps=steps - steps // 3,
            decay_power=1.0,
        ),
        global_batch=study.batch,
        eval_batch=study.batch,  # another shape would be compiled for again
    )
    return resolved(run, variant.changes(study.optimizer), device)


# --- training, in lockstep

Trainers = dict[Variant, Any]
Milestone = Callable[[Trainers, int], None]


def trainers_for(study: Study, wanted: Sequence[Variant], device: torch.device) -> Trainers:
    """A trainer for each variant that this version can be configured for."""
    # Each has its own compiled parts, more of them than the compiler expects of one function.
    torch._dynamo.config.recompile_limit = 256
    found = {}
    for variant in wanted:
        try:
            found[variant] = trainer_for(configuration(study, variant, device), device)
        except InputError as error:
            print(f"{variant}: skipped: {error}", flush=True)
    return found


def train(
    study: Study, stream: PlantedStream, trainers: Trainers, milestone: Milestone, limit_s: float
) -> None:
    """One pass over the stream; `milestone(trainers, samples)` is called on the way."""
    device = stream.device
    marks = {study.blocks * (i + 1) // study.milestones for i in range(study.milestones)}
    for number in range(study.blocks):
        batches = list(training_batches(study, stream, number))
        # Trainers read batches on streams of their own, and this ends before they begin. It also
        # keeps the block before in memory until nobody reads it any more.
        synchronize(device)
        for trainer in trainers.values():
            for i, batch in enumerate(batches):
                factor = trainer.cfg.schedule.factor(number * len(batches) + i)
                step(trainer, trainer.prepare(batch), trainer.cfg.lr * factor)
        done = number + 1
        if done in marks:
            milestone(trainers, done * study.block_rows)
        if done == 1:  # compiled and captured
            synchronize(device)
            began = time.perf_counter()
        if done == 1 + study.blocks // 20:
            synchronize(device)
            _foresee((time.perf_counter() - began) / (done - 1 or 1) * study.blocks, limit_s)


def training_batches(study: Study, stream: PlantedStream, number: int) -> Iterator[ClickBatch]:
    block = stream.block("train", number, study.block_rows)
    for start in range(0, study.block_rows, study.batch):
        yield _batch(study, block.part(start, start + study.batch))


def _batch(study: Study, clicks: Clicks) -> ClickBatch:
    model = study.signal
    return click_batch(model.table_rows, clicks.numerical_BN, clicks.ids_FB, clicks.labels_B)


def _foresee(seconds: float, limit_s: float) -> None:
    print(f"all of it takes about {seconds:.0f} s", flush=True)
    if seconds > limit_s:
        raise SystemExit(f"That is more than the limit of {limit_s:.0f} s: ask for fewer variants.")


# --- evaluation


@dataclass(frozen=True)
class Test:
    """The rows that every variant is judged on."""

    batches: list[ClickBatch]
    labels: Tensor
    best_auc: float


def test_rows(study: Study, stream: PlantedStream) -> Test:
    rows = min(study.block_rows, study.test_rows)
    blocks = [stream.block("test", i, rows) for i in range(-(-study.test_rows // rows))]
    labels = torch.cat([block.labels_B for block in blocks])
    best = metrics.auc(torch.cat([block.logits_B for block in blocks]), labels)
    batches = [_batch(study, block) for block in blocks]
    synchronize(stream.device)  # trainers read them on streams of their own
    return Test(batches, labels, best or 0.0)


def scores_of(trainer: Any, test: Test) -> Tensor:
    prepare = partial(trainer.prepare_to_predict, max_samples=trainer.cfg.eval_batch)
    return torch.cat([trainer.predict(prepare(batch)) for batch in test.batches])


def evaluate(study: Study, trainers: Trainers, test: Test, samples: int) -> list[dict[str, Any]]:
    """A row for every variant."""
    found: dict[Variant, tuple[float, float | None, Placements]] = {}
    for variant, trainer in trainers.items():
        scores = scores_of(trainer, test)
        levels = ranking.levels(scores, test.labels)
        places = ranking.row_placements(levels, scores, test.labels)
        found[variant] = (ranking.auc_of(levels) or 0.0, ranking.auc_error(levels), places)
    rows = []
    for variant, (auc, error, places) in found.items():
        row = _row(study, variant, samples) | {"test_rows": len(test.labels)}
        row |= {"auc": auc, "auc_standard_error": error, "best_auc": test.best_auc}
        if variant.reference in found:
            reference_auc, _, reference_places = found[variant.reference]
            row["difference"] = auc - reference_auc
            row["difference_standard_error"] = ranking.paired_error(places, reference_places)
            row["difference_to"] = str(variant.reference)
        rows.append(row)
    return rows


def _row(study: Study, variant: Variant, samples: int) -> dict[str, Any]:
    return {
        "system": "trainmark",
        "tables_precision": variant.tables_name,
        "mlp_precision": variant.mlps,
        "seed": variant.seed,
        "optimizer": study.optimizer,
        "lr": study.lr,
        "batch": study.batch,
        "rows": sum(study.signal.table_rows),
        "samples": samples,
        "of_samples": study.samples_in_full,
        "changes": variant.changes(study.optimizer),
    }


# --- a call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", default=[""], help="words of the variants to train")
    parser.add_argument("--size", choices=STUDIES, default="full")
    parser.add_argument("--samples", type=int, help="another number than the study's")
    parser.add_argument("--optimizer", help="another than the study's; its rows are rows apart")
    parser.add_argument("--lr", type=float, help="another than the study's")
    parser.add_argument("--batch", type=int, help="another than the study's")
    parser.add_argument("--limit", type=float, default=540, help="give up early beyond seconds")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="what is measured, where git does not know it")
    parser.add_argument("--output", type=Path, default=common.RESULTS)
    args = parser.parse_args()
    study, device = STUDIES[args.size], torch.device(args.device)
    given = {name: getattr(args, name) for name in ("samples", "optimizer", "lr", "batch")}
    study = dataclasses.replace(study, **{k: v for k, v in given.items() if v is not None})
    if study.block_rows % study.batch:
        parser.error(f"--batch must divide {study.block_rows}, the samples drawn together.")
    asked = [v for seed in args.seeds for v in variants(seed)]
    asked = [v for v in asked if any(words in str(v) for words in args.only)]
    results = Results(args.output, args.commit, study.result)
    run(study, unfinished(study, asked, results.rows()), device, results, args.limit)


def unfinished(
    study: Study, asked: Sequence[Variant], rows: Sequence[dict[str, Any]]
) -> list[Variant]:
    """What is not yet there in full; tables in other formats after those they are compared with."""
    complete = [_key(row) for row in rows if row["samples"] == study.samples_in_full]
    found: dict[Variant, None] = {}
    for variant in asked:
        if _key(_row(study, variant, 0)) in complete:
            continue
        if variant.tables != "fp32" and variant.reference is not None:
            found[variant.reference] = None
        found[variant] = None
    return list(found)


def run(
    study: Study,
    wanted: Sequence[Variant],
    device: torch.device,
    results: "Results",
    limit_s: float = math.inf,
) -> None:
    stream = PlantedStream(study.signal, device)
    test = test_rows(study, stream)
    trainers = trainers_for(study, wanted, device)

    def milestone(trainers: Trainers, samples: int) -> None:
        rows = evaluate(study, trainers, test, samples)
        for row in rows:
            print(json.dumps(row), flush=True)
        results.add(rows, device)

    train(study, stream, trainers, milestone, limit_s)


@dataclass(frozen=True)
class Results:
    """The file of rows; `commit` says what was measured, where git does not know it."""

    folder: Path
    commit: str | None = None
    name: str = RESULT

    def rows(self) -> list[dict[str, Any]]:
        return common.read_rows(self.name, self.folder)

    def add(self, rows: Sequence[dict[str, Any]], device: torch.device) -> None:
        rows = merged(self.rows(), rows)
        common.write_results(self.name, rows, device, folder=self.folder, commit=self.commit)


def merged(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """New rows in the place of old ones of the same variant, unless these saw more samples.

    A row's `curve` has its AUCs on the way.
    """
    by_variant = {_key(row): row for row in old}
    for row in new:
        before = by_variant.get(_key(row), {"curve": [], "samples": 0})
        if before["samples"] <= row["samples"]:
            curve = [point for point in before["curve"] if point[0] < row["samples"]]
            by_variant[_key(row)] = row | {"curve": [*curve, [row["samples"], row["auc"]]]}
    return list(by_variant.values())


KEY = ("tables_precision", "mlp_precision", "seed", "optimizer")


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[k] for k in KEY)


if __name__ == "__main__":
    main()
