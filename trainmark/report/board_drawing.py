"""What the script of the board's page draws, as plain data."""

import re
from collections.abc import Sequence
from typing import Any

from trainmark.report import published
from trainmark.report.board import MEASURES, Board, Entry, finite
from trainmark.report.sections import followed_split, metric_name
from trainmark.run.result import Result


def drawn(board: Board) -> dict[str, Any]:
    """Everything that the script needs, as plain data without NaN."""
    names = dict.fromkeys(entry.result.run for entry in board.entries)
    return {
        "measures": [{"key": m.key, "label": m.label} for m in MEASURES],
        "runs": [_drawn(entry) for entry in board.entries],
        "published": {name: rows for name in names if (rows := _published(name))},
    }


def _drawn(entry: Entry) -> dict[str, Any]:
    result = entry.result
    return {
        "label": entry.label,
        "run": result.run,
        "case": result.case,
        "precision": result.precision,
        "data": entry.data,
        "workload": result.workload,
        "devices": _devices(result.case),
        "at": entry.at,
        "worse": [change.measure for change in entry.changes if change.worse],
        "values": {m.key: finite(m.of(result)) for m in MEASURES},
        "metric": result.quality.metric,
        "metric_name": metric_name(result),
        "target": finite(result.quality.target),
        "loss": _points([[(p.x, p.y) for p in piece] for piece in entry.loss.pieces]),
        "evaluations": _points([_evaluations(result)]),
        "evaluated_on": followed_split(result),
    }


def _evaluations(result: Result) -> list[tuple[float, float]]:
    metric, split = result.quality.metric, followed_split(result)
    found = [(e.at_sample, finite(e.metrics.get(metric))) for e in result.evaluations
             if e.split == split]  # fmt: skip
    return [(float(at), value) for at, value in found if value is not None]


def _points(pieces: Sequence[Sequence[tuple[float, float]]]) -> list[list[float | None]]:
    """Places and values; between two pieces nothing is drawn."""
    xs: list[float | None] = []
    ys: list[float | None] = []
    for piece in pieces:
        if xs:
            xs.append(None)
            ys.append(None)
        xs += [float(f"{x:.6g}") for x, _ in piece]
        ys += [float(f"{y:.5g}") for _, y in piece]
    return [xs, ys]


def _published(run: str) -> list[dict[str, Any]]:
    """Published rows to draw as lines; corrected ones where a system counts samples twice."""
    systems = published.systems()
    return [
        {
            "label": ", ".join(filter(None, (systems[row.system].by, row.case, row.precision))),
            "devices": _devices(row.case),
            "metric": row.metric,
            "values": {m.key: m.in_row(row) for m in MEASURES},
        }
        for row in published.for_run(run)
        if row.overcount == 1
    ]


def _devices(case: str) -> int | None:
    """The number of devices in HARDWARExNODESxDEVICES."""
    found = re.search(r"(\d+)x(\d+)$", case)
    return int(found[1]) * int(found[2]) if found else None
