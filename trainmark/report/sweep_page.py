"""The page and the table of `trainmark sweep`: the best runs, and which fields mattered."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainmark import metrics
from trainmark.files import write_atomically
from trainmark.formatting import duration
from trainmark.report.assessments import interval
from trainmark.report.charts import Bar, Series, Tick, bar_chart, line_chart
from trainmark.report.html import document, page_header
from trainmark.report.markup import Markup, join, tag
from trainmark.report.sections import ReportedRun, section
from trainmark.report.sections import table as html_table
from trainmark.report.tables import NOT_APPLICABLE, Grid, or_slash
from trainmark.report.training import loss_charts, quality_charts
from trainmark.run.curves import Curve, Point, read_loss
from trainmark.run.result import Result

FILE_NAME = "sweep.html"
SHOWN = 20  # best runs in the page's table
DRAWN = 5  # best runs whose curves are drawn
PARTS = 4  # of a range, to tell whether it mattered, with at least so many runs in each:
RUNS_OF_PART = 5


@dataclass(frozen=True, kw_only=True)
class SweptField:
    """A field that was varied."""

    name: str
    choices: tuple[str, ...] = ()
    """The values it was given; empty for a range."""
    log: bool = False
    """Whether the range is one of factors: 0.001 to 0.01 is as far as 0.1 to 1."""


@dataclass(frozen=True, kw_only=True)
class SweptRun:
    """One run of a sweep."""

    folder: Path
    values: dict[str, str]
    outcome: str
    reason: str = ""
    value: float | None = None
    """What the runs are compared by."""
    split: str = ""
    """The split that `value` was measured on."""
    result: Result | None = None

    @property
    def label(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.values.items())


def ranked(runs: Sequence[SweptRun], better: str) -> list[SweptRun]:
    """The best first; those without a value last, as they came."""
    sign = -1 if better == "higher" else 1
    return sorted(runs, key=lambda run: math.inf if run.value is None else sign * run.value)


def runs_grid(runs: Sequence[SweptRun], better: str, with_folders: bool = True) -> Grid:
    """A row for each run, the best first."""
    ordered = ranked(runs, better)
    names = list(ordered[0].values) if ordered else []
    folder = ["folder"] if with_folders else []
    headers = [*folder, *names, "outcome", _compared_by(runs), "test", "e2e_time"]
    rows = [
        [
            *([run.folder.name] if with_folders else []),
            *run.values.values(),
            run.outcome,
            or_slash(run.value, ".5g"),
            *_cells(run),
        ]
        for run in ordered
    ]
    text = len(folder) + len(names) + 1
    return Grid(headers, rows, [False] * text + [True] * (len(headers) - text))


def _compared_by(runs: Sequence[SweptRun]) -> str:
    done = next((run for run in runs if run.result), None)
    return f"{done.result.quality.metric} on {done.split}" if done and done.result else "value"


def _cells(run: SweptRun) -> list[str]:
    if run.result is None:
        return [NOT_APPLICABLE, NOT_APPLICABLE]
    test = run.result.final_metrics().get("test", {}).get(run.result.quality.metric)
    return [or_slash(test, ".5g"), f"{run.result.time_s.e2e:.1f}"]


# --- the page


def write_page(
    output: Path, name: str, fields: Sequence[SweptField], runs: Sequence[SweptRun], better: str
) -> Path:
    """`sweep.html` in the sweep's folder."""
    path = output / FILE_NAME
    write_atomically(path, document(f"Sweep of {name}", _content(name, fields, runs, better)))
    return path


def _content(
    name: str, fields: Sequence[SweptField], runs: Sequence[SweptRun], better: str
) -> Markup:
    best = ranked(runs, better)
    done = [run for run in runs if run.value is not None]
    grid = runs_grid(runs, better)
    shown = Grid(grid.headers, grid.rows[:SHOWN], grid.numeric)
    seconds = sum(run.result.time_s.e2e for run in runs if run.result)
    remarks = [
        f"{len(runs)} runs took {duration(seconds)} of training and evaluation.",
        "The best of many is also the luckiest: its value on other data is a little worse."
        if not done or done[0].split == "test"
        else f"Runs are compared on {done[0].split}; the test split tells how good the best is.",
        *_by_chance(best[0]),
    ]
    over = f"over {', '.join(field.name for field in fields)}"
    varied = [field for field in fields if len(field.choices) != 1]
    return join(
        page_header("sweep", name, tag("p", over, class_="where")),
        section("Best runs", html_table(shown, highlighted=1 if done else 0), _help(remarks)),
        _what_mattered(varied, done) if len(done) > 1 else None,
        section("Each field", _charts(varied, done, best[0])) if done and varied else None,
        _curves(best),
    )


def _by_chance(best: SweptRun) -> list[str]:
    """How far the best AUC would differ on other rows."""
    if best.result is None or best.result.quality.metric != "auc":
        return []
    found = best.result.assessments.get(best.split)
    if found is None or found.auc is None:
        return []
    return [
        f"On other rows the best run's {found.auc.value:.5g} may be {interval(found.auc)} (95 %): "
        "'trainmark compare' tells whether it is better than another run on the same rows."
    ]


def _help(sentences: Sequence[str]) -> Markup:
    return tag("p", " ".join(sentences), class_="help")


# --- what mattered


def importance(field: SweptField, runs: Sequence[SweptRun]) -> float | None:
    """The share of the runs' differences that the field explains alone; None of too few runs."""
    return metrics.explained_share(_groups(field, runs))


def _groups(field: SweptField, runs: Sequence[SweptRun]) -> list[list[float]]:
    """The values of runs with one choice, or in one part of the range, together."""
    values = [run.value for run in runs if run.value is not None]
    if field.choices:
        names = [run.values[field.name] for run in runs if run.value is not None]
        found = [[v for v, n in zip(values, names, strict=True) if n == c] for c in field.choices]
        return [group for group in found if group]
    places = [float(run.values[field.name]) for run in runs if run.value is not None]
    ordered = [value for _, value in sorted(zip(places, values, strict=True))]
    count = min(PARTS, len(ordered) // RUNS_OF_PART)
    cuts = [len(ordered) * part // count for part in range(count + 1)] if count else []
    return [ordered[a:b] for a, b in itertools.pairwise(cuts)]


def _what_mattered(fields: Sequence[SweptField], done: Sequence[SweptRun]) -> Markup | None:
    found = [(field.name, importance(field, done)) for field in fields]
    known = sorted(((n, v) for n, v in found if v is not None), key=lambda pair: -pair[1])
    if not known:
        return None
    bars = [Bar(name, share, None, f"{share:.0%}") for name, share in known]
    text = (
        "How much of the variance between the finished runs each field explains alone, less what "
        "chance explains. What several fields do only together is in none of them."
    )
    return section("What mattered", bar_chart(bars), _help([text]))


# --- charts


def _charts(fields: Sequence[SweptField], done: Sequence[SweptRun], best: SweptRun) -> Markup:
    label = _compared_by(done)
    return tag("div", *(_chart(field, done, best, label) for field in fields), class_="pair")


def _chart(field: SweptField, done: Sequence[SweptRun], best: SweptRun, y_label: str) -> Markup:
    others = [run for run in done if run is not best]
    series = [
        Series("runs", _points(field, others)),
        Series("best", _points(field, [best]), colour=1),
    ]
    means = _means(field, done)
    if means:
        series.append(Series("mean", means, dashed=True, colour=2))
    return line_chart(series, field.name, y_label, x_ticks=_ticks(field, done))


def _points(field: SweptField, runs: Sequence[SweptRun]) -> Curve:
    """One dot for each run."""
    return Curve(
        [
            [_point(_place(field, run), run.value, run.label)]
            for run in runs
            if run.value is not None
        ],
        not_finite=0,
    )


def _means(field: SweptField, done: Sequence[SweptRun]) -> Curve | None:
    """The mean of each choice's runs; None if every choice has one run."""
    if not field.choices or len(done) <= len(field.choices):
        return None
    groups = {
        place: [r.value for r in done if r.value is not None and _place(field, r) == place]
        for place in sorted({_place(field, run) for run in done})
    }
    return Curve([[_point(at, statistics.fmean(g), "mean") for at, g in groups.items()]], 0)


def _point(x: float, y: float, name: str) -> Point:
    return Point(x, y, y, y, name=name)


def _place(field: SweptField, run: SweptRun) -> float:
    text = run.values[field.name]
    if field.choices:
        return float(field.choices.index(text))
    return math.log10(float(text)) if field.log else float(text)


def _ticks(field: SweptField, done: Sequence[SweptRun]) -> list[Tick] | None:
    """Names of choices; numbers of a range of factors. Other ranges have round numbers."""
    if field.choices:
        return [Tick(float(place), name) for place, name in enumerate(field.choices)]
    if not field.log:
        return None
    places = [_place(field, run) for run in done]
    low, high = math.floor(min(places)), math.ceil(max(places))
    return [Tick(float(power), f"{10.0**power:g}") for power in range(low, high + 1)]


def _curves(best: Sequence[SweptRun]) -> Markup | None:
    runs = [
        ReportedRun(
            label=run.label,
            result=run.result,
            loss=read_loss(run.folder / run.result.loss.curve),
            colour=place,
        )
        for place, run in enumerate(run for run in best[:DRAWN] if run.result)
        if run.result
    ]
    if not runs:
        return None
    charts = tag("div", loss_charts(runs), quality_charts(runs), class_="pair")
    return section(f"Learning of the best {len(runs)}", charts)
