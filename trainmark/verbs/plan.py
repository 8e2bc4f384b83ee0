"""What `trainmark plan` prints: memory and predicted time per device, and where each table lies."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from trainmark.config import SYNTHETIC, Run, resolve
from trainmark.embeddings.placement.placement import TablePlacement, to_json
from trainmark.errors import InputError
from trainmark.files import write_atomically
from trainmark.formatting import DASH, GIB, human
from trainmark.hardware.devices import Cluster
from trainmark.run.memory import MemoryPlan, card_bytes, misfit
from trainmark.workloads.dlrm.prediction import Prediction, predict
from trainmark.workloads.dlrm.runs import DlrmRun

MEMORY = ("weights", "gradients", "optimizer", "activations")
WIDE = 140
"""Columns of the widest table: what a file or another program gets, whatever the screen."""


def plan(cfg: Run, cluster: str, json_file: Path | None) -> None:
    """Print the plan of a run for a cluster; a run that does not fit is an `InputError`."""
    parsed = Cluster.parse(cluster)
    cfg = dataclasses.replace(cfg, data=cfg.data or SYNTHETIC, device="cpu")
    if isinstance(cfg, DlrmRun):
        _plan_dlrm(resolve(cfg, parsed), parsed, json_file)
        return
    if json_file:
        raise InputError(f"--json writes where tables lie, and {cfg.name} has no tables.")
    _plan_memory(cfg, parsed)


# --- runs without tables


def _plan_memory(cfg: Run, cluster: Cluster) -> None:
    from trainmark.run import runner

    _, memory = runner.dry_run(cfg, cluster)
    table = _table(f"{cfg.name} on {cluster}, per device: GiB, activations estimated")
    for name in (*MEMORY, "total"):
        table.add_column(name, justify="right")
    table.add_row(*(_gib(getattr(memory, name)) for name in MEMORY), _total(memory, cluster))
    console = _console()
    console.print(table)
    console.print(f"No time is predicted for {cfg.workload}.", soft_wrap=True)
    too_large = misfit(cfg, memory, cluster, lambda run: runner.dry_run(run, cluster)[1])
    if too_large:
        raise InputError(too_large)


# --- DLRM


def _plan_dlrm(cfg: DlrmRun, cluster: Cluster, json_file: Path | None) -> None:
    from trainmark.workloads.dlrm import sharding as placing

    prediction = predict(cfg)
    console = _console()
    console.print(_devices_table(cfg, cluster, prediction))
    console.print("")
    console.print(_tables_table(cfg, prediction.placement.tables))
    console.print("")
    for line in _sentences(cfg, prediction, counted=placing.counted(cfg)):
        console.print(line, soft_wrap=True, highlight=False)
    if json_file:
        _write(json_file, to_json(prediction.placement))
        console.print(
            f"{json_file}: edit it and give it as --placement.", soft_wrap=True, highlight=False
        )
    _check_fits(cfg, cluster, prediction)


def _devices_table(cfg: DlrmRun, cluster: Cluster, prediction: Prediction) -> Table:
    table = _table(f"{cfg.name} on {cluster}: GiB and predicted ms of a step, per device")
    table.add_column("device", overflow="fold")
    on_host = any(prediction.host_bytes)
    memory = (*MEMORY, "total", *(["host"] if on_host else []))
    times = ("gather", "exchange", "dense", "update", "step")
    for name in (*memory, *times):
        table.add_column(name, justify="right", overflow="fold")
    cells = [
        [
            *(_gib(getattr(prediction.memory[device], name)) for name in MEMORY),
            _total(prediction.memory[device], cluster),
            *([_gib(prediction.host_bytes[device])] if on_host else []),
            *_times(prediction, device),
        ]
        for device in range(cluster.world)
    ]
    for devices, row in _equal(cells):
        table.add_row(_ranges(devices), *row)
    return table


def _times(prediction: Prediction, device: int) -> list[str]:
    if prediction.dense_s is None:
        return [DASH] * 5
    tables = prediction.tables[device]
    seconds = (tables.gather, tables.exchange, prediction.dense_s, tables.update)
    return [f"{1e3 * part:.2f}" for part in (*seconds, prediction.device_s(device) or 0.0)]


def _tables_table(cfg: DlrmRun, tables: Sequence[TablePlacement]) -> Table:
    table = _table("tables")
    for name, justify in (("table", "right"), ("rows", "right"), ("GiB, fp32", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name in ("sharding", "devices", "why"):
        table.add_column(name)
    for placed in sorted(tables, key=lambda t: t.table):
        rows = cfg.model.table_rows[placed.table]
        host = ", host" if placed.memory == "host" else ""
        table.add_row(
            str(placed.table),
            f"{rows:,}",
            _gib(rows * cfg.model.embedding_dim * 4),
            placed.sharding + host,
            _ranges(sorted({shard.device for shard in placed.shards})),
            placed.reason,
        )
    return table


def _sentences(cfg: DlrmRun, prediction: Prediction, *, counted: bool) -> list[str]:
    lookups = (
        "as often as preparation counted them"
        if counted
        else "by a power law"
        if cfg.synthetic_ids == "planted" and cfg.data == SYNTHETIC
        else "all equally often, because no counts are known (give --data)"
    )
    lines = [
        f"Placement: {cfg.sharding.placement}. Rows of a table are taken to be used {lookups}."
    ]
    if cfg.sharding.engine == "torchrec" and cfg.sharding.placement == "auto":
        lines.append("TorchRec's own planner will place the tables; this is what ours would do.")
    if prediction.step_s is None:
        lines.append(f"No time is predicted: {prediction.unknown}.")
    else:
        lines.append(
            f"Predicted, not measured: {1e3 * prediction.step_s:.2f} ms for {prediction.batch:,} "
            f"samples, {human(prediction.samples_per_s)} samples/s (the formulas: "
            "docs/parallelism.md)."
        )
    return lines


def _write(path: Path, text: str) -> None:
    if path.is_dir():
        raise InputError(f"--json {path} is a folder; give a file to write.")
    try:
        write_atomically(path, text)
    except OSError as error:
        raise InputError(f"--json {path} cannot be written: {error.strerror}.") from None


def _check_fits(cfg: DlrmRun, cluster: Cluster, prediction: Prediction) -> None:
    from trainmark.workloads.dlrm import sharding as placing

    card = card_bytes(cluster)
    fullest = max(range(cluster.world), key=lambda d: prediction.memory[d].total)
    needed = prediction.memory[fullest].total
    if card is None or needed <= card:
        return
    costs = placing.table_costs(cfg, cluster.world)
    raise InputError(
        f"Device {fullest} needs {needed / GIB:.1f} GiB of {card / GIB:.1f}. "
        + placing.what_would_fit(cfg, costs)
    )


# --- cells


def _console() -> Console:
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDE)
    return console


def _table(title: str) -> Table:
    return Table(box=None, header_style="bold", title=title, title_justify="left", min_width=80)


def _gib(count: int) -> str:
    return f"{count / GIB:.2f}" if count >= GIB / 200 or not count else "<0.01"


def _total(memory: MemoryPlan, cluster: Cluster) -> str:
    card = card_bytes(cluster)
    total = f"{memory.total / GIB:.2f}"
    return total if card is None else f"{total}/{card / GIB:.0f}"


def _equal(rows: list[list[str]]) -> Iterable[tuple[list[int], list[str]]]:
    """Rows that read the same, with the devices that they are for."""
    found: dict[tuple[str, ...], list[int]] = {}
    for device, row in enumerate(rows):
        found.setdefault(tuple(row), []).append(device)
    return [(devices, list(row)) for row, devices in found.items()]


def _ranges(numbers: Sequence[int]) -> str:
    """0-3, 7"""
    groups = itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in group] for _, group in groups]
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
