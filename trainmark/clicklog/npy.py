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

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

from trainmark import files
from trainmark.clicklog import npy_files, per_column
from trainmark.clicklog.engine import split_binary, summary
from trainmark.clicklog.engine.splits import Split, SplitRule
from trainmark.clicklog.engine.summary import MANIFEST, SCHEMA
from trainmark.clicklog.npy_files import Day, NpyRows
from trainmark.clicklog.sources.source import names_and_sizes
from trainmark.errors import InputError, raise_all
from trainmark.progress import SafeConsole

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
    """Fold ids into tables of at most so many rows, also per column: 40000000,C3=100."""
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
    started = time.perf_counter()
    hotness = days[0].hotness
    caps = per_column.parse(options.max_rows, "--max-rows", len(hotness), minimum=1)
    splits = _split(days, options.test_half)
    total = sum(day.rows for day in days)
    with Progress(console=SafeConsole(stderr=True)) as bar:
        task = bar.add_task("Finding the largest ids", total=2 * total)

        def watched(split: Split) -> Iterator[NpyRows]:
            for block in _blocks(days, split):
                yield block
                bar.advance(task, len(block))

        cardinalities = _cardinalities([watched(split) for split in splits], caps, options.input)
        shape = (cardinalities, days[0].num_numerical)
        bar.update(task, description="Writing")
        with files.building(options.output) as partial:
            writers = [_write(partial, split, watched(split), shape, caps) for split in splits]
            split_binary.write_specs(partial, *shape, metadata={}, hotness=hotness)
            files.write_json(
                partial / MANIFEST,
                {
                    "schema": SCHEMA,
                    "settings": settings,
                    "rows": {split.name: split.rows for split in splits},
                    "click_rate": {
                        split.name: clicks / max(split.rows, 1)
                        for split, (clicks, _) in zip(splits, writers, strict=True)
                    },
                    "not_finite": sum(not_finite for _, not_finite in writers),
                    "cardinalities": cardinalities,
                    "hotness": list(hotness),
                    "seconds": round(time.perf_counter() - started, 3),
                },
            )


# --- splits


def _split(days: list[Day], test_half: Literal["first", "second"]) -> list[Split]:
    """Train, test and validation."""
    if len(days) < 2:
        raise InputError(
            f"The input has 0 rows to train on and {days[0].rows} in its last day; two or more "
            "days are expected."
        )
    return SplitRule(test_half=test_half, rounds_up=True).apply([day.rows for day in days])


def _blocks(days: list[Day], split: Split) -> Iterator[NpyRows]:
    """The split's rows, in order."""
    first = 0
    for day in days:
        if split.start < first + day.rows and first < split.stop:
            row = first
            for block in day.blocks():
                part = block[max(split.start - row, 0) : max(split.stop - row, 0)]
                if len(part):
                    yield part
                row += len(block)
        first += day.rows


# --- ids


def _cardinalities(
    splits: list[Iterator[NpyRows]], caps: list[int | None], source: Path
) -> list[int]:
    """Number of ids of each feature after folding; an `InputError` if that cannot be."""
    lowest, highest = [0] * len(caps), [-1] * len(caps)
    for split in splits:
        for block in split:
            for number, ids in enumerate(block.ids):
                lowest[number] = min(lowest[number], int(ids.min()))
                highest[number] = max(highest[number], int(ids.max()))
    raise_all(
        f"{source}: categorical column {number + 1} has ids from {low} to {high}: hashes, not "
        "rows of a table. Give --max-rows to fold them."
        for number, (low, high, cap) in enumerate(zip(lowest, highest, caps, strict=True))
        if cap is None and (low < 0 or high >= MAX_IDS)
    )
    return [
        # Folding changes nothing where all ids are below the cap.
        high + 1 if cap is None or (low >= 0 and high < cap) else cap
        for low, high, cap in zip(lowest, highest, caps, strict=True)
    ]


def _write(
    partial: Path,
    split: Split,
    blocks: Iterator[NpyRows],
    shape: tuple[list[int], int],
    caps: list[int | None],
) -> tuple[int, int]:
    """Write a split; returns its clicks, and how many numbers were not finite."""
    clicks, not_finite, row = 0, 0, 0
    with split_binary.Writer(partial, split.name, *shape) as writer:
        for block in blocks:
            labels = _labels(block, split, row)
            numbers, odd = _numbers(block, split, row)
            ids = [
                column if cap is None else column % np.int64(cap)
                for column, cap in zip(block.ids, caps, strict=True)
            ]
            writer.append(labels, numbers, ids)
            clicks += int(labels.sum())
            not_finite += odd
            row += len(block)
    return clicks, not_finite


def _labels(block: NpyRows, split: Split, row: int) -> NDArray[np.bool_]:
    wrong = (block.labels != 0) & (block.labels != 1)
    if wrong.any():
        place = int(np.argmax(wrong))
        raise InputError(
            f"Row {row + place} of {split.name} has label {int(block.labels[place])}; 0 or 1 is "
            "expected. (TorchRec writes -1 for Kaggle's test file, which has no labels.)"
        )
    return block.labels.astype(np.bool_)


def _numbers(block: NpyRows, split: Split, row: int) -> tuple[NDArray[np.float16], int]:
    finite = np.isfinite(block.dense)
    numbers = np.where(finite, block.dense, np.float32(0))
    large = np.abs(numbers) > np.finfo(np.float16).max
    if large.any():
        place, column = (int(i) for i in np.argwhere(large)[0])
        raise InputError(
            f"Row {row + place} of {split.name} has {numbers[place, column]} in numerical column "
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
