"""What happened in training, on the page: losses, evaluations, and all else that steps tell."""

import math
from collections.abc import Sequence

from trainmark.report.charts import Level, Series, line_chart
from trainmark.report.markup import Markup, join, tag
from trainmark.report.sections import ReportedRun, followed_split, metric_name, section
from trainmark.run.curves import OF_STRETCHES, Curve, thin
from trainmark.run.result import Result

COLUMNS = {
    "gradient_norm": "gradient norm",
    "lr": "learning rate",
    "loss_scale": "loss scale",
    "skipped": "skipped steps",
    "samples_per_s": "samples/s",
    "power_w": "power in W",
}
"""Columns of curves.csv, with the titles of their charts."""


def learning_section(runs: Sequence[ReportedRun]) -> Markup:
    """Losses and evaluations."""
    return section("Learning", tag("div", loss_charts(runs), quality_charts(runs), class_="pair"))


def training_sections(runs: Sequence[ReportedRun]) -> list[Markup]:
    """One, if anything besides the loss was recorded."""
    charts = [
        _curve_charts(
            [(run, run.curves[name]) for run in runs if name in run.curves],
            "seconds" if name in OF_STRETCHES else "samples",
            label,
        )
        for name, label in COLUMNS.items()
        if any(_tells(name, run) for run in runs)
    ]
    return [section("Training", tag("div", *charts, class_="pair"))] if charts else []


def _tells(name: str, run: ReportedRun) -> bool:
    """Whether there is anything to see: where no step can be skipped, none is drawn."""
    return name in run.curves and (name != "skipped" or "loss_scale" in run.curves)


def loss_charts(runs: Sequence[ReportedRun]) -> Markup:
    return _curve_charts([(run, run.loss) for run in runs], "samples", "training loss")


def _curve_charts(
    curves: Sequence[tuple[ReportedRun, Curve]], x_label: str, y_label: str
) -> Markup:
    """One chart for each workload: another one's numbers and samples have another scale."""
    groups: dict[str, list[tuple[ReportedRun, Curve]]] = {}
    for run, curve in curves:
        groups.setdefault(run.result.workload, []).append((run, curve))
    return join(*(_curve_chart(group, x_label, y_label) for group in groups.values()))


def _curve_chart(curves: Sequence[tuple[ReportedRun, Curve]], x_label: str, y_label: str) -> Markup:
    series = [Series(run.label, curve, run.colour) for run, curve in curves]
    left_out = sum(curve.not_finite for _, curve in curves)
    warning = f"{left_out:,} values of the {y_label} are not finite and are not drawn."
    return tag(
        "div",
        line_chart(series, x_label, y_label),
        tag("p", warning, class_="help") if left_out else None,
    )


def quality_charts(runs: Sequence[ReportedRun]) -> Markup:
    """One chart for each metric that the runs are judged by."""
    names = dict.fromkeys(metric_name(run.result) for run in runs)
    groups = [[run for run in runs if metric_name(run.result) == name] for name in names]
    return join(*map(_quality_chart, groups))


def _quality_chart(runs: Sequence[ReportedRun]) -> Markup:
    alone = len(runs) == 1
    series = [series for run in runs for series in _quality_series(run, others=alone)]
    return tag("div", line_chart(series, "samples", metric_name(runs[0].result), _levels(runs)))


def _quality_series(run: ReportedRun, others: bool) -> list[Series]:
    """The split that the target is about; the others too, dashed, where one run is alone. Of
    several runs, one split each: the one that has a curve."""
    result = run.result
    judged = result.quality.split
    if not others:
        split = followed_split(result)
        label = run.label if split == judged else f"{run.label}, {split}"
        return [Series(label, _quality_curve(result, split), run.colour, dots=True)]
    splits = dict.fromkeys([judged, *(e.split for e in result.evaluations)])
    return [
        Series(split, _quality_curve(result, split), run.colour + i, dashed=i > 0, dots=True)
        for i, split in enumerate(splits)
    ]


def _quality_curve(result: Result, split: str) -> Curve:
    found = [(e.at_sample, e.metrics.get(result.quality.metric)) for e in result.evaluations
             if e.split == split]  # fmt: skip
    return thin([(float(at), math.nan if value is None else value) for at, value in found])


def _levels(runs: Sequence[ReportedRun]) -> list[Level]:
    """Targets and best possible values, each once."""
    targets = {run.result.quality.target for run in runs}
    best = {run.result.quality.best_possible for run in runs}
    return [
        Level(label, y, style)
        for label, style, values in (("target", "target", targets), ("best possible", "best", best))
        for y in sorted(value for value in values if value is not None)
    ]
