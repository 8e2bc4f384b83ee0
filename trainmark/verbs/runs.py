"""`list`, `show`, `train` and `infer`: what they print around a run."""

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table

from trainmark import workloads
from trainmark.config import SYNTHETIC, Run, TrainOptions, flatten, or_synthetic, to_plain
from trainmark.errors import InputError
from trainmark.formatting import gib_cell, readable_size
from trainmark.hardware import backends
from trainmark.hardware.devices import Cluster
from trainmark.hardware.memory import MEMORY_PARTS, misfit
from trainmark.inference.options import InferOptions
from trainmark.progress import SafeConsole
from trainmark.resolve import accumulation_remark
from trainmark.run.result import FILE_NAME as RESULT_FILE
from trainmark.run.result import Result
from trainmark.verbs.flags import first_line


def runs_table() -> Table:
    """Every named run, in a line or two of a terminal of 80 columns."""
    table = Table(box=None, header_style="bold", caption_justify="left")
    table.add_column("run", no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("GiB", justify="right", no_wrap=True)
    table.add_column("target", no_wrap=True)
    table.add_column("what")
    without_data = []
    for name, make in workloads.named_runs().items():
        cfg = make()
        workload = workloads.definition(cfg)
        parameters = workload.sizes(cfg)["parameters"]
        if cfg.data == SYNTHETIC:
            without_data.append(name)
        table.add_row(
            name,
            _count(parameters),
            gib_cell(parameters * 4),
            cfg.metric if cfg.target is None else f"{cfg.metric} {cfg.target:g}",
            first_line(make),
        )
    table.caption = (
        f"GiB: weights in fp32. {', '.join(without_data)} need no data, all others --data."
    )
    return table


def _count(number: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)


def resolved_run(cfg: Run, cluster: Cluster) -> RenderableType:
    """The configuration with everything filled in, and the model's size."""
    resolved = workloads.resolve(or_synthetic(cfg), cluster)
    resolved = dataclasses.replace(resolved, data=cfg.data)
    fields = Table(box=None, header_style="bold", title=f"{cfg.name} on {cluster}")
    fields.add_column("field")
    fields.add_column("value", overflow="fold")
    for name, value in flatten(to_plain(resolved)):
        fields.add_row(name, json.dumps(value))
    sizes = Table(box=None, show_header=False)
    for name, number in workloads.definition(cfg).sizes(resolved).items():
        what = name.removesuffix(" bytes")
        sizes.add_row(what, f"{number:,}" if what == name else readable_size(number))
    remarks = _remarks(cfg, resolved)
    return Group(fields, "", sizes, *(["", *remarks] if remarks else []))


def _remarks(cfg: Run, resolved: Run) -> list[str]:
    """Remarks on a run that its settings do not show."""
    remark = accumulation_remark(workloads.named_run(cfg.name), cfg, resolved)
    return [text for text in (remark, backends.sentence(cfg.device)) if text]


def dry_run(cfg: Run, cluster: Cluster) -> None:
    """Print the bytes per device of a run; one that does not fit is then an `InputError`."""
    from trainmark.run import memory

    resolved, plan = memory.dry_run(cfg, cluster)
    table = Table(
        box=None,
        title=f"{resolved.name} on {cluster}, per device",
        caption="at a step's fullest moment",
        header_style="bold",
    )
    table.add_column("what")
    table.add_column("memory", justify="right")
    for name in MEMORY_PARTS:
        note = " (estimated)" if name == "activations" else ""
        table.add_row(name + note, readable_size(getattr(plan, name)))
    table.add_row("total", readable_size(plan.total), style="bold")
    console = SafeConsole()
    console.print(table)
    for text in _remarks(cfg, resolved):
        console.say(text)
    advice = partial(memory.advice, cfg, cluster)
    if too_large := misfit(cfg.name, plan, cluster, advice):
        raise InputError(too_large)


def train(cfg: Run, options: TrainOptions, started: float) -> int:
    """Train, then print the table for people and one JSON line for programs."""
    from trainmark.distributed.mesh import is_main_process
    from trainmark.report.tables import grid_table, result_grid, units
    from trainmark.run import outcome, runner
    from trainmark.run.loop import Interrupted

    try:
        finished = runner.train(cfg, options, started)
    except Interrupted as stop:
        if is_main_process():
            print(f"trainmark: {stop}", file=sys.stderr)
        return stop.exit_code
    if not is_main_process():
        return 0
    results = [result for result, _ in finished]
    console = SafeConsole()
    console.print(grid_table(result_grid(results)))
    console.print(units(results[0]), style="dim", highlight=False)
    if len(results) > 1:
        console.print(outcome.spread(results))
    _print_warnings(console, finished)
    for result, folder in finished:
        headline = {
            "result": str(folder / RESULT_FILE),
            "run": result.run,
            "case": result.case,
            "p_train": result.throughput.p_train,
            result.quality.metric: result.quality.value,
            "target": result.quality.target,
            "reached": result.quality.reached,
        }
        print(json.dumps(headline))
    return 0


def _print_warnings(console: SafeConsole, finished: list[tuple[Result, Path]]) -> None:
    """Print one line for each warning; with several repeats, name the folder, too."""
    for result, folder in finished:
        where = f" ({folder})" if len(finished) > 1 else ""
        for warning in result.warnings:
            console.say(f"Warning{where}: {warning}", style="yellow")


def infer(options: InferOptions) -> None:
    """Time a run's checkpoint, print the table, and keep it in the run's folder."""
    from trainmark.distributed.mesh import is_main_process
    from trainmark.inference import figures, latency
    from trainmark.report.tables import grid_table, inference_grid
    from trainmark.run.run_folder import role

    found = latency.measure(options, say=SafeConsole(stderr=True).print)
    if not is_main_process():
        return
    console = SafeConsole()
    console.say(f"{found.checkpoint} ({role(Path(found.checkpoint))})")
    title = f"{found.case}, {found.precision}, {options.steps:,} requests of each size"
    title += f", {options.clients} at a time" if options.clients > 1 else ""
    console.print(grid_table(inference_grid(found.rows), title))
    whole = found.with_rows_of(figures.read(options.folder))
    path = whole.write(options.folder)  # last: what is printed cannot get lost
    console.say(str(path))
