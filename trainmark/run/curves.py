"""Curves in files, with a row for every step: writing, continuing, reading, and thinning to draw.

loss.csv     step, samples, loss: what `align` and published systems compare
curves.csv   all else that is known of a step; the loss is in the other file alone
"""

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import TextIO

from trainmark.errors import InputError
from trainmark.files import write_atomically

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
    """What to show where the pointer rests on it; by default its place."""


@dataclass(frozen=True)
class Curve:
    pieces: list[list[Point]]
    """Unbroken lines; a value that is not finite ends one."""
    not_finite: int
    """Rows left out because their value is not a finite number."""

    @property
    def points(self) -> list[Point]:
        return [point for piece in self.pieces for point in piece]


# --- files


@dataclass(frozen=True)
class CurveFile:
    """A CSV file whose rows begin with the number of their step."""

    name: str
    columns: tuple[str, ...]

    @property
    def header(self) -> str:
        return ",".join(self.columns)

    def begin(self, folder: Path, step: int) -> TextIO:
        """Open the file in a run's folder for more rows. Rows after `step` are dropped: the run
        continues from a checkpoint before them, and will write them again."""
        path = folder / self.name
        text = path.read_text(encoding="utf-8") if path.exists() and step else ""
        kept = [line for line in text.splitlines(keepends=True) if self._is_before(line, step)]
        write_atomically(path, "".join([f"{self.header}\n", *kept]))
        return open(path, "a", newline="", encoding="utf-8")

    def _is_before(self, line: str, step: int) -> bool:
        """Whether it is a whole row up to `step`; the end of a run may have cut the last one."""
        at, *others = line.split(",")
        is_whole = line.endswith("\n") and len(others) == len(self.columns) - 1
        return is_whole and at.isdecimal() and int(at) <= step

    def rows(self, path: Path) -> Iterator[tuple[int, list[str]]]:
        """The rows of the file at `path`, each with its line; none where there is no file."""
        if not path.is_file():
            return
        with open(path, newline="", encoding="utf-8", errors="replace") as file:
            if next(file, "").strip() != self.header:
                raise InputError(f"{path}: expected the header {self.header}.")
            yield from ((number, row) for number, row in enumerate(csv.reader(file), 2) if row)


LOSS = CurveFile("loss.csv", ("step", "samples", "loss"))
CURVES = CurveFile(
    "curves.csv",
    (
        *("step", "samples", "lr", "gradient_norm", "loss_scale", "skipped"),
        *("time_s", "samples_per_s", "power_w"),
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The numbers of one step."""

    step: int
    samples: int
    """Samples of all ranks so far."""
    loss: float
    lr: float
    gradient_norm: float | None = None
    loss_scale: float | None = None
    skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """The numbers of all steps between two looks at the loss together."""

    time_s: float
    """Seconds from the start of the run to the later look."""
    samples_per_s: float | None
    power_w: float | None


class CurveWriter:
    """Writes both files of a run, which goes on after `step`."""

    def __init__(self, folder: Path, step: int) -> None:
        self._files = [file.begin(folder, step) for file in (LOSS, CURVES)]

    def add(self, steps: list[Step], stretch: Stretch) -> None:
        """The steps since the last look, and what they took."""
        losses = [f"{at.step},{at.samples},{at.loss!r}\n" for at in steps]
        known = [
            f"{at.step},{at.samples},{at.lr!r},{_cell(at.gradient_norm, '.9g')},"
            f"{_cell(at.loss_scale, '.9g')},{at.skipped:d}"
            for at in steps
        ]
        *others, last = known
        of_stretch = (_cell(value, ".6g") for value in (stretch.samples_per_s, stretch.power_w))
        lines = [f"{row},,,\n" for row in others]
        lines.append(",".join([last, f"{stretch.time_s:.3f}", *of_stretch]) + "\n")
        for file, rows in zip(self._files, (losses, lines), strict=True):
            file.writelines(rows)
            file.flush()

    def close(self) -> None:
        for file in self._files:
            file.close()


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


# --- reading


def read_loss(path: Path, buckets: int = MAX_BUCKETS) -> Curve:
    """Loss over samples; empty where the run has no curve."""
    return thin([(samples, loss) for _, samples, loss in loss_rows(path)], buckets)


def read_losses(path: Path) -> list[float]:
    """The loss of every step; empty where the run has no curve."""
    return [loss for _, _, loss in loss_rows(path)]


def loss_rows(path: Path) -> Iterator[tuple[int, int, float]]:
    """(step, samples, loss) of every row of a loss.csv."""
    for number, row in LOSS.rows(path):
        try:
            step, samples, loss = row
            yield int(step), int(samples), float(loss)
        except ValueError:
            raise _no_row(LOSS, row, number, path) from None


def read_curves(path: Path) -> dict[str, Curve]:
    """The curves of a curves.csv, by column. Those of single steps are over samples, those of
    stretches over seconds; `skipped` counts steps so far. Empty columns are left out."""
    found: dict[str, list[tuple[float, float]]] = {}
    for number, row in CURVES.rows(path):
        try:
            known = dict(zip(CURVES.columns, row, strict=True))
            values = {name: float(text) for name, text in known.items() if text}
            at = values.pop("time_s", math.nan)
            samples = values.pop("samples")
        except (KeyError, ValueError):
            raise _no_row(CURVES, row, number, path) from None
        for name, value in values.items():
            x = at if name in OF_STRETCHES else samples
            found.setdefault(name, []).append((x, value))
    if skips := found.get("skipped"):
        xs, each = zip(*skips, strict=True)
        found["skipped"] = list(zip(xs, accumulate(each), strict=True))
    return {name: thin(points) for name, points in found.items() if name != "step"}


OF_STRETCHES = ("samples_per_s", "power_w")
"""Columns of curves.csv that describe stretches, not steps; they are drawn over time."""


def _no_row(file: CurveFile, row: list[str], number: int, path: Path) -> InputError:
    received = ",".join(row)
    return InputError(f"{path}, line {number}: expected {file.header}; received {received!r:.60}.")


# --- thinning


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
