"""Two results side by side: ratios, and whether the ratios mean anything."""

from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainmark.formatting import GIB
from trainmark.report import tables
from trainmark.report.fields import different_fields
from trainmark.run.result import Result


@dataclass(frozen=True)
class _Line:
    name: str
    value: Callable[[Result], float | None]
    text: Callable[[float | None], str]


_LINES = (
    _Line("e2e_time (s)", lambda r: r.time_s.e2e, tables.seconds),
    _Line("p_whole", lambda r: r.throughput.p_whole, tables.throughput),
    _Line("p_train", lambda r: r.throughput.p_train, tables.throughput),
    _Line("p_core", lambda r: r.throughput.p_core, tables.throughput),
    _Line("tokens/device/s", lambda r: r.tokens_per_device_s, tables.throughput),
    _Line("MFU", lambda r: r.mfu[0].value if r.mfu else None, tables.mfu),
    _Line("joules/sample", lambda r: r.joules_per_sample, tables.joules),
    _Line("mem (GiB)", lambda r: r.memory.peak_bytes / GIB, lambda v: tables.memory(v, None)),
)


def compare(a: Result, b: Result, names: tuple[str, str] = ("A", "B")) -> RenderableType:
    """Two results for a terminal: whether they compare, the figures, the fields that differ."""
    parts: list[RenderableType] = []
    obstacle = not_comparable(a, b)
    if obstacle:
        parts.append(Text(obstacle, style="bold yellow"))
    parts.append(_figures(a, b, names))
    differences = different_fields([a, b])
    if differences:
        parts.append(_differences(differences, names))
    else:
        parts.append(Text("The configurations are the same."))
    return Group(*parts)


def not_comparable(a: Result, b: Result) -> str | None:
    """Why the figures of two results must not be set against each other; None if they may."""
    reasons = [
        f"{what} ({of_a} and {of_b})"
        for what, of_a, of_b in (
            ("workloads", a.workload, b.workload),
            ("divisions", a.division, b.division),
            ("units", a.throughput.unit, b.throughput.unit),
            ("quality metrics", a.quality.metric, b.quality.metric),
        )
        if of_a != of_b
    ]
    if not reasons:
        return None
    return f"These results are not comparable: different {', '.join(reasons)}."


def _figures(a: Result, b: Result, names: tuple[str, str]) -> Table:
    table = Table()
    table.add_column("")
    for header in (*names, "B/A"):
        table.add_column(header, justify="right", overflow="fold")
    for name, of in (
        ("run", lambda r: r.run),
        ("case", lambda r: r.case),
        ("precision", lambda r: r.precision),
        ("fix_hp", tables.fix_hp),
    ):
        table.add_row(name, of(a), of(b), "")
    for line in _LINES:
        of_a, of_b = line.value(a), line.value(b)
        if of_a is not None or of_b is not None:
            table.add_row(line.name, line.text(of_a), line.text(of_b), _ratio(of_a, of_b))
    table.add_row(f"quality ({a.quality.metric})", _quality(a), _quality(b), _gain(a, b))
    return table


def _ratio(a: float | None, b: float | None) -> str:
    return f"{b / a:.3f}" if a and b is not None else tables.NOT_APPLICABLE


def _quality(result: Result) -> str:
    return tables.quality(result.quality.value, result.quality.target)


def _gain(a: Result, b: Result) -> str:
    """A ratio of two AUCs says nothing; their difference does."""
    if a.quality.value is None or b.quality.value is None:
        return tables.NOT_APPLICABLE
    if a.quality.metric != b.quality.metric:
        return tables.NOT_APPLICABLE
    return f"{b.quality.value - a.quality.value:+.4f}"


def _differences(rows: list[list[str]], names: tuple[str, str]) -> Table:
    table = Table(title="Configuration fields that differ", title_justify="left")
    for header in ("field", *names):
        table.add_column(header, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
