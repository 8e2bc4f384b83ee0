"""`trainmark prepare npy`: TorchRec's day files -> the dataset that `trainmark train` reads.

What TorchRec's loader does is done here once, with the same result:

- The last day is for evaluation. Its first half (rounded up) is the validation split and the rest
  the test split; all earlier days are the training split. Rows keep their order.
- With `--max-rows`, ids are folded into each table by the remainder (numpy's `%`, never negative).
  Files written before October 2024 hold hashes in int32, where those of 2**31 and above have
  become negative; they are folded as they are, as TorchRec does. (So an int32 and an int64 file of
  the same log give those hashes different ids.)
- Without it the ids must be table rows already: not negative, and each table gets the largest id
  plus one.

Numbers are stored as float16, as everywhere in `split_binary`. Those that are not finite (older
TorchRec took ln(x + 3) of -3 and less) become 0.0, as in NVIDIA's preparation, and are counted.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trainmark import files, progress
from trainmark.clickdata import feature_spec
from trainmark.clickdata.feature_spec import FeatureSpec
from trainmark.clicklog import npy_files, per_column
from trainmark.clicklog.engine import split_binary, summary
from trainmark.clicklog.engine.splits import Split, SplitRule
from trainmark.clicklog.engine.summary import MANIFEST, SCHEMA
from trainmark.clicklog.engine.turns import Turns
from trainmark.clicklog.engine.workers import Call, Workers
from trainmark.clicklog.npy_files import Day, NpyRows
from trainmark.clicklog.sources.source import names_and_sizes
from trainmark.errors import InputError, raise_all
from trainmark.progress import SafeConsole

STRETCH_ROWS = 1 << 20
"""What a process reads or writes at a time, where files are mapped, at most."""
MIN_STRETCH_ROWS = 1 << 16
STRETCHES = 4
"""For each process, where there are rows enough."""
MAX_IDS = 2**31 - 2
"""As many as `split_binary` can number."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Turn TorchRec's day_N_dense, _sparse and _labels files into a dataset for training."""

    input: Path
    """Folder with day_N_{dense,sparse,labels}.npy, or sparse_multi_hot.npz."""
    output: Path
    """Folder to write; it appears when everything is written."""
    max_rows: str | None = None
    """Fold ids into tables of at most this many rows, also per column: 40000000,C3=100."""
    test_half: Literal["first", "second"] = "second"
    """Which half of the last day is the test split (TorchRec: the second); the other validates."""


def prepare(options: Options) -> None:
    """Write the dataset, unless the folder already holds it."""
    days = npy_files.find_days(options.input)
    settings = {
        "input": names_and_sizes([path for day in days for path in day.paths()]),
        "max_rows": options.max_rows,
        "test_half": options.test_half,
    }
    if files.is_finished(options.output, MANIFEST, settings):
        print(f"{options.output} already holds this dataset; nothing to do.")
    else:
        _build(options, days, settings)
    _show(options.output, files.read_json(options.output / MANIFEST))


def _build(options: Options, days: list[Day], settings: dict[str, Any]) -> None:
    hotness = days[0].hotness
    caps = per_column.parse(options.max_rows, "--max-rows", len(hotness), minimum=1)
    splits = _split(days, options.test_half)
    cores = len(os.sched_getaffinity(0))
    stretches = list(_stretches(days, splits, _rows(days) // (STRETCHES * cores)))
    workers = min(cores, len(stretches))

    def shared(served: _Reader | _Writer, name: str) -> list[Any]:
        processes, found = Workers(served, workers), [None] * len(stretches)
        with progress.rate_bar(name, _rows(days), "M values") as advance:

            def work(worker: Call, number: int, stretch: Stretch) -> None:
                found[number] = worker("do", stretch)
                advance(stretch.stop - stretch.start)

            Turns(iter(stretches)).run(processes, work)
        return found

    extremes = shared(_Reader(days), "Finding the largest ids")
    cardinalities = _cardinalities(extremes, caps, options.input)
    numerical = days[0].num_numerical
    spec = feature_spec.default_spec(cardinalities, numerical, hotness=hotness)
    with files.building(options.output) as partial:
        for split in splits:
            split_binary.Writer(partial, split.name, spec).close()
        found = shared(_Writer(days, partial, spec, caps), "Writing")
        split_binary.write_specs(partial, spec)
        counted = list(zip(stretches, found, strict=True))
        clicks = {
            split.name: sum(clicks for part, (clicks, _) in counted if part.split == split.name)
            for split in splits
        }
        files.write_json(
            partial / MANIFEST,
            {
                "schema": SCHEMA,
                "settings": settings,
                "rows": {split.name: split.rows for split in splits},
                "click_rate": {
                    split.name: clicks[split.name] / max(split.rows, 1) for split in splits
                },
                "not_finite": sum(not_finite for _, not_finite in found),
                "cardinalities": cardinalities,
                "hotness": list(hotness),
            },
        )


def _rows(days: list[Day]) -> int:
    return sum(day.rows for day in days)


# --- splits


def _split(days: list[Day], test_half: Literal["first", "second"]) -> list[Split]:
    """Train, test and validation."""
    if len(days) < 2:
        raise InputError(
            f"The input has 0 rows to train on and {days[0].rows} in its last day; two or more "
            "days are expected."
        )
    return SplitRule(test_half=test_half, rounds_up=True).apply([day.rows for day in days])


@dataclass(frozen=True)
class Stretch:
    """Rows of a day that are in one split, and the work of one process."""

    day: int
    """Its place in the list of days."""
    start: int
    stop: int
    split: str
    row: int
    """Of the first one, in its split."""


def _stretches(days: list[Day], splits: list[Split], rows: int) -> Iterator[Stretch]:
    """All rows, about so many at a time."""
    first = 0
    for number, day in enumerate(days):
        step = min(max(rows, MIN_STRETCH_ROWS), STRETCH_ROWS)
        step = step if day.is_mapped else max(day.rows, 1)
        for split in splits:
            begin, end = max(split.start - first, 0), min(split.stop - first, day.rows)
            for start in range(begin, end, step):
                stop = min(start + step, end)
                yield Stretch(number, start, stop, split.name, first + start - split.start)
        first += day.rows


# --- in a process


class _Reader:
    """Finds the smallest and the largest id of every feature."""

    def __init__(self, days: list[Day]) -> None:
        self._days = days

    def do(self, stretch: Stretch) -> list[tuple[int, int]]:
        blocks = self._days[stretch.day].blocks(stretch.start, stretch.stop)
        of_blocks = [[(int(ids.min()), int(ids.max())) for ids in block.ids] for block in blocks]
        return _joined(of_blocks)


def _joined(extremes: list[list[tuple[int, int]]]) -> list[tuple[int, int]]:
    of_features = zip(*extremes, strict=True)
    return [(min(low for low, _ in f), max(high for _, high in f)) for f in map(list, of_features)]


class _Writer:
    """Writes rows to their places; their clicks, and how many numbers were not finite."""

    def __init__(
        self, days: list[Day], folder: Path, spec: FeatureSpec, caps: list[int | None]
    ) -> None:
        self._days, self._folder, self._spec, self._caps = days, folder, spec, caps

    def do(self, stretch: Stretch) -> tuple[int, int]:
        clicks, not_finite, row = 0, 0, stretch.row
        with split_binary.Writer(self._folder, stretch.split, self._spec, row) as writer:
            for block in self._days[stretch.day].blocks(stretch.start, stretch.stop):
                labels = _labels(block, stretch.split, row)
                numbers, odd = _numbers(block, stretch.split, row)
                ids = [
                    column if cap is None else column % np.int64(cap)
                    for column, cap in zip(block.ids, self._caps, strict=True)
                ]
                writer.append(labels, numbers, ids)
                clicks += int(labels.sum())
                not_finite += odd
                row += len(block)
        return clicks, not_finite


# --- ids


def _cardinalities(
    extremes: list[list[tuple[int, int]]], caps: list[int | None], source: Path
) -> list[int]:
    """Number of ids of each feature after folding; an `InputError` if that cannot be."""
    of_features = _joined(extremes)
    raise_all(
        f"{source}: categorical column {number + 1} has ids from {low} to {high}: hashes, not "
        "rows of a table. Give --max-rows to fold them."
        for number, ((low, high), cap) in enumerate(zip(of_features, caps, strict=True))
        if cap is None and (low < 0 or high >= MAX_IDS)
    )
    return [
        # Folding changes nothing where all ids are below the cap.
        high + 1 if cap is None or (low >= 0 and high < cap) else cap
        for (low, high), cap in zip(of_features, caps, strict=True)
    ]


def _labels(block: NpyRows, split: str, row: int) -> NDArray[np.bool_]:
    wrong = (block.labels != 0) & (block.labels != 1)
    if wrong.any():
        place = int(np.argmax(wrong))
        raise InputError(
            f"Row {row + place} of {split} has label {int(block.labels[place])}; 0 or 1 is "
            "expected. (TorchRec writes -1 for Kaggle's test file, which has no labels.)"
        )
    return block.labels.astype(np.bool_)


def _numbers(block: NpyRows, split: str, row: int) -> tuple[NDArray[np.float16], int]:
    finite = np.isfinite(block.dense)
    numbers = np.where(finite, block.dense, np.float32(0))
    large = np.abs(numbers) > np.finfo(np.float16).max
    if large.any():
        place, column = (int(i) for i in np.argwhere(large)[0])
        raise InputError(
            f"Row {row + place} of {split} has {numbers[place, column]} in numerical column "
            f"{column + 1}, too large for float16. TorchRec's files hold logarithms; take them."
        )
    return numbers.astype(np.float16), int(finite.size - finite.sum())


def _show(output: Path, manifest: dict[str, Any]) -> None:
    console = SafeConsole()
    summary.show_splits(output, manifest)
    cardinalities, hotness = manifest["cardinalities"], max(manifest["hotness"], default=1)
    several = f", up to {hotness} ids per feature" if hotness > 1 else ""
    console.print(f"{len(cardinalities)} tables, {sum(cardinalities):,} rows together{several}")
    if manifest["not_finite"]:
        console.print(f"{manifest['not_finite']:,} numbers were not finite and became 0.0")
