"""The tables of NVIDIA's page, which set full and mixed precision side by side.

Results that differ in nothing but their seed share a cell, which has their mean.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainmark import workloads
from trainmark.errors import InputError
from trainmark.formatting import GIB
from trainmark.report import published
from trainmark.report.formats import Titled
from trainmark.report.published import InferenceRow, Model, Row
from trainmark.report.repeats import but_for
from trainmark.report.sections import ReportedRun, as_row
from trainmark.report.tables import (
    NOT_APPLICABLE,
    Column,
    device_name,
    make_grid,
    or_slash,
    quality,
)
from trainmark.run.result import Result

FULL = ("fp32", "tf32")
"""Precisions of the first column; all others are mixed."""


@dataclass(frozen=True)
class Cell:
    """Rows of one machine, model and batch, by precision."""

    by: str
    hardware: str
    gpus: str
    model: str
    batch: int | None
    full: list[Any] = field(default_factory=list)
    mixed: list[Any] = field(default_factory=list)

    def mean(self, kind: str, name: str) -> float | None:
        """The mean of a field over the rows in `full` or `mixed`."""
        values = [getattr(row, name) for row in getattr(self, kind)]
        known = [value for value in values if value is not None]
        return statistics.mean(known) if known else None


def tables(system: str, ours: Sequence[ReportedRun]) -> list[Titled]:
    """All tables of the page, our rows first."""
    rows = list(map(as_row, ours))
    kinds = [but_for(run.result, "seed", "precision", "loss_scale") for run in ours]
    theirs = [(row, ()) for row in published.rows_of(system) if row.precision]
    trained = _cells(system, list(zip(rows, kinds, strict=True))), _cells(system, theirs)
    asked_us = [(row, k) for run, k in zip(ours, kinds, strict=True) for row in _our_inference(run)]
    asked_them = [(row, ()) for row in published.inference_of(system)]
    asked = _cells(system, asked_us), _cells(system, asked_them)
    return [
        _models(system, [run.result for run in ours]),
        _table("Training accuracy", _ACCURACY, trained),
        _table("Training performance", _PERFORMANCE, trained),
        _beside_cpus(system, rows),
        _table("Inference performance", _INFERENCE, asked),
    ]


def _table(
    title: str, columns: Sequence[Column], cells: tuple[Sequence[Cell], Sequence[Cell]]
) -> Titled:
    ours, theirs = cells
    return Titled(title, make_grid(columns, [*ours, *theirs]), ours=len(ours))


def _cells(system: str, rows: Sequence[tuple[Row | InferenceRow, Any]]) -> list[Cell]:
    """Rows of the same machine, model, batch and kind together, in the order of the first."""
    names = {model.run: model.name for model in published.models_of(system)}
    cells: dict[Any, Cell] = {}
    for row, kind in rows:
        known = published.systems().get(row.system)
        key = (
            known.by if known else "this suite",
            row.hardware,
            gpus(row.case),
            names.get(row.run, row.run),
            _batch(row),
        )
        cell = cells.setdefault((*key, kind), Cell(*key))
        (cell.full if row.precision in FULL else cell.mixed).append(row)
    return list(cells.values())


def _batch(row: Row | InferenceRow) -> int | None:
    """The batch of one device."""
    if isinstance(row, InferenceRow):
        return row.batch
    return row.global_batch and row.global_batch // devices(row.case)


def devices(case: str) -> int:
    """The number of devices of a case such as a100-80gx2x8."""
    *_, nodes, per_node = case.split("x")
    return int(nodes) * int(per_node)


def gpus(case: str) -> str:
    """The number of GPUs of a case; a slash for one on CPUs."""
    return NOT_APPLICABLE if "cpu" in case else str(devices(case))


# --- models


def our_model(result: Result) -> Model:
    """The size of a result's model; unknown where its configuration is of another version."""
    from trainmark.run.run_folder import parse_config  # which loads torch

    try:
        run = parse_config(result.config, Path("its configuration"))
    except InputError:
        return Model(run=result.run, system="trainmark", name=result.run)
    sizes = workloads.definition(run).sizes(run)
    stored = sum(size for name, size in sizes.items() if name.endswith(" bytes"))
    return Model(
        run=result.run,
        system="trainmark",
        name=result.run,
        parameters=sizes["parameters"],
        gib=stored / GIB,
    )


def gib(model: Model) -> str:
    """The size of a model with up to two decimals, as the pages print it."""
    if model.gib is None:
        return NOT_APPLICABLE
    return "<0.01" if 0 < model.gib < 0.01 else f"{round(model.gib, 2):g}"


def _models(system: str, results: Sequence[Result]) -> Titled:
    ours = list(dict.fromkeys(our_model(result) for result in results))
    columns = (
        Column("Name", lambda m: m.name, numeric=False),
        Column("Frequency threshold", lambda m: or_slash(m.frequency_threshold)),
        Column("Number of parameters", lambda m: _short(m.parameters)),
        Column("Model size [GiB]", gib),
    )
    grid = make_grid(columns, [*ours, *published.models_of(system)])
    return Titled("Model sizes", grid, ours=len(ours))


# --- the comparison with CPUs


def _beside_cpus(system: str, ours: Sequence[Row]) -> Titled:
    """The table for the model that was also trained on CPUs."""
    theirs = [row for row in published.rows_of(system) if row.cpu_speedup]
    slowest = min(row.p_train for row in theirs if row.p_train)
    same = [row for row in ours if row.run == theirs[0].run]
    columns = (
        Column("GPUs", lambda r: gpus(r.case)),
        Column("Hardware", lambda r: r.hardware, numeric=False),
        Column("Throughput [samples / second]", lambda r: _short(r.p_train)),
        Column(
            "Speedup over CPU",
            lambda r: f"{r.cpu_speedup or _ratio(r.p_train, slowest) or 0:.3g}x",
        ),
    )
    title = f"Training performance: comparison with CPU for {theirs[0].run}"
    return Titled(title, make_grid(columns, [*same, *theirs]), ours=len(same))


# --- inference


def _our_inference(run: ReportedRun) -> list[InferenceRow]:
    if (found := run.inference) is None:
        return []
    return [
        InferenceRow(
            run=found.run,
            system="trainmark",
            hardware=device_name(found.hardware, found.case),
            case=found.case,
            precision=found.precision,
            batch=measured.batch,
            samples_per_s=measured.samples_per_s,
            mean_ms=measured.mean_ms,
        )
        for measured in found.rows
    ]


# --- cells


def _short(value: float | None) -> str:
    """A number as the page writes it: 17.7k, 0.648M, 13.31M, 113B."""
    if value is None:
        return NOT_APPLICABLE
    for unit, size, at in (("B", 1e9, 1e9), ("M", 1e6, 1e5), ("k", 1e3, 1e3)):
        if value >= at:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def _thousands(batch: int | None) -> str:
    """A batch in thousands: 64k for 65,536."""
    whole = batch and batch % 1024 == 0
    return f"{batch // 1024}k" if batch and whole else or_slash(batch)


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def _minutes(cell: Cell, kind: str) -> str:
    return or_slash(_ratio(cell.mean(kind, "e2e_time_s"), 60), ".2f")


def _latency(cell: Cell, kind: str) -> str:
    return or_slash(cell.mean(kind, "mean_ms"), ".2f")


def _speedup(name: str, printed: str, of: tuple[str, str]) -> Callable[[Cell], str]:
    """A column with the printed speed-up or, where there is none, the ratio of the means."""

    def cell(one: Cell) -> str:
        computed = _ratio(one.mean(of[0], name), one.mean(of[1], name))
        return or_slash(one.mean("mixed", printed) or computed, ".3g")

    return cell


def _runs(one: Cell) -> str:
    """Where a cell is a mean, the number of runs in full and in mixed precision."""
    several = len(one.full) > 1 or len(one.mixed) > 1
    return f"{len(one.full)}, {len(one.mixed)}" if several else NOT_APPLICABLE


_PLACE = (
    Column("By", lambda c: c.by, numeric=False),
    Column("Hardware", lambda c: c.hardware, numeric=False),
    Column("GPUs", lambda c: c.gpus),
    Column("Model size", lambda c: c.model, numeric=False),
)

_TRAINED = (
    *_PLACE,
    Column("Batch size / GPU", lambda c: _thousands(c.batch)),
    Column("Runs (TF32/FP32, mixed)", _runs, optional=True),
)

_ACCURACY = (
    *_TRAINED,
    Column("Accuracy (AUC) - TF32/FP32", lambda c: quality(c.mean("full", "quality"), None)),
    Column("Accuracy (AUC) - mixed precision", lambda c: quality(c.mean("mixed", "quality"), None)),
    Column("Time to train - TF32/FP32 [minutes]", lambda c: _minutes(c, "full")),
    Column("Time to train - mixed precision [minutes]", lambda c: _minutes(c, "mixed")),
    Column("Time to train speedup", _speedup("e2e_time_s", "time_speedup", ("full", "mixed"))),
)

_PERFORMANCE = (
    *_TRAINED,
    Column("Throughput - TF32/FP32", lambda c: _short(c.mean("full", "p_train"))),
    Column("Throughput - mixed precision", lambda c: _short(c.mean("mixed", "p_train"))),
    Column("Throughput speedup", _speedup("p_train", "throughput_speedup", ("mixed", "full"))),
)

_INFERENCE = (
    *_PLACE,
    Column("Batch size / GPU", lambda c: or_slash(c.batch)),
    Column("Throughput - TF32/FP32", lambda c: _short(c.mean("full", "samples_per_s"))),
    Column("Throughput - mixed precision", lambda c: _short(c.mean("mixed", "samples_per_s"))),
    Column("Average latency - TF32/FP32 [ms]", lambda c: _latency(c, "full")),
    Column("Average latency - mixed precision [ms]", lambda c: _latency(c, "mixed")),
    Column(
        "Throughput speedup", _speedup("samples_per_s", "throughput_speedup", ("mixed", "full"))
    ),
)
