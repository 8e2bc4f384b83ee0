"""`trainmark sweep`: one run (or dry run) per value of a field; an out-of-memory is a row.

Each value is a process of its own, in a folder of its own: what one leaves behind, no other sees,
and a sweep that was stopped goes on where it was.
"""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainmark import result
from trainmark.config import SYNTHETIC, Run
from trainmark.errors import InputError
from trainmark.files import write_atomically
from trainmark.hardware import GIB, Cluster
from trainmark.planner.memory import card_bytes
from trainmark.report.tables import NOT_APPLICABLE, Grid, grid_table, result_grid

FILE_NAME = "sweep.json"
DONE, OUT_OF_MEMORY, FAILED = "done", "OOM", "failed"
PARTS = ("weights", "gradients", "optimizer", "activations")
_SIGNS = ("Out of memory", "does not fit", "OutOfMemoryError")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What to vary, and how to run each value."""

    run: str
    field: str
    values: list[str]
    flags: list[str]
    """Flags of `train` that all values share."""
    output: Path
    devices: int = 1


def parse_over(text: str) -> tuple[str, list[str]]:
    """`FIELD=V1,V2,...`"""
    field, equals, values = text.partition("=")
    parts = [value.strip() for value in values.split(",") if value.strip()]
    if not equals or not field.strip() or not parts:
        raise InputError(
            "--over must be FIELD=V1,V2,..., such as global_batch=1024,2048. "
            f"Received: {text or 'nothing'}."
        )
    return field.strip().replace("_", "-"), list(dict.fromkeys(parts))


def sweep(plan: Sweep) -> RenderableType:
    """Run every value that has no outcome yet; the table of all of them."""
    if plan.devices < 1:
        raise InputError(f"devices must be at least 1. Received: {plan.devices}.")
    known = _read(plan)
    for value in plan.values:
        if value not in known:
            known[value] = _run_one(plan, value)
            _write(plan, known)
    return _table(plan, known)


def _folder(plan: Sweep, value: str) -> Path:
    return plan.output / f"{plan.field}={value}".replace("/", "_")


def _run_one(plan: Sweep, value: str) -> str:
    """`done`, `OOM`, or why the run failed."""
    Console(stderr=True).print(f"{plan.run} with {plan.field} {value}", highlight=False)
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={plan.devices}"]
        if plan.devices > 1
        else []
    )
    train = ["-m", "trainmark", "train", plan.run, f"--{plan.field}", value, *plan.flags]
    command = [sys.executable, *launcher, *train, "--output", str(_folder(plan, value))]
    ended = _start(command)
    if ended.returncode == 0:
        return DONE
    if ended.returncode in (130, 143):
        raise KeyboardInterrupt
    if any(sign in ended.stderr for sign in _SIGNS):
        return OUT_OF_MEMORY
    sentences = [line for line in ended.stderr.splitlines() if line.startswith("trainmark: ")]
    if sentences:
        return sentences[-1].removeprefix("trainmark: ")
    # A launcher's last words are not the cause: keep all of them.
    log = plan.output / f"{_folder(plan, value).name}.stderr"
    plan.output.mkdir(parents=True, exist_ok=True)
    log.write_text(ended.stderr, encoding="utf-8")
    return f"ended with exit code {ended.returncode}, see {log}"


def _start(command: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


# --- what is known already


def _identity(plan: Sweep) -> dict[str, object]:
    return {"run": plan.run, "field": plan.field, "flags": plan.flags, "devices": plan.devices}


def _read(plan: Sweep) -> dict[str, str]:
    path = plan.output / FILE_NAME
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        outcomes = dict(data["outcomes"])
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path} is damaged; remove it to sweep again.") from None
    if data["sweep"] != _identity(plan):
        raise InputError(f"{plan.output} holds another sweep. Give another --output.")
    # What failed for another reason than memory is worth another try.
    return {value: found for value, found in outcomes.items() if found in (DONE, OUT_OF_MEMORY)}


def _write(plan: Sweep, outcomes: dict[str, str]) -> None:
    plan.output.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"sweep": _identity(plan), "outcomes": outcomes}, indent=2)
    write_atomically(plan.output / FILE_NAME, text + "\n")


# --- the table


def _table(plan: Sweep, outcomes: dict[str, str]) -> RenderableType:
    """A row for every value, and below them why some failed."""
    done = [value for value in plan.values if outcomes[value] == DONE]
    grid = result_grid([result.read(_folder(plan, value)) for value in done])
    rows = dict(zip(done, grid.rows, strict=True))
    table = Grid(
        headers=[plan.field, "outcome", *grid.headers],
        rows=[
            [value, _outcome(outcomes[value]), *(rows.get(value) or _missing(grid))]
            for value in plan.values
        ],
        numeric=[False, False, *grid.numeric],
    )
    reasons = [
        f"{plan.field} {value}: {outcomes[value]}"
        for value in plan.values
        if _outcome(outcomes[value]) == FAILED
    ]
    return Group(grid_table(table, f"{plan.run} over {plan.field}"), *map(Text, reasons))


def _outcome(reason: str) -> str:
    return reason if reason in (DONE, OUT_OF_MEMORY) else FAILED


def _missing(grid: Grid) -> list[str]:
    return [NOT_APPLICABLE] * len(grid.headers)


# --- without running


def dry_runs(runs: Mapping[str, Run], field: str, cluster: str) -> RenderableType:
    """Bytes per device for every value; more than the device has is marked OOM."""
    parsed = Cluster.parse(cluster)
    table = Table(title=f"{cluster}: GiB per device, activations estimated")
    table.add_column(field, no_wrap=True)
    for header in (*PARTS, "mem"):
        table.add_column(header, justify="right")
    reasons = []
    for value, run in runs.items():
        try:
            cells = _dry_cells(run, parsed)
        except InputError as error:
            cells = [NOT_APPLICABLE] * (len(PARTS) + 1)
            reasons.append(f"{field} {value}: {error}")
        table.add_row(value, *cells)
    return Group(table, *map(Text, reasons))


def _dry_cells(run: Run, cluster: Cluster) -> list[str]:
    from trainmark import runner

    synthetic = dataclasses.replace(run, data=run.data or SYNTHETIC, device="cpu")
    _, plan = runner.dry_run(synthetic, cluster)
    total = f"{plan.total / GIB:.1f}"
    card = card_bytes(cluster)
    if card is not None:
        total = f"{total}/{card // GIB}" + ("" if plan.total <= card else f" {OUT_OF_MEMORY}")
    return [*(f"{getattr(plan, part) / GIB:.1f}" for part in PARTS), total]
