"""`report.html`: one page, no network, no scripts, for one run or for several side by side."""

from collections.abc import Sequence
from importlib import resources

from trainmark.formatting import DASH, duration, human, joules, readable_size
from trainmark.report.assessments import interval
from trainmark.report.charts import bar_chart
from trainmark.report.forecasts import forecast_sections
from trainmark.report.formats import Titled
from trainmark.report.markup import Markup, join, tag
from trainmark.report.predictions import prediction_sections, predictions_of_several
from trainmark.report.repeats import histograms
from trainmark.report.sections import (
    ReportedRun,
    configuration,
    device_facts,
    device_table,
    differences,
    environment,
    inference_sections,
    metric_name,
    pairs,
    published_sections,
    section,
    several_table,
    table,
    time_split,
)
from trainmark.report.tables import NOT_APPLICABLE, mfu, quality, result_grid, units
from trainmark.report.training import learning_section, training_sections
from trainmark.run.result import Result


def page(runs: Sequence[ReportedRun]) -> str:
    """The page of one run, or of several."""
    title = runs[0].label if len(runs) == 1 else f"{len(runs)} runs"
    return document(title, _one_run(runs[0]) if len(runs) == 1 else _several_runs(runs))


def tables_page(title: str, tables: Sequence[Titled]) -> str:
    """A page of tables and nothing else."""
    return document(title, join(page_header("report", title), *map(_titled, tables)))


def _titled(one: Titled) -> Markup:
    notes = [tag("p", note, class_="help") for note in one.notes]
    chart = bar_chart(one.bars) if one.bars else None
    return section(one.title, chart, table(one.grid, highlighted=one.ours), *notes)


def own_file(name: str) -> Markup:
    """A file of this package, not escaped: HTML reads what <style> and <script> hold as it is."""
    return Markup(resources.files(__package__).joinpath(name).read_text())


def document(title: str, content: Markup, more_head: Markup | None = None) -> str:
    """A whole page around its content."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} · Trainmark"),
        tag("style", own_file("style.css")),
        more_head,
    )
    body = tag("body", tag("main", content), _footer())
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def page_header(kind: str, title: str, *more: Markup) -> Markup:
    """What a page begins with."""
    eyebrow = tag("p", f"Trainmark {kind}", class_="eyebrow")
    return tag("header", eyebrow, tag("h1", title), *more)


def _one_run(run: ReportedRun) -> Markup:
    return join(
        _headline(run),
        _warnings(run.result.warnings),
        _notes(run.result),
        section("Result", table(result_grid([run.result])), _reading_help(run.result)),
        learning_section([run]),
        *training_sections([run]),
        *prediction_sections(run),
        section("Time", time_split([run])),
        *forecast_sections([run]),
        section("Device", pairs(device_facts(run.result))),
        *inference_sections([run]),
        *published_sections([run]),
        section("Environment", environment(run.result)),
        section("Configuration", configuration(run.result)),
    )


def _several_runs(runs: Sequence[ReportedRun]) -> Markup:
    results = [run.result for run in runs]
    return join(
        page_header("report", f"{len(runs)} runs"),
        _warnings([f"{run.label}: {text}" for run in runs for text in run.result.warnings]),
        section("Results", several_table(runs), _reading_help(results[0])),
        learning_section(runs),
        *training_sections(runs),
        *map(_titled, histograms(results)),
        *predictions_of_several(runs),
        section("Time", time_split(runs)),
        *forecast_sections(runs),
        section("Device", device_table(runs)),
        *inference_sections(runs),
        section("What differs", differences(runs)),
        *published_sections(runs),
        section("Each run", *(_details(run) for run in runs)),
    )


def _details(run: ReportedRun) -> Markup:
    return tag(
        "details",
        tag("summary", run.label),
        _notes(run.result),
        tag("h3", "Environment"),
        environment(run.result),
        tag("h3", "Configuration"),
        configuration(run.result),
    )


def _footer() -> Markup:
    return tag(
        "footer",
        "Written by ",
        tag("b", "Trainmark"),
        " from result.json; docs/metrics.md defines every number.",
    )


# --- headline


def _headline(run: ReportedRun) -> Markup:
    result = run.result
    where = f"{result.case} · {result.precision} · {result.division} division · {result.started}"
    return page_header(
        "report",
        join(result.run, " ", _verdict(result)),
        tag("p", where, class_="where"),
        tag("div", *_tiles(result), class_="tiles"),
    )


def _verdict(result: Result) -> Markup | None:
    if result.quality.reached is None:
        return None
    if result.quality.reached:
        return tag("span", "target reached", class_="verdict good")
    return tag("span", "target not reached", class_="verdict bad")


def _tiles(result: Result) -> list[Markup]:
    rate = result.throughput
    memory = result.memory
    headline_rate = rate.p_train if rate.p_train is not None else rate.p_whole
    reached = quality(result.quality.value, None).replace(NOT_APPLICABLE, DASH)
    tiles = [
        _tile(metric_name(result), reached, _quality_remark(result)),
        _tile("Throughput", human(headline_rate), f"{rate.unit} in training (p_train)"),
        _tile("End to end", duration(result.time_s.e2e), f"{result.samples:,} samples"),
        _tile(
            "Peak memory",
            readable_size(memory.peak_bytes),
            f"of {readable_size(memory.total_bytes)}",
        ),
    ]
    if result.tokens_per_device_s is not None:
        tiles.append(_tile("Tokens", human(result.tokens_per_device_s), "per device and second"))
    if result.mfu:
        first = result.mfu[0]
        tiles.append(_tile("MFU", mfu(first.value), f"{first.convention}, {first.peak_dtype} peak"))
    if result.energy is not None and result.energy.joules is not None:
        used = result.energy
        each = f"{joules(used.joules_per_sample)} per sample in training"
        tiles.append(_tile("Energy", joules(used.joules), each))
    return tiles


def _tile(name: str, value: str, remark: str) -> Markup:
    return tag(
        "div",
        tag("span", name, class_="name"),
        tag("span", value, class_="value"),
        tag("span", remark, class_="remark"),
        class_="tile",
    )


def _quality_remark(result: Result) -> str:
    outcome = result.quality
    parts = [outcome.split]
    assessed = result.assessments.get(outcome.split)
    if assessed is not None and assessed.auc is not None and outcome.metric == "auc":
        parts.append(f"95 %: {interval(assessed.auc)}")
    if outcome.target is not None:
        when = f" reached after {duration(outcome.at_s)}" if outcome.at_s is not None else ""
        parts.append(f"target {outcome.target:.4g}{when}")
    best = result.quality.best_possible
    if best is not None:
        parts.append(f"best possible {best:.4g}")
    return ", ".join(parts)


def _warnings(sentences: Sequence[str]) -> Markup | None:
    return _aside("Warnings", sentences, "notes warnings")


def _notes(result: Result) -> Markup | None:
    return _aside("Read this first", result.notes, "notes")


def _aside(title: str, sentences: Sequence[str], style: str) -> Markup | None:
    if not sentences:
        return None
    items = (tag("li", sentence) for sentence in sentences)
    return tag("aside", tag("b", title), tag("ul", *items), class_=style)


def _reading_help(result: Result) -> Markup:
    text = (
        f"{units(result)} p_whole counts all the time "
        "from the first batch to the last step; p_train leaves out evaluation, "
        "checkpoints and warm-up; p_core also leaves out waiting for input."
    )
    if not result.mfu and result.mfu_reason:
        text += f" There is no MFU: {result.mfu_reason}."
    return tag("p", text, class_="help")
