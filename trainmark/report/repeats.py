"""How the quality of repeats is spread: a histogram, as NVIDIA's stability test has it."""

import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from trainmark.config import OBSERVATION, flatten
from trainmark.report.charts import Bar, nice_step
from trainmark.report.fields import different_fields
from trainmark.report.formats import Titled
from trainmark.report.tables import Grid
from trainmark.run.result import Result

BINS = 8
"""About as many as these, with round borders."""


def histograms(results: Sequence[Result]) -> list[Titled]:
    """One for each case and configuration of a run that has at least two results, which differ in
    nothing that a result depends on but their seed. Those of one run have the same borders."""
    groups: dict[tuple[str, str], dict[Any, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        quality = result.quality
        if quality.value is not None and math.isfinite(quality.value):
            same = result.case, *but_for(result, "seed")
            groups[result.run, quality.metric][same].append(result)
    return [
        _histogram(f"Repeats: {metric} of {run} on {where}", qualities(found), edges)
        for (run, metric), groups_of_run in groups.items()
        if (repeated := [found for found in groups_of_run.values() if len(found) > 1])
        if (edges := borders([value for found in repeated for value in qualities(found)]))
        for found, where in zip(repeated, _differences(repeated), strict=True)
    ]


def but_for(result: Result, *fields: str) -> tuple[tuple[str, str], ...]:
    """A configuration without some of its fields, and without those that only say how a run is
    watched and kept: equal where all others are."""
    left_out = OBSERVATION.union(fields)
    return tuple((k, str(value)) for k, value in flatten(result.config) if k not in left_out)


def qualities(results: Sequence[Result]) -> list[float]:
    return [result.quality.value for result in results if result.quality.value is not None]


def _differences(groups: Sequence[Sequence[Result]]) -> list[str]:
    """Case and precision of each group of repeats, and the fields in which it differs from others
    of the same."""
    named = [f"{first.case}, {first.precision}" for first, *_ in groups]
    fields = different_fields([first for first, *_ in groups])
    texts = [
        ", ".join(f"{name} {values[place]}" for name, *values in fields)
        for place in range(len(groups))
    ]
    return [f"{name}, {text}" if named.count(name) > 1 else name
            for name, text in zip(named, texts, strict=True)]  # fmt: skip


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
