"""Results in the tables of the published pages: their columns, our rows above the published ones.

`FORMS` has one function for each family of pages. `nvidia.py` has the tables that set two
precisions side by side.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from trainmark.errors import InputError
from trainmark.report import nvidia, published
from trainmark.report.formats import Titled
from trainmark.report.nvidia import devices, gpus, our_model
from trainmark.report.published import Model, Row
from trainmark.report.repeats import histograms
from trainmark.report.sections import ReportedRun, as_row
from trainmark.report.tables import (
    NOT_APPLICABLE,
    PUBLISHED_COLUMNS,
    Column,
    inference_grid,
    make_grid,
    quality,
    result_grid,
    throughput,
)
from trainmark.run.result import Result


def tables_like(form: str | None, runs: Sequence[ReportedRun]) -> list[Titled]:
    """The tables of a family of pages, or our own where `form` is None; then the repeats."""
    made = _own(runs) if form is None else _published(form, runs)
    return [*made, *histograms([run.result for run in runs])]


def _own(runs: Sequence[ReportedRun]) -> list[Titled]:
    results = Titled("Results", result_grid([run.result for run in runs]), ours=len(runs))
    inference = [
        Titled(f"Inference: {run.label}, {run.inference.precision}", inference_grid(rows))
        for run in runs
        if run.inference and (rows := run.inference.rows)
    ]
    return [results, *inference]


def _published(form: str, runs: Sequence[ReportedRun]) -> list[Titled]:
    systems = {name: s for name, s in published.systems().items() if s.like == form}
    known = {system.workload for system in systems.values()}
    others = sorted({run.result.workload for run in runs} - known)
    if others:
        raise InputError(
            f"--like {form} has tables for {', '.join(sorted(known))}; received results of "
            f"{', '.join(others)}. Leave those out, or leave --like out."
        )
    made: list[Titled] = []
    for name, system in systems.items():
        ours = [run for run in runs if run.result.workload == system.workload]
        if ours:
            made += FORMS[form](name, ours)
    return made


# --- FlagPerf


def _flagperf(system: str, runs: Sequence[ReportedRun]) -> list[Titled]:
    theirs = published.rows_of(system)
    rows = [*map(as_row, runs), *theirs]
    counts_tokens = any(row.tokens_per_device_s for row in theirs)
    columns = _FLAGPERF_TOKENS if counts_tokens else _flagperf_samples(rows[-1].metric or "quality")
    return [Titled(_title(system), make_grid(columns, rows), _notes(system), ours=len(runs))]


_WHERE = PUBLISHED_COLUMNS[:4]  # hardware, case, note, precision


def _always(header: str, called: str | None = None) -> Column:
    """A column of all published tables that these have even where no row has a value."""
    (column,) = (column for column in PUBLISHED_COLUMNS if column.header == header)
    return replace(column, header=called or header, optional=False)


def _flagperf_samples(metric: str) -> tuple[Column, ...]:
    names = ("fix_hp", "e2e_time", "p_whole", "p_train", "p_core")
    return (*_WHERE, *map(_always, names), _always("quality", metric), _always("mem"))


_FLAGPERF_TOKENS = (
    *_WHERE,
    *map(_always, ("parallel", "fix_hp")),
    _always("tokens/device/s", "token/p/s"),
    *map(_always, ("aligned", "mem", "MFU")),
)


# --- TorchRec


def _torchrec(system: str, runs: Sequence[ReportedRun]) -> list[Titled]:
    models = {model.run: model for model in reversed(published.models_of(system))}
    ours = [(_one_epoch(run.result, as_row(run)), our_model(run.result)) for run in runs]
    theirs = [(row, models[row.run]) for row in published.rows_of(system)]
    grid = make_grid(_TORCHREC, [*ours, *theirs])
    return [Titled(_title(system), grid, _notes(system), ours=len(ours))]


def _one_epoch(result: Result, row: Row) -> Row:
    """The row with the metric of the test half, and the time of an epoch: samples / p_train."""
    test = result.final_metrics().get("test", {}).get(result.quality.metric)
    epochs, rate = result.config.get("epochs"), result.throughput.p_train
    if result.ended != "epochs" or not epochs or not rate:
        return replace(row, quality=test, e2e_time_s=None)
    return replace(row, quality=test, e2e_time_s=result.samples / epochs / rate)


def _unique_flags(row: Row, model: Model) -> str:
    """The flags that set a published run apart; for ours, what differs from the named run."""
    if row.system not in published.systems():
        return row.fix_hp or NOT_APPLICABLE
    rows = ",".join(map(str, model.table_rows or ()))
    return f"--batch_size {_local_batch(row)} --num_embeddings_per_feature {rows}"


def _local_batch(row: Row) -> str:
    return NOT_APPLICABLE if not row.global_batch else str(row.global_batch // devices(row.case))


def hours_minutes_seconds(time_s: float | None) -> str:
    """A time as TorchRec's page writes it: 12m43s, 02h32m03s."""
    if time_s is None:
        return NOT_APPLICABLE
    minutes, rest = divmod(round(time_s), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60:02d}h{minutes % 60:02d}m{rest:02d}s"


_TORCHREC = (
    Column("Configuration", lambda pair: pair[1].name, numeric=False),
    Column("Hardware", lambda pair: pair[0].hardware, numeric=False),
    Column("Collective Size of Embedding Tables (GiB)", lambda pair: nvidia.gib(pair[1])),
    Column("Number of GPUs", lambda pair: gpus(pair[0].case)),
    Column("Local Batch Size", lambda pair: _local_batch(pair[0])),
    Column("Global Batch Size", lambda pair: str(pair[0].global_batch or NOT_APPLICABLE)),
    Column("AUROC over Val Set After 1 Epoch", lambda pair: quality(pair[0].validation, None)),
    Column("AUROC Over Test Set After 1 Epoch", lambda pair: quality(pair[0].quality, None)),
    Column("Train Records/Second", lambda pair: throughput(pair[0].p_train)),
    Column("Time to Train 1 Epoch", lambda pair: hours_minutes_seconds(pair[0].e2e_time_s)),
    Column("Unique Flags", lambda pair: _unique_flags(*pair), numeric=False),
)


# --- what all have


def _nvidia(system: str, runs: Sequence[ReportedRun]) -> list[Titled]:
    first, *others = nvidia.tables(system, runs)
    return [replace(first, notes=_notes(system)), *others]


def _title(system: str) -> str:
    return published.systems()[system].source


def _notes(system: str) -> tuple[str, ...]:
    found = published.systems()[system]
    return (f"Published: {found.source}; {found.dataset}.", *([found.note] if found.note else []))


FORMS: dict[str, Callable[[str, Sequence[ReportedRun]], list[Titled]]] = {
    "flagperf": _flagperf,
    "nvidia": _nvidia,
    "torchrec": _torchrec,
}
"""`--like` -> the tables of one of its systems and of our runs of the same workload."""
