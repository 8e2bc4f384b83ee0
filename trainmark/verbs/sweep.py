"""`trainmark sweep`: many runs of one kind that differ in some fields; the best, and what mattered.

A grid has a run for every combination of values; a search (`--trials`) chooses the next values by
the runs before, and ends the poor ones early. Each run has a folder of its own, and `sweep.json`
knows them all: a sweep that was stopped or killed goes on where it was. On one device the runs
share this process, so that Python and PyTorch start once; an out-of-memory is a row of the table.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainmark.config import Run, TrainOptions
from trainmark.errors import InputError
from trainmark.hardware.devices import Cluster
from trainmark.progress import say
from trainmark.report.sweep_page import SHOWN, SweptRun, runs_grid, write_page
from trainmark.report.tables import with_cells
from trainmark.run import result
from trainmark.verbs import sweep_trials
from trainmark.verbs.attempt import DONE, FAILED, OUT_OF_MEMORY, Outcome, attempt, attempt_here
from trainmark.verbs.attempt_tables import Attempt, PlannedRun, attempts_table, plans_table
from trainmark.verbs.flags import parse_run, without_flags
from trainmark.verbs.options import SweepOptions
from trainmark.verbs.sweep_search import Search
from trainmark.verbs.sweep_space import Field, Values, grid, label, parse_over, words
from trainmark.verbs.sweep_trials import Trial

OWN_FLAGS = ("--over", "--output", "--trials", "--devices", "--isolate", "--no-isolate")
"""Flags that are the sweep's, and not those of its runs."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What to vary, and how to run each choice."""

    run: Run
    """The run that all choices start from."""
    fields: Sequence[Field]
    flags: list[str]
    """Flags of `train` that all share."""
    output: Path
    trials: int | None = None
    """Number of runs of a search; None for a grid."""
    devices: int = 1
    isolate: bool = False

    @property
    def identity(self) -> dict[str, Any]:
        """What must stay the same when a sweep goes on: a grid may get more values, a search more
        trials."""
        space = [dataclasses.asdict(f) if self.trials else f.name for f in self.fields]
        kind = "search" if self.trials else "grid"
        shared = {"run": self.run.name, "flags": self.flags, "devices": self.devices}
        identity: dict[str, Any] = {"kind": kind, **shared, "fields": space}
        return cast(dict[str, Any], json.loads(json.dumps(identity)))  # lists for tuples

    @cached_property
    def search(self) -> Search:
        return Search(self.fields, self.run.better, self.run.seed)

    def parse(self, values: Values) -> tuple[Run, TrainOptions]:
        """The run with these values."""
        return parse_run("train", [self.run.name, *self.flags, *words(values)], TrainOptions)


def asked_for(cfg: Run, options: SweepOptions, arguments: list[str]) -> Sweep:
    """The sweep of a command line; `arguments` are the words after `sweep RUN`."""
    return Sweep(
        run=cfg,
        fields=parse_over(options.over),
        flags=without_flags(arguments, OWN_FLAGS),
        output=options.output or Path("runs") / f"{cfg.name}-sweep",
        trials=options.trials,
        devices=options.devices,
        isolate=options.isolate,
    )


def sweep(plan: Sweep) -> RenderableType:
    """Run all choices that have no outcome yet. Returns the table of all, and the page's path."""
    _check(plan)
    trials = sweep_trials.read(plan.output, plan.identity)
    for trial in _due(plan, trials):
        sweep_trials.write(plan.output, plan.identity, trials)  # begun, should it be killed
        _run(plan, trials, trial)
        sweep_trials.write(plan.output, plan.identity, trials)
    return _summary(plan, trials)


def _check(plan: Sweep) -> None:
    """Refuse a choice that makes no run, before the first run begins."""
    if plan.devices < 1:
        raise InputError(f"devices must be at least 1. Received: {plan.devices}.")
    if plan.trials is not None and plan.trials < 1:
        raise InputError(f"trials must be at least 1. Received: {plan.trials}.")
    if plan.trials is None:
        choices = grid(plan.fields)
    else:
        choices = [{f.name: end} for f in plan.fields for end in f.ends]
    for values in choices:
        _, options = plan.parse(values)
        if options.repeats > 1:
            raise InputError("sweep trains one seed of each choice: sweep over seed=0,1,2 instead.")


# --- which, and how


def _due(plan: Sweep, trials: list[Trial]) -> Iterator[Trial]:
    """The runs that are still to be done, each added to `trials` if it is new."""
    if plan.trials is None:
        # What failed for another reason than memory is worth another try.
        known = {label(trial.values): trial for trial in trials}
        for values in grid(plan.fields):
            name = label(values)
            if name not in known:
                known[name] = Trial(folder=name.replace("/", "_"), values=values)
                trials.append(known[name])
            if known[name].outcome not in (DONE, OUT_OF_MEMORY):
                yield known[name]
        return
    for number in range(plan.trials):
        if number == len(trials):
            trials.append(Trial(folder=f"trial-{number:03d}", values=plan.search.ask(trials)))
        if trials[number].outcome is None:
            yield trials[number]


def _run(plan: Sweep, trials: list[Trial], trial: Trial) -> None:
    """Train one, and note how it ended."""
    total = plan.trials or len(grid(plan.fields))
    say(f"{plan.run.name} with {label(trial.values)}, {trials.index(trial) + 1} of {total}")
    folder = plan.output / trial.folder
    if plan.devices == 1 and not plan.isolate:
        ended = _train_here(plan, trials, trial, folder)
    else:
        ended = _train_alone(plan, trial, folder)
    trial.outcome, trial.reason, trial.evaluations = ended.kind, ended.reason, ended.evaluations
    if ended.kind == DONE:
        finished = result.read(folder)
        trial.value = sweep_trials.judged(finished)
        trial.evaluations = sweep_trials.during(finished)


def _train_here(plan: Sweep, trials: list[Trial], trial: Trial, folder: Path) -> Outcome:
    try:
        cfg, options = plan.parse(trial.values)
    except InputError as error:
        return Outcome(FAILED, str(error))
    watch = None
    if plan.trials is not None:
        watch = plan.search.watcher(trials[: trials.index(trial)], trial, plan.run.metric)
    return attempt_here(cfg, dataclasses.replace(options, output=folder), watch)


def _train_alone(plan: Sweep, trial: Trial, folder: Path) -> Outcome:
    """Train in a process of its own, or in one for each device."""
    command = [plan.run.name, *plan.flags, *words(trial.values), "--output", str(folder)]
    return attempt(command, plan.devices, folder.with_name(f"{folder.name}.log"))


# --- output


def _summary(plan: Sweep, trials: Sequence[Trial]) -> RenderableType:
    swept = [_swept(plan, trial) for trial in trials if _is_asked_for(plan, trial)]
    told = [f"{run.label}: {run.reason}" for run in swept if run.outcome == FAILED]
    page = write_page(plan.output, plan.run.name, plan.fields, swept, plan.run.better)
    if plan.trials is None and len(plan.fields) == 1:
        table = _one_field_table(plan, swept)
    else:
        table = _ranking(plan, swept)
    return Group(table, *map(Text, [*told, str(page)]))


def _is_asked_for(plan: Sweep, trial: Trial) -> bool:
    """Whether this call asked for it: an earlier one may have had other values."""
    return plan.trials is not None or trial.values in grid(plan.fields)


def _swept(plan: Sweep, trial: Trial) -> SweptRun:
    finished = result.read(plan.output / trial.folder) if trial.outcome == DONE else None
    return SweptRun(
        folder=plan.output / trial.folder,
        values=trial.values,
        outcome=trial.outcome or FAILED,
        reason=trial.reason,
        value=trial.value,
        split=sweep_trials.judged_split(finished) if finished else "",
        result=finished,
    )


def _ranking(plan: Sweep, swept: Sequence[SweptRun]) -> RenderableType:
    """The best runs, a line each."""
    ranks = runs_grid(swept, plan.run.better, with_folders=plan.trials is not None)
    left_out = max(len(ranks.rows) - SHOWN, 0)
    table = Table(
        box=None,
        header_style="bold",
        title=f"Sweep of {plan.run.name}, the best first",
        caption=f"and {left_out} more, in {sweep_trials.FILE_NAME}" if left_out else None,
    )
    return with_cells(table, dataclasses.replace(ranks, rows=ranks.rows[:SHOWN]))


def _one_field_table(plan: Sweep, swept: Sequence[SweptRun]) -> RenderableType:
    """The runs as a table in the published form."""
    (name,) = (field.name for field in plan.fields)
    rows = [
        Attempt(label=run.values[name], outcome=run.outcome, result=run.result) for run in swept
    ]
    return attempts_table(name, rows, f"{plan.run.name} over {name}")


def dry_runs(plan: Sweep, cluster: Cluster) -> RenderableType:
    """Bytes per device for every choice of a grid, without running."""
    if plan.trials is not None:
        raise InputError("--dry-run cannot tell what a search will try: leave --trials out.")
    plans = [
        PlannedRun(
            name=", ".join(f"{name} {value}" for name, value in values.items()),
            cells=list(values.values()),
            run=plan.parse(values)[0],
            cluster=cluster,
        )
        for values in grid(plan.fields)
    ]
    headers = [field.name for field in plan.fields]
    return plans_table(headers, plans, f"{cluster}: GiB per device, activations estimated")
