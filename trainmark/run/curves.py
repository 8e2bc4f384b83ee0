"""Curves from files: reading `loss.csv`, and thinning what is too long to draw."""

import csv
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from trainmark.errors import InputError
from trainmark.run.runlog import HEADER

MAX_BUCKETS = 200
"""Points drawn of one curve: enough for its shape, few enough to average the noise."""


@dataclass(frozen=True)
class Point:
    """A drawn point: the mean of some measured ones, and their range."""

    x: float
    y: float
    low: float
    high: float
    name: str = ""
    """What it is called where the pointer rests on it; by default its place."""


@dataclass(frozen=True)
class Curve:
    pieces: list[list[Point]]
    """Unbroken lines; a value that is not finite ends one."""
    not_finite: int
    """Rows left out because their value is not a finite number."""

    @property
    def points(self) -> list[Point]:
        return [point for piece in self.pieces for point in piece]


def read_loss(path: Path, buckets: int = MAX_BUCKETS) -> Curve:
    """Loss over samples; empty where the run has no curve."""
    return thin([(samples, loss) for _, samples, loss in _rows_of(path)], buckets)


def read_losses(path: Path) -> list[float]:
    """The loss of every step; empty where the run has no curve."""
    return [loss for _, _, loss in _rows_of(path)]


def _rows_of(path: Path) -> Iterator[tuple[int, int, float]]:
    """(step, samples, loss) of a file; none where there is no file."""
    if not path.is_file():
        return
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        if next(file, "").strip() != ",".join(HEADER):
            raise InputError(f"{path}: expected the header {','.join(HEADER)}.")
        yield from loss_rows(file, path)


def loss_rows(lines: Iterable[str], path: Path) -> Iterator[tuple[int, int, float]]:
    """(step, samples, loss) of the lines after the header of `path`, a loss.csv."""
    for number, row in enumerate(csv.reader(lines), start=2):
        if not row:
            continue
        try:
            step, samples, loss = row
            yield int(step), int(samples), float(loss)
        except ValueError:
            raise InputError(
                f"{path}, line {number}: expected {','.join(HEADER)}; "
                f"received {','.join(row)!r:.60}."
            ) from None


def thin(points: list[tuple[float, float]], buckets: int = MAX_BUCKETS) -> Curve:
    """At most `buckets` points: the mean of each bucket, with its range, so that no spike is lost.

    A bucket without any finite value breaks the line.
    """
    per_bucket = max(1, math.ceil(len(points) / buckets))
    chunks = [points[start : start + per_bucket] for start in range(0, len(points), per_bucket)]
    thinned = [_summarise(chunk) for chunk in chunks]
    pieces = [
        [point for point in group if point is not None]
        for broken, group in groupby(thinned, key=lambda point: point is None)
        if not broken
    ]
    return Curve(pieces, sum(not math.isfinite(y) for _, y in points))


def _summarise(chunk: list[tuple[float, float]]) -> Point | None:
    finite = [(x, y) for x, y in chunk if math.isfinite(y)]
    if not finite:
        return None
    values = [y for _, y in finite]
    mean_x = sum(x for x, _ in finite) / len(finite)
    return Point(mean_x, sum(values) / len(values), min(values), max(values))
