"""The page's part on predictions: metrics, the reliability diagram, what each column is worth."""

from collections.abc import Mapping, Sequence

from trainmark.contract import Metrics
from trainmark.metrics.binary import Assessment, Importance
from trainmark.report.assessments import metrics_grid, remarks
from trainmark.report.charts import Bar, Series, bar_chart, line_chart
from trainmark.report.markup import Markup, tag
from trainmark.report.sections import ReportedRun, section, table
from trainmark.run.curves import Curve, Point

MAX_BARS = 40


def prediction_sections(run: ReportedRun) -> list[Markup]:
    """Predictions at the run's end, and what `trainmark evaluate` has found out since."""
    found, since = run.result, run.evaluated
    sections = []
    if found.assessments:
        sections.append(_predictions("Predictions", found.final_metrics(), found.assessments))
    if since is None:
        return sections
    trained_on = found.best.at_sample if found.best else found.samples
    is_known = (since.samples, since.data) == (trained_on, found.config.get("data"))
    if since.assessments and not (is_known and found.assessments):
        title = f"Predictions of step {since.step:,} for {since.data}"
        sections.append(_predictions(title, since.splits, since.assessments))
    if since.importance:
        sections.append(section("What each column is worth", *_importance(since.importance)))
    return sections


def predictions_of_several(runs: Sequence[ReportedRun]) -> list[Markup]:
    """The metrics of each run with its name above them."""
    tables = [
        item
        for run in runs
        if run.result.assessments
        for item in (
            tag("h3", run.label),
            table(metrics_grid(run.result.final_metrics(), run.result.assessments)),
        )
    ]
    return [section("Predictions", *tables)] if tables else []


def _predictions(
    title: str, splits: Mapping[str, Metrics], assessed: Mapping[str, Assessment]
) -> Markup:
    rows = [tag("p", remarks(split, found), class_="help") for split, found in assessed.items()]
    parts = tag("div", table(metrics_grid(splits, assessed)), *rows)
    return section(title, tag("div", parts, _reliability_diagram(assessed), class_="beside"))


def _reliability_diagram(assessed: Mapping[str, Assessment]) -> Markup:
    """What was predicted, and what came of it, with the 95 % intervals as a band."""
    series = [
        Series(split, _reliability(found), colour=i, dashed=i > 0, dots=True)
        for i, (split, found) in enumerate(assessed.items())
    ]
    highest = max(b.prediction for found in assessed.values() for b in found.bins)
    diagonal = Curve([[Point(x, x, x, x) for x in (0.0, highest)]], not_finite=0)
    exact = Series("as predicted", diagonal, colour=5, dashed=True)
    return line_chart([*series, exact], "mean prediction of a bin", "share of positives")


def _reliability(found: Assessment) -> Curve:
    points = [
        Point(b.prediction, b.rate.value, b.rate.low or 0.0, b.rate.high or 1.0) for b in found.bins
    ]
    return Curve([points], not_finite=0)


def _importance(columns: Sequence[Importance]) -> list[Markup]:
    """The columns as bars, the most important first."""
    shown = columns[:MAX_BARS]
    text = (
        "What the AUC loses when a column's values are given to other rows; the thin line reaches "
        "two standard errors to either side. Columns that tell the same stand in for each other."
    )
    if len(columns) > len(shown):
        text += f" The other {len(columns) - len(shown):,} columns are in evaluation.json."
    bars = bar_chart([Bar(c.column, c.drop, c.error, f"{c.drop:.4f}") for c in shown])
    return [bars, tag("p", text, class_="help")]
