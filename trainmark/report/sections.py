"""The parts of `report.html` below its headline: tables, time, device, configuration."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainmark.config import flatten
from trainmark.formatting import DASH, human, joules, percent, readable_size, with_unit
from trainmark.inference.figures import Inference
from trainmark.report import published
from trainmark.report.charts import COLOURS, stacked_bar
from trainmark.report.fields import different_fields
from trainmark.report.markup import Child, Markup, join, tag
from trainmark.report.tables import (
    NOT_APPLICABLE,
    Grid,
    inference_grid,
    published_grid,
    published_row,
    result_grid,
)
from trainmark.run.assessment import Evaluated
from trainmark.run.curves import Curve
from trainmark.run.result import Energy, Result


@dataclass(frozen=True)
class ReportedRun:
    """A result and what the page needs to draw it."""

    label: str
    """The run's name, made unique among the runs of a page."""
    result: Result
    loss: Curve
    curves: Mapping[str, Curve] = field(default_factory=dict)
    """What else was recorded of its steps, by column of curves.csv; older runs have none."""
    colour: int = 0
    inference: Inference | None = None
    """What `trainmark infer` has measured since."""
    evaluated: Evaluated | None = None
    """What `trainmark evaluate` has found out since."""


def metric_name(result: Result) -> str:
    metric = result.quality.metric
    return metric.upper() if len(metric) <= 3 else metric.replace("_", " ").capitalize()


def followed_split(result: Result) -> str:
    """The split whose evaluations are a curve: the quality's; where that was evaluated once, at the
    end, the one that was evaluated most often."""
    splits = [result.quality.split, *(evaluation.split for evaluation in result.evaluations)]
    counts = Counter(splits[1:])
    return max(dict.fromkeys(splits), key=lambda split: counts[split])


def section(title: str, *content: Child) -> Markup:
    return tag("section", tag("h2", title), *content)


# --- tables


def table(grid: Grid, highlighted: int = 0) -> Markup:
    """`highlighted`: how many rows at the top are ours."""
    head, body = _cell_maker("th"), _cell_maker("td")
    rows = [
        tag("tr", *map(body, row, grid.numeric), class_="ours" if i < highlighted else None)
        for i, row in enumerate(grid.rows)
    ]
    header = tag("thead", tag("tr", *map(head, grid.headers, grid.numeric)))
    return tag("div", tag("table", header, tag("tbody", *rows)), class_="scroll")


def _cell_maker(name: str) -> Callable[[Child, bool], Markup]:
    def cell(content: Child, numeric: bool) -> Markup:
        styles = {
            "num": numeric,
            "slash": content == NOT_APPLICABLE,
            "long": not isinstance(content, Markup) and len(str(content)) > 18,
        }
        return tag(name, content, class_=" ".join(filter(styles.get, styles)) or None)

    return cell


def several_table(runs: Sequence[ReportedRun]) -> Markup:
    grid = result_grid([run.result for run in runs])
    labelled: list[list[Any]] = [
        [join(tag("i", class_=f"swatch c{run.colour % COLOURS}"), run.label), *row[1:]]
        for run, row in zip(runs, grid.rows, strict=True)
    ]
    return table(Grid(grid.headers, labelled, grid.numeric))


def pairs(items: Sequence[tuple[str, Child]], style: str = "") -> Markup:
    """Names and values, in as many columns as the page has room for."""
    rows = (tag("div", tag("dt", name), tag("dd", value)) for name, value in items)
    return tag("dl", *rows, class_=f"pairs {style}")


def as_row(run: ReportedRun) -> published.Row:
    """A run as a row beside published ones."""
    return published_row(run.result, "this run" if run.label == run.result.run else run.label)


def published_sections(runs: Sequence[ReportedRun]) -> list[Markup]:
    """One for each named run that has published counterparts, our own rows first."""
    names = dict.fromkeys(run.result.run for run in runs)
    return [
        _published_section(name, [as_row(run) for run in runs if run.result.run == name])
        for name in names
        if published.for_run(name)
    ]


def _published_section(name: str, ours: Sequence[published.Row]) -> Markup:
    rows = published.for_run(name)
    systems = published.systems()
    sources = [systems[key] for key in dict.fromkeys(row.system for row in rows)]
    remarks = [tag("p", f"{s.source}; {s.dataset}. {s.note or ''}", class_="help") for s in sources]
    return section(
        f"Beside the published results: {name}",
        table(published_grid([*ours, *rows]), highlighted=len(ours)),
        *remarks,
    )


# --- time


TIME_PARTS = {
    "init": "start-up",
    "warmup": "warm-up",
    "core": "training (core)",
    "input": "waiting for input",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "other": "everything else",
}


def time_parts(result: Result) -> dict[str, float]:
    """The end-to-end time, split without a gap or an overlap."""
    time = result.time_s
    parts = {
        "init": time.init,
        "warmup": time.warmup,
        "core": time.core,
        "input": time.input_wait,
        "evaluation": time.evaluation,
        "checkpoint": time.checkpoint,
    }
    return parts | {"other": max(0.0, time.e2e - sum(parts.values()))}


def time_split(runs: Sequence[ReportedRun]) -> Markup:
    splits = [time_parts(run.result) for run in runs]
    full = max(sum(split.values()) for split in splits)
    bars = [
        tag(
            "div",
            tag("p", run.label, class_="bar-label") if len(runs) > 1 else None,
            stacked_bar([(part, TIME_PARTS[part], size) for part, size in split.items()], full),
        )
        for run, split in zip(runs, splits, strict=True)
    ]
    return join(*bars, _time_list(splits[0]) if len(runs) == 1 else _time_table(runs, splits))


def _time_list(split: dict[str, float]) -> Markup:
    return pairs(
        [
            (_time_name(part), " · ".join(_seconds_and_share(size, split)))
            for part, size in split.items()
            if size > 0
        ]
    )


def _time_name(part: str) -> Markup:
    return join(tag("i", class_=f"swatch t-{part}"), TIME_PARTS[part])


def _time_table(runs: Sequence[ReportedRun], splits: Sequence[dict[str, float]]) -> Markup:
    shown = [part for part in TIME_PARTS if any(split[part] > 0 for split in splits)]
    rows: list[list[Any]] = [
        [
            _time_name(part),
            *(cell for split in splits for cell in _seconds_and_share(split[part], split)),
        ]
        for part in shown
    ]
    total = ["end to end", *(c for s in splits for c in _seconds_and_share(sum(s.values()), s))]
    headers = ["", *(header for run in runs for header in (run.label, "share"))]
    return table(Grid(headers, [*rows, total], [False] + [True] * (len(headers) - 1)))


def _seconds_and_share(size: float, split: dict[str, float]) -> tuple[str, str]:
    total = sum(split.values())
    return f"{size:,.2f} s", f"{size / total:.1%}" if total else NOT_APPLICABLE


# --- inference


def inference_sections(runs: Sequence[ReportedRun]) -> list[Markup]:
    """One, if anything was measured; of several runs, each with its name above its table."""
    measured = [(run.label, run.inference) for run in runs if run.inference is not None]
    tables = [
        join(tag("h3", label) if len(runs) > 1 else None, _inference(found))
        for label, found in measured
    ]
    return [section("Inference", *tables)] if tables else []


def _inference(found: Inference) -> Markup:
    counts = " or ".join(f"{n:,}" for n in dict.fromkeys(row.requests for row in found.rows))
    precisions = " or ".join(dict.fromkeys(row.precision or "" for row in found.rows))
    text = (
        f"The checkpoint of step {found.step:,} on {found.case} in {precisions}, "
        f"{found.started}: {counts} requests of each batch size, one after another, each from a "
        "batch in host memory to its scores in host memory."
    )
    return join(table(inference_grid(found.rows)), tag("p", text, class_="help"))


# --- device, environment, configuration


def device_table(runs: Sequence[ReportedRun]) -> Markup:
    columns = [dict(device_facts(run.result)) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name, DASH) for column in columns)] for name in names]
    headers = ["", *(run.label for run in runs)]
    return table(Grid(headers, rows, [False] + [True] * len(runs)))


def device_facts(result: Result) -> list[tuple[str, str]]:
    """What is known of the device, and why the energy is not."""
    return [(name, text) for name, text in _device_facts(result) if text != DASH]


def _device_facts(result: Result) -> list[tuple[str, str]]:
    memory = result.memory
    monitor = result.hardware.get("monitor") or {}
    return [
        ("peak memory (device)", readable_size(memory.peak_bytes)),
        ("peak memory (allocator)", readable_size(memory.allocated_peak_bytes)),
        ("device memory", readable_size(memory.total_bytes)),
        ("peak host memory", readable_size(memory.host_peak_bytes)),
        ("mean utilisation", percent(_figure(monitor, "utilisation", "mean"))),
        ("highest utilisation", percent(_figure(monitor, "utilisation", "max"))),
        ("mean power", with_unit(_figure(monitor, "power_w", "mean"), "W")),
        ("highest power", with_unit(_figure(monitor, "power_w", "max"), "W")),
        ("highest temperature", with_unit(_figure(monitor, "temperature_c", "max"), "°C")),
        *energy_facts(result.energy),
    ]


def energy_facts(energy: Energy | None) -> list[tuple[str, str]]:
    """Lines on energy; the same ones for every result."""
    value = lambda name: getattr(energy, name, None)  # noqa: E731
    return [
        ("energy", joules(value("joules"))),
        ("energy per sample", joules(value("joules_per_sample"))),
        ("energy per token", joules(value("joules_per_token"))),
        ("samples per joule", human(value("samples_per_joule"))),
        ("mean power in training", with_unit(value("mean_power_w"), "W")),
        ("cost", human(value("cost"))),
        ("cost per epoch", human(value("cost_per_epoch"))),
        ("CO2 in grams", human(value("grams_co2"))),
        ("CO2 per epoch in grams", human(value("grams_co2_per_epoch"))),
        ("energy counted by", value("source") or value("reason") or DASH),
    ]


def _figure(monitor: dict[str, Any], quantity: str, statistic: str) -> float | None:
    values = monitor.get(quantity)
    return values.get(statistic) if isinstance(values, dict) else None


def environment(result: Result) -> Markup:
    # Of the monitor, whose figures stand above, only why some are missing.
    monitor = result.hardware.get("monitor") or {}
    hardware = result.hardware | {"monitor": monitor.get("reason")}
    facts = [*flatten(hardware), *flatten(result.software)]
    # What could not be read stays null in result.json and is not worth a line here.
    readable = [(name, value) for name, value in facts if value is not None]
    return pairs([(_title(name), _value(name, value)) for name, value in readable])


def _title(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ").replace(".", " ")


def _value(name: str, value: Any) -> str:
    return (
        readable_size(value) if name.endswith("_bytes") and isinstance(value, int) else str(value)
    )


def configuration(result: Result) -> Markup:
    changed = set(result.changed)
    fields: list[tuple[str, Child]] = [
        (name, tag("mark", str(value)) if name in changed else str(value))
        for name, value in flatten(result.config)
    ]
    return pairs(fields, "mono")


def differences(runs: Sequence[ReportedRun]) -> Markup:
    rows = different_fields([run.result for run in runs])
    if not rows:
        return tag("p", "The configurations are the same.", class_="empty")
    headers = ["field", *(run.label for run in runs)]
    return table(Grid(headers, rows, [False] + [True] * len(runs)))
