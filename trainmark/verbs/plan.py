"""`trainmark plan`: memory and predicted time per device, and where each table lies."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.table import Table

from trainmark import metrics, workloads
from trainmark.config import Run, or_synthetic
from trainmark.errors import InputError
from trainmark.files import write_atomically
from trainmark.formatting import GIB, gib_cell, human, ranges
from trainmark.hardware import backends
from trainmark.hardware.devices import Cluster, Peak
from trainmark.hardware.machine import peak_of
from trainmark.hardware.memory import MEMORY_PARTS, MemoryPlan, card_bytes, misfit
from trainmark.hardware.plans import Plan, Work
from trainmark.progress import SafeConsole

MIN_WIDTH = 140
"""Columns of the widest table: what a file or another program gets, whatever the screen."""
LONG_STEP_S = 10.0
"""Steps at least this long are shown in seconds."""
SHORT_STEP_S = 5e-3
"""Below this, a host may take longer to start the kernels of a step than a device to run them."""
TOO_SHORT = (
    "A step this short waits for the host to start its kernels, which these formulas do not count: "
    "it will take longer."
)
RIGHT_ALIGNED = ("table", "rows", "GiB, fp32")


def plan(cfg: Run, cluster: Cluster, json_file: Path | None) -> None:
    """Print the plan of a run for a cluster; a run that does not fit is an `InputError`."""
    found = make_plan(cfg, cluster)
    if json_file and found.placement is None:
        raise InputError(f"--json writes where tables lie, and {cfg.name} has no tables.")
    console = wide_console()
    console.print(_devices_table(cfg.name, cluster, found))
    if found.tables:
        console.print("", _tables_table(found.tables), "", sep="\n")
    lines = [*found.sentences, *_prediction(cfg, cluster, found), backends.sentence(cfg.device)]
    for line in filter(None, lines):
        console.say(line)
    if json_file:
        _write(json_file, found.placement or "")
        console.say(f"{json_file}: edit it and give it as --placement.")
    if found.too_large:
        raise InputError(found.too_large)


def make_plan(cfg: Run, cluster: Cluster) -> Plan:
    """The workload's own plan; of one that has none, the memory of its model."""
    workload = workloads.definition(cfg)
    if workload.plan is not None:
        return workload.plan(workloads.resolve(or_synthetic(cfg), cluster), cluster)
    from trainmark.run import memory  # loads torch

    _, needed = memory.dry_run(cfg, cluster)
    return Plan(
        memory=[needed],
        no_time=f"{cfg.workload} has no prediction of times",
        too_large=misfit(cfg.name, needed, cluster, partial(memory.advice, cfg, cluster)),
    )


# --- sentences below the tables


def _prediction(cfg: Run, cluster: Cluster, found: Plan) -> list[str]:
    step_s, work = found.step_s, found.work
    if step_s is None or work is None:
        return [f"No time is predicted: {found.no_time or 'it is not said what a step does'}."]
    unit, scale = unit_of(step_s)
    interval = " to ".join(f"{scale * bound:,.2f}" for bound in found.interval_s or ())
    between = f" ({interval})" if interval else ""
    rate = work.amount / step_s
    together = f", {human(rate)} together" if cluster.world > 1 else ""
    too_short = [TOO_SHORT] if step_s < SHORT_STEP_S and "starts" not in found.parts else []
    return [
        f"Predicted, not measured: {scale * step_s:,.2f} {unit}{between} for "
        f"{work.amount:,} {work.unit}: {human(rate / cluster.world)} {work.unit}/s and "
        f"device{together}; {_mfu(cfg, cluster, work, step_s)}. Bound by {found.bound_by}.",
        *too_short,
        f"Taken from: {'; '.join(found.sources)}. The formulas: docs/predictions.md.",
    ]


def _mfu(cfg: Run, cluster: Cluster, work: Work, step_s: float) -> str:
    """An fp8 run does part of its arithmetic in bf16, and has two peaks."""
    names = {"fp8": ("fp8", "bf16")}.get(cfg.precision, (cfg.precision,))
    peaks = [peak_of(cluster, name) for name in names]
    shares = [
        100 * metrics.mfu(work.flops, step_s, cluster.world, peak.flops)
        for peak in peaks
        if isinstance(peak, Peak)
    ]
    told = "–".join(f"{share:.1f}" for share in shares)
    return f"MFU {told} % ({work.convention})" if told else "no MFU (no peak is known)"


def unit_of(step_s: float) -> tuple[str, float]:
    """What times of such a step are written in, and how many of it a second has."""
    return ("s", 1) if step_s >= LONG_STEP_S else ("ms", 1e3)


# --- the tables


def _devices_table(name: str, cluster: Cluster, found: Plan) -> Table:
    on_host = any(found.host_bytes)
    times = list(found.seconds[0]) if found.seconds else []
    unit, scale = unit_of(found.step_s or 0)
    what = f"GiB and predicted {unit} of a step" if times else "GiB, activations estimated"
    headers = [*MEMORY_PARTS, "total", *(["host"] if on_host else []), *times]
    rows = [
        [
            *(gib_cell(getattr(memory, part)) for part in MEMORY_PARTS),
            _total(memory, cluster),
            *([gib_cell(found.host_bytes[device])] if on_host else []),
            *(f"{scale * found.seconds[device][part]:.2f}" for part in times),
        ]
        for device, memory in enumerate(found.memory)
    ]
    table = empty_table(f"{name} on {cluster}, per device: {what}")
    if len(found.memory) > 1 or times:
        table.add_column("device", overflow="fold")
    for header in headers:
        table.add_column(header, justify="right", overflow="fold")
    for alike, row in _equal(rows):
        if len(rows) == 1:  # they are all alike
            alike = list(range(cluster.world))
        table.add_row(*([ranges(alike)] if len(table.columns) > len(headers) else []), *row)
    return table


def _tables_table(rows: Sequence[Mapping[str, str]]) -> Table:
    table = empty_table("tables")
    for header in rows[0]:
        table.add_column(header, justify="right" if header in RIGHT_ALIGNED else "left")
    for row in rows:
        table.add_row(*row.values())
    return table


def _total(memory: MemoryPlan, cluster: Cluster) -> str:
    card = card_bytes(cluster)
    total = f"{memory.total / GIB:.2f}"
    return total if card is None else f"{total}/{card / GIB:.0f}"


def _equal(rows: list[list[str]]) -> list[tuple[list[int], list[str]]]:
    """Rows that read the same, with the devices that they are for."""
    found: dict[tuple[str, ...], list[int]] = {}
    for device, row in enumerate(rows):
        found.setdefault(tuple(row), []).append(device)
    return [(alike, list(row)) for row, alike in found.items()]


def wide_console() -> SafeConsole:
    console = SafeConsole()
    if not console.is_terminal:
        console.width = max(console.width, MIN_WIDTH)
    return console


def empty_table(title: str) -> Table:
    return Table(box=None, header_style="bold", title=title, title_justify="left", min_width=80)


def _write(path: Path, text: str) -> None:
    if path.is_dir():
        raise InputError(f"--json {path} is a folder; give a file to write.")
    try:
        write_atomically(path, text)
    except OSError as error:
        raise InputError(f"--json {path} cannot be written: {error.strerror}.") from None
