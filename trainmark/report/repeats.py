"""How the quality of repeats is spread: a histogram, as NVIDIA's stability test has it."""

import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

from trainmark.report.charts import Bar, nice_step
from trainmark.report.formats import Titled
from trainmark.report.tables import Grid
from trainmark.run.result import Result

BINS = 8
"""About as many as these, with round borders."""


def histograms(results: Sequence[Result]) -> list[Titled]:
    """One for each case and precision of a run that has at least two results. Those of one run have
    the same borders."""
    groups: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        quality = result.quality
        if quality.value is not None and math.isfinite(quality.value):
            where = f"{result.case}, {result.precision}"
            groups[result.run, quality.metric][where].append(quality.value)
    return [
        _histogram(f"Repeats: {metric} of {run} on {where}", values, edges)
        for (run, metric), by_case in groups.items()
        if (edges := borders([value for values in by_case.values() for value in values]))
        for where, values in by_case.items()
        if len(values) > 1
    ]


def borders(values: Sequence[float]) -> list[float]:
    """Round numbers, the first at or below every value and the last above."""
    low, high = min(values), max(values)
    step = nice_step((high - low) / BINS or abs(high) * 1e-3 or 1e-3)
    first, last = math.floor(low / step), math.floor(high / step) + 1
    return [float(f"{index * step:.10g}") for index in range(first, last + 1)]


def counts(values: Sequence[float], edges: Sequence[float]) -> list[int]:
    """How many values are in each bin, its left border included."""
    places = [min(max(bisect_right(edges, value), 1), len(edges) - 1) - 1 for value in values]
    return [places.count(place) for place in range(len(edges) - 1)]


def _histogram(title: str, values: Sequence[float], edges: Sequence[float]) -> Titled:
    found = counts(values, edges)
    texts = [f"{edge:.6g}" for edge in edges]
    spread = (
        f"{len(values)} runs: mean {statistics.mean(values):.6g}, standard deviation "
        f"{statistics.stdev(values):.2g}, from {min(values):.6g} to {max(values):.6g}."
    )
    rows = [
        [low, high, str(count), "█" * count]
        for low, high, count in zip(texts[:-1], texts[1:], found, strict=True)
    ]
    return Titled(
        title,
        Grid(["from", "to", "runs", "histogram"], rows, [True, True, True, False]),
        (spread,),
        bars=tuple(Bar(f"{row[0]} to {row[1]}", float(row[2]), None, row[2]) for row in rows),
    )
