"""The result table in the form in which results are published, for terminals and Markdown.

A cell is `/` where a column does not apply; quality is `value/target`, memory `used/total` in GiB.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table

from trainmark import formatting
from trainmark.formatting import GIB
from trainmark.inference.figures import Row as InferenceRow
from trainmark.report.published import Row
from trainmark.run.result import Mfu, Result

NOT_APPLICABLE = "/"

Cells = list[str]


@dataclass(frozen=True)
class Grid:
    """A table as text: what every output format starts from."""

    headers: list[str]
    rows: list[Cells]
    numeric: list[bool]
    """Which columns are aligned to the right."""


@dataclass(frozen=True)
class Column:
    """A header, and the text of its cell in a row."""

    header: str
    cell: Callable[[Any], str]
    optional: bool = False
    """Left out where no row has a value."""
    numeric: bool = True


def result_grid(results: Sequence[Result]) -> Grid:
    """Our own results, one row each."""
    return make_grid(_RESULT_COLUMNS, results)


def published_grid(rows: Sequence[Row]) -> Grid:
    """Published results in the same columns."""
    # The case names the hardware already, unless two machines of the same case differ.
    distinct = len({(row.case, row.hardware) for row in rows}) > len({row.case for row in rows})
    return make_grid(PUBLISHED_COLUMNS if distinct else PUBLISHED_COLUMNS[1:], rows)


def published_row(result: Result, note: str) -> Row:
    """A result of our own as a row of a published table."""
    first = result.mfu[0] if result.mfu else None
    degrees = parallel(result.parallel)
    validation = result.final_metrics().get("validation", {})
    return Row(
        run=result.run,
        system="trainmark",
        hardware=device_name(result.hardware, result.case),
        case=result.case,
        note=note,
        precision=result.precision,
        parallel=None if degrees == NOT_APPLICABLE else degrees,
        fix_hp=None if result.division == "closed" else fix_hp(result),
        global_batch=result.config.get("global_batch"),
        e2e_time_s=result.time_s.e2e,
        p_whole=result.throughput.p_whole,
        p_train=result.throughput.p_train,
        p_core=result.throughput.p_core,
        metric=result.quality.metric,
        quality=result.quality.value,
        validation=validation.get(result.quality.metric),
        target=result.quality.target,
        tokens_per_device_s=result.tokens_per_device_s,
        aligned=result.aligned.passed if result.aligned else None,
        mfu=_mfu_values(first) if first else None,
        mem_gib=result.memory.peak_bytes / GIB,
        mem_total_gib=result.memory.total_bytes / GIB,
    )


def device_name(hardware: dict[str, Any], case: str) -> str:
    """What a run was on, as the machine called it."""
    return hardware.get("accelerator") or hardware.get("cpu") or case


def _mfu_values(found: Mfu) -> list[float]:
    if found.low is None or found.high is None:
        return [found.value]
    return [found.low, found.high]


def inference_grid(rows: Sequence[InferenceRow]) -> Grid:
    """Latency and throughput, one row per batch size, with columns for what else differs."""
    differing = [kind for kind in _INFERENCE_KINDS if len(set(map(kind.cell, rows))) > 1]
    return make_grid([*differing, *_INFERENCE_COLUMNS], rows)


@dataclass(frozen=True)
class _Terminal:
    """One row a result; where the terminal is too narrow for that, one column a result."""

    grid: Grid
    title: str | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        across = self._across()
        # Measured on a terminal without limits, because a measure never exceeds the terminal.
        width = Measurement.get(console, options.update(max_width=10_000), across).maximum
        yield across if width <= options.max_width else self._down()

    def _across(self) -> Table:
        return with_cells(Table(title=self.title), self.grid, no_wrap=True)

    def _down(self) -> Table:
        table = Table(title=self.title, show_header=False)
        table.add_column(style="bold", no_wrap=True)
        for _ in self.grid.rows:
            table.add_column(justify="right", overflow="fold")
        for index, header in enumerate(self.grid.headers):
            table.add_row(header, *(row[index] for row in self.grid.rows))
        return table


def with_cells(table: Table, grid: Grid, **of_columns: Any) -> Table:
    """The table with the columns and rows of a grid."""
    for header, numeric in zip(grid.headers, grid.numeric, strict=True):
        table.add_column(header, justify="right" if numeric else "left", **of_columns)
    for row in grid.rows:
        table.add_row(*row)
    return table


def grid_table(grid: Grid, title: str | None = None) -> RenderableType:
    """A table for a terminal of any width."""
    return _Terminal(grid, title)


def metrics_table(grid: Grid, title: str | None = None) -> Table:
    """One row a metric or column, never turned round: without lines, to fit a narrow terminal."""
    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    return with_cells(table, grid, overflow="fold")


def make_grid(columns: Sequence[Column], rows: Sequence[Any]) -> Grid:
    """The columns of some rows."""
    cells = {column.header: [column.cell(row) for row in rows] for column in columns}
    shown = [
        column
        for column in columns
        if not column.optional or set(cells[column.header]) - {NOT_APPLICABLE}
    ]
    return Grid(
        headers=[column.header for column in shown],
        rows=[[cells[column.header][i] for column in shown] for i in range(len(rows))],
        numeric=[column.numeric for column in shown],
    )


# --- cells


def seconds(value: float | None) -> str:
    return _number(value, whole_from=1000)


def throughput(value: float | None) -> str:
    return _number(value, whole_from=10_000)


def joules(value: float | None) -> str:
    return NOT_APPLICABLE if value is None else formatting.joules(value)


def milliseconds(value: float) -> str:
    """A microsecond is worth telling below 10 ms."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _number(value: float | None, whole_from: float) -> str:
    """One decimal while it says something, none above `whole_from`."""
    if value is None:
        return NOT_APPLICABLE
    if not math.isfinite(value):
        return "nan"
    return f"{value:.0f}" if abs(value) >= whole_from else f"{value:.1f}"


def quality(value: float | None, target: float | None) -> str:
    """Both to the fourth decimal; a published target, such as 0.802, as it was published."""
    if value is None:
        return NOT_APPLICABLE
    return f"{value:.4f}" if target is None else f"{value:.4f}/{round(target, 4):g}"


def memory(used_gib: float | None, total_gib: float | None) -> str:
    if used_gib is None:
        return NOT_APPLICABLE
    return f"{used_gib:.1f}" if total_gib is None else f"{used_gib:.1f}/{total_gib:.1f}"


def mfu(low: float | None, high: float | None = None) -> str:
    if low is None:
        return NOT_APPLICABLE
    return f"{low:.1%}" if high is None or high == low else f"{low * 100:.1f}–{high:.1%}"


def mfu_cell(values: Sequence[Mfu]) -> str:
    """The first convention; a range where the peak is a matter of view."""
    if not values:
        return NOT_APPLICABLE
    first = values[0]
    return mfu(first.value) if first.low is None else mfu(first.low, first.high)


def fix_hp(result: Result) -> str:
    """The fields that make a result `open`, with their values."""
    if result.division != "open":
        return NOT_APPLICABLE
    return ", ".join(_assignment(name, result.config) for name in result.changed) or "open"


def _assignment(name: str, config: dict[str, Any]) -> str:
    value: Any = config
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return name
        value = value[part]
    return f"{name}={value}"


def parallel(facts: dict[str, int | dict[str, float]]) -> str:
    """The degrees as the published tables write them: PP2DP4TP1."""
    axes = {axis: size for axis, size in facts.items() if isinstance(size, int)}
    if all(size == 1 for size in axes.values()):
        return NOT_APPLICABLE
    return "".join(f"{axis.upper()}{size}" for axis, size in axes.items())


def sent(facts: dict[str, int | dict[str, float]]) -> str:
    """Megabytes that a device sends to others in a step."""
    by_kind = facts.get("sent_bytes_per_step")
    return f"{sum(by_kind.values()) / 1e6:.3g}" if isinstance(by_kind, dict) else NOT_APPLICABLE


def units(result: Result) -> str:
    """What a table of results is in, beside which the numbers have no units."""
    told = result.quality
    return (
        f"e2e_time in seconds, mem in GiB, throughputs in {result.throughput.unit}; quality is the "
        f"{told.metric} on {told.split}."
    )


def yes_no(value: bool | None) -> str:
    return NOT_APPLICABLE if value is None else "yes" if value else "no"


def or_slash(value: object, form: str = "") -> str:
    """A value, written in Python's `form` of numbers."""
    return NOT_APPLICABLE if value is None else format(value, form)


_RESULT_COLUMNS = (
    Column("run", lambda r: r.run, numeric=False),
    Column("case", lambda r: r.case, numeric=False),
    Column("precision", lambda r: r.precision, numeric=False),
    Column("parallel", lambda r: parallel(r.parallel), optional=True, numeric=False),
    Column("sent MB/step", lambda r: sent(r.parallel), optional=True),
    Column("fix_hp", fix_hp, numeric=False),
    Column("e2e_time", lambda r: seconds(r.time_s.e2e)),
    Column("p_whole", lambda r: throughput(r.throughput.p_whole)),
    Column("p_train", lambda r: throughput(r.throughput.p_train)),
    Column("p_core", lambda r: throughput(r.throughput.p_core)),
    Column("tokens/device/s", lambda r: throughput(r.tokens_per_device_s), optional=True),
    Column("quality", lambda r: quality(r.quality.value, r.quality.target)),
    Column(
        "aligned", lambda r: yes_no(r.aligned and r.aligned.passed), optional=True, numeric=False
    ),
    Column("mem", lambda r: memory(r.memory.peak_bytes / GIB, r.memory.total_bytes / GIB)),
    Column("MFU", lambda r: mfu_cell(r.mfu), optional=True),
    Column("J/sample", lambda r: joules(r.joules_per_sample), optional=True),
)

_INFERENCE_KINDS = (
    Column("precision", lambda r: or_slash(r.precision), numeric=False),
    Column("tables", lambda r: or_slash(r.tables_precision), numeric=False),
    Column("clients", lambda r: f"{r.clients:,}"),
)
_INFERENCE_COLUMNS = (
    Column("batch", lambda r: f"{r.batch:,}"),
    Column("mean ms", lambda r: milliseconds(r.mean_ms)),
    Column("median ms", lambda r: milliseconds(r.median_ms)),
    Column("p90 ms", lambda r: milliseconds(r.p90_ms)),
    Column("p95 ms", lambda r: milliseconds(r.p95_ms)),
    Column("p99 ms", lambda r: milliseconds(r.p99_ms)),
    Column("samples/s", lambda r: throughput(r.samples_per_s)),
)

PUBLISHED_COLUMNS = (
    Column("hardware", lambda r: r.hardware, numeric=False),
    Column("case", lambda r: r.case, numeric=False),
    Column("note", lambda r: or_slash(r.note), optional=True, numeric=False),
    Column("precision", lambda r: or_slash(r.precision), numeric=False),
    Column("parallel", lambda r: or_slash(r.parallel), optional=True, numeric=False),
    Column("fix_hp", lambda r: or_slash(r.fix_hp), optional=True, numeric=False),
    Column("global batch", lambda r: or_slash(r.global_batch), optional=True),
    Column("e2e_time", lambda r: seconds(r.e2e_time_s), optional=True),
    Column("p_whole", lambda r: throughput(r.p_whole), optional=True),
    Column("p_train", lambda r: throughput(r.p_train), optional=True),
    Column("p_core", lambda r: throughput(r.p_core), optional=True),
    Column("tokens/device/s", lambda r: throughput(r.tokens_per_device_s), optional=True),
    Column("quality", lambda r: quality(r.quality, r.target), optional=True),
    Column("validation", lambda r: quality(r.validation, None), optional=True),
    Column("aligned", lambda r: yes_no(r.aligned), optional=True, numeric=False),
    Column("mem", lambda r: memory(r.mem_gib, r.mem_total_gib), optional=True),
    Column("MFU", lambda r: mfu(*r.mfu) if r.mfu else NOT_APPLICABLE, optional=True),
)
