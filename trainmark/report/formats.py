"""Tables for a terminal, and as Markdown, CSV and JSON; `html.tables_page` has the HTML."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainmark.progress import SafeConsole
from trainmark.report.charts import Bar
from trainmark.report.tables import NOT_APPLICABLE, Grid, grid_table, metrics_table

FEW = 4
WIDEST = 200


@dataclass(frozen=True)
class Titled:
    """A table and what must be said beside it."""

    title: str
    grid: Grid
    notes: tuple[str, ...] = ()
    ours: int = 0
    """How many rows at the top are ours, for a page to mark."""
    bars: tuple[Bar, ...] = ()
    """The table as a chart, for a page."""


def terminal(tables: Sequence[Titled], width: int) -> RenderableType:
    """Tables for a terminal of this width. Long tables may be wider: a broken line is better than
    a broken number."""
    parts: list[RenderableType] = []
    for one in tables:
        # Rows that became columns are only readable where they are few.
        few = len(one.grid.rows) <= FEW
        table = grid_table(one.grid, one.title) if few else _whole(one, width)
        parts += [table, *map(Text, one.notes), Text("")]
    return Group(*parts[:-1])


def _whole(one: Titled, width: int) -> Table:
    table = metrics_table(one.grid, one.title)
    needed = SafeConsole(width=WIDEST).measure(table).maximum
    table.width = needed if needed > width else None
    return table


def markdown(tables: Sequence[Titled]) -> str:
    """Headings, tables and notes, as a README has them."""
    return "\n\n".join(part for one in tables for part in _markdown_parts(one)) + "\n"


def _markdown_parts(one: Titled) -> list[str]:
    rule = ["---:" if numeric else "---" for numeric in one.grid.numeric]
    rows = [_markdown_row(row) for row in (one.grid.headers, rule, *one.grid.rows)]
    return [f"## {one.title}", "\n".join(rows), *one.notes]


def _markdown_row(cells: Sequence[str]) -> str:
    escaped = (cell.replace("|", r"\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def comma_separated(tables: Sequence[Titled]) -> str:
    """Each table below a line `# title`, with an empty line between two."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for index, one in enumerate(tables):
        text.write("\n" if index else "")
        text.write(f"# {one.title}\n")
        writer.writerow(one.grid.headers)
        for row in one.grid.rows:
            writer.writerow("" if cell == NOT_APPLICABLE else cell for cell in row)
    return text.getvalue()


def as_json(tables: Sequence[Titled]) -> str:
    """A list of tables; a cell that is a number is one, and what does not apply is null."""
    plain = [
        {
            "title": one.title,
            "rows": [
                dict(zip(one.grid.headers, map(_value, row), strict=True)) for row in one.grid.rows
            ],
            "notes": list(one.notes),
        }
        for one in tables
    ]
    return json.dumps(plain, indent=1, ensure_ascii=False) + "\n"


def _value(cell: str) -> Any:
    if cell == NOT_APPLICABLE:
        return None
    try:
        number = float(cell)
    except ValueError:
        return cell
    return int(cell) if cell.lstrip("-").isdecimal() else number


WRITERS = {"markdown": markdown, "csv": comma_separated, "json": as_json}
"""Formats that are plain text -> what writes them."""
