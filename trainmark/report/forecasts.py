"""What was predicted of a run, beside what was measured: for its page, and for `plan --check`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from trainmark import metrics
from trainmark.config import filled
from trainmark.formatting import DASH, human, readable_size
from trainmark.report.markup import Markup, tag
from trainmark.report.sections import ReportedRun, pairs, section, table
from trainmark.report.tables import Grid
from trainmark.run.result import Predicted, Result


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One number, twice; None where one of them is not known."""

    what: str
    predicted: float | None
    measured: float | None

    @property
    def off(self) -> float | None:
        return metrics.relative_error(self.predicted, self.measured)


Comparison = Callable[[Result], Compared]


def step_time(result: Result) -> Compared:
    """Seconds of a step, after the warm-up."""
    steps = result.steps.all - result.steps.warmup
    return Compared(
        what="time per step",
        predicted=result.predicted.step_s if result.predicted else None,
        measured=result.time_s.train / steps if steps > 0 and result.samples_measured else None,
    )


def memory(result: Result) -> Compared:
    """Bytes of the fullest device, as its allocator counts them; a CPU has no such count."""
    return Compared(
        what="memory",
        predicted=result.predicted.memory_bytes if result.predicted else None,
        measured=result.memory.allocated_peak_bytes,
    )


def _throughput(result: Result) -> Compared:
    return Compared(
        what=result.throughput.unit,
        predicted=result.predicted.p_train if result.predicted else None,
        measured=result.throughput.p_train,
    )


# --- on the page


def forecast_sections(runs: Sequence[ReportedRun]) -> list[Markup]:
    """One, if anything was predicted of any of the runs; of one run with the parts of its step."""
    known = [run for run in runs if run.result.predicted]
    if not known:
        return []
    headers = ["", "", "predicted", "measured", "off"]
    rows = [[run.label, *row] for run in known for row in _rows(run.result)]
    if len(runs) == 1:
        headers, rows = headers[1:], [row[1:] for row in rows]
    grid = Grid(headers, rows, [header != "" for header in headers])
    details = _details(known[0].result) if len(runs) == 1 else []
    return [section("Predicted and measured", table(grid), *details)]


def _rows(result: Result) -> list[list[str]]:
    time = _row(step_time(result), _milliseconds)
    if result.predicted and result.predicted.interval_s:
        low, high = result.predicted.interval_s
        time[1] += f" ({1e3 * low:,.2f} to {1e3 * high:,.2f})"
    rows = [
        time,
        _row(_throughput(result), human),
        _row(memory(result), readable_size),
    ]
    return [row for row in rows if row[1] != DASH]


def _row(found: Compared, written: Callable[[float], str]) -> list[str]:
    def cell(value: float | None) -> str:
        return DASH if value is None else written(value)

    return [found.what, cell(found.predicted), cell(found.measured), signed(found.off)]


def signed(off: float | None) -> str:
    """A relative error."""
    return DASH if off is None else f"{100 * off:+.1f} %"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms"


def _details(result: Result) -> list[Markup]:
    predicted = filled(result.predicted)
    parts = [(f"{name}, of the step", _milliseconds(s)) for name, s in predicted.parts.items()]
    sizes = [
        (f"{name}, of memory", readable_size(size))
        for name, size in predicted.memory_parts.items()
        if size
    ]
    help_ = [tag("p", sentence, class_="help") for sentence in _sentences(result, predicted)]
    return [pairs([*parts, *sizes]), *help_]


def _sentences(result: Result, predicted: Predicted) -> Iterator[str]:
    if predicted.reason:
        yield f"No time was predicted: {predicted.reason}."
    if explained := difference(result):
        yield explained
    if predicted.bound_by:
        yield f"Predicted to be bound by {predicted.bound_by}."
    by = "".join(f", {name} {value:g}" for name, value in predicted.constants.items())
    sources = "; ".join(predicted.sources)
    about = f" from {sources}" if sources else ""
    yield f"By {predicted.planner}, before the first step{about}{by}."
    if result.memory.allocated_peak_bytes is None:
        peak = readable_size(result.memory.peak_bytes)
        yield f"The process took {peak}, with Python and its libraries."


def difference(result: Result) -> str | None:
    """What the difference between the two times is made of, as far as it was measured."""
    time, predicted = step_time(result), result.predicted
    if predicted is None or time.predicted is None or time.measured is None or not predicted.parts:
        return None
    steps = result.steps.all - result.steps.warmup
    waited = min(result.time_s.input_wait / steps, time.measured)
    more = time.measured - time.predicted
    rest = more - waited
    longest = max(predicted.parts, key=lambda name: predicted.parts[name])
    part = predicted.parts[longest]
    told = f"The step took {_milliseconds(abs(more))} {'more' if more > 0 else 'less'}"
    told += f" than predicted. It waited {_milliseconds(waited)} for input, which no plan counts"
    factor = (part + rest) / part if part else 0.0
    if factor <= 0:
        return f"{told}."
    return f"{told}; {longest} at {factor:.2f} times its prediction would be the rest."
