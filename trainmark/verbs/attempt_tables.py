"""Tables of several runs: some have failed, or none has been started yet."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.text import Text

from trainmark.config import Run
from trainmark.errors import InputError
from trainmark.formatting import GIB
from trainmark.hardware.devices import Cluster
from trainmark.hardware.memory import MEMORY_PARTS, card_bytes
from trainmark.report.tables import NOT_APPLICABLE, Grid, grid_table, result_grid
from trainmark.run.result import Result
from trainmark.verbs.attempt import OUT_OF_MEMORY


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A row of the table."""

    label: str
    outcome: str
    """A word."""
    result: Result | None = None
    known: dict[str, str] = field(default_factory=dict)
    """Cells of a row without a result, by their headers."""
    reason: str | None = None
    """A sentence below the table."""


def attempts_table(header: str, attempts: Sequence[Attempt], title: str) -> RenderableType:
    """A row for every attempt in the published form, and below them why some have no result."""
    grid = result_grid([one.result for one in attempts if one.result])
    results = iter(grid.rows)
    rows = []
    for one in attempts:
        known = [one.known.get(name, NOT_APPLICABLE) for name in grid.headers]
        rows.append([one.label, one.outcome, *(next(results) if one.result else known)])
    table = Grid(
        headers=[header, "outcome", *grid.headers],
        rows=rows,
        numeric=[False, False, *grid.numeric],
    )
    return Group(grid_table(table, title), *(Text(one.reason) for one in attempts if one.reason))


# --- before anything is started


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A row of the table."""

    name: str
    """What the remarks below the table call it."""
    cells: list[str]
    """Cells before those with bytes."""
    run: Run
    cluster: Cluster
    device_bytes: int | None = None
    """Memory of one device, where it is known otherwise than by the name of the hardware."""
    remark: str | None = None
    """A sentence below the table."""


def plans_table(
    headers: Sequence[str],
    plans: Sequence[PlannedRun],
    title: str,
    parts: Sequence[str] = MEMORY_PARTS,
) -> RenderableType:
    """GiB per device of every run; more than the device has is marked OOM."""
    rows, remarks = [], []
    for plan in plans:
        try:
            cells = _bytes_cells(plan, parts)
        except InputError as error:
            cells = [NOT_APPLICABLE] * (len(parts) + 1)
            remarks.append(f"{plan.name}: {error}")
        rows.append([*plan.cells, *cells])
        if plan.remark:
            remarks.append(f"{plan.name}: {plan.remark}")
    table = Grid(
        headers=[*headers, *parts, "mem"],
        rows=rows,
        numeric=[*(False for _ in headers), *(True for _ in parts), True],
    )
    return Group(grid_table(table, title), *map(Text, remarks))


def _bytes_cells(plan: PlannedRun, parts: Sequence[str]) -> list[str]:
    from trainmark.run import memory  # loads torch

    _, needed = memory.dry_run(plan.run, plan.cluster)
    total = f"{needed.total / GIB:.1f}"
    card = plan.device_bytes or card_bytes(plan.cluster)
    if card is not None:
        total = f"{total}/{card // GIB}" + ("" if needed.total <= card else f" {OUT_OF_MEMORY}")
    return [*(f"{getattr(needed, part) / GIB:.1f}" for part in parts), total]
