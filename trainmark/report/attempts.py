"""Tables of several runs of which some have failed, or of which none has been started yet."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainmark.attempt import OUT_OF_MEMORY
from trainmark.config import SYNTHETIC, Run
from trainmark.errors import InputError
from trainmark.hardware import GIB, Cluster
from trainmark.planner.memory import card_bytes
from trainmark.report.tables import NOT_APPLICABLE, Grid, grid_table, result_grid
from trainmark.result import Result

PARTS = ("weights", "gradients", "optimizer", "activations")


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A row of the table."""

    label: str
    outcome: str
    """A word."""
    result: Result | None = None
    reason: str | None = None
    """Told below the table."""


def attempts_table(header: str, attempts: Sequence[Attempt], title: str) -> RenderableType:
    """A row for every attempt in the published form, and below them why some have no result."""
    grid = result_grid([one.result for one in attempts if one.result])
    results = iter(grid.rows)
    missing = [NOT_APPLICABLE] * len(grid.headers)
    table = Grid(
        headers=[header, "outcome", *grid.headers],
        rows=[
            [one.label, one.outcome, *(next(results) if one.result else missing)]
            for one in attempts
        ],
        numeric=[False, False, *grid.numeric],
    )
    reasons = [Text(f"{header} {one.label}: {one.reason}") for one in attempts if one.reason]
    return Group(grid_table(table, title), *reasons)


# --- before anything is started


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A row of the table."""

    cells: list[str]
    """In front of the bytes; the first is the label."""
    run: Run
    cluster: Cluster
    device_bytes: int | None = None
    """Memory of one device, where it is known otherwise than by the name of the hardware."""
    remark: str | None = None
    """Told below the table."""


def plans_table(headers: Sequence[str], plans: Sequence[Plan], title: str) -> RenderableType:
    """GiB per device of every run; more than the device has is marked OOM."""
    table = Table(title=title)
    for header in headers:
        table.add_column(header, no_wrap=True)
    for header in (*PARTS, "mem"):
        table.add_column(header, justify="right")
    remarks = []
    for plan in plans:
        label = f"{headers[0]} {plan.cells[0]}"
        try:
            cells = _bytes_cells(plan)
        except InputError as error:
            cells = [NOT_APPLICABLE] * (len(PARTS) + 1)
            remarks.append(f"{label}: {error}")
        table.add_row(*plan.cells, *cells)
        if plan.remark:
            remarks.append(f"{label}: {plan.remark}")
    return Group(table, *map(Text, remarks))


def _bytes_cells(plan: Plan) -> list[str]:
    from trainmark import runner

    synthetic = dataclasses.replace(plan.run, data=plan.run.data or SYNTHETIC, device="cpu")
    _, needed = runner.dry_run(synthetic, plan.cluster)
    total = f"{needed.total / GIB:.1f}"
    card = plan.device_bytes or card_bytes(plan.cluster)
    if card is not None:
        total = f"{total}/{card // GIB}" + ("" if needed.total <= card else f" {OUT_OF_MEMORY}")
    return [*(f"{getattr(needed, part) / GIB:.1f}" for part in PARTS), total]
