"""`trainmark prepare synthetic`: a click log with a planted signal, in three formats.

    raw           day_0 ... day_k, tab-separated as Criteo's, for `trainmark prepare criteo`
    split_binary  a dataset that `trainmark train` reads
    npy           day_N_dense.npy, day_N_sparse.npy, day_N_labels.npy, as TorchRec reads them

The last day is there for evaluation: its first half is the test split, the rest the validation
split. `synthetic.json` beside the data holds the settings and the best possible AUC.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress
from rich.table import Table

from trainmark import files
from trainmark.clickdata.numerical import MISSING, log_transform
from trainmark.clickdata.planted import (
    CARDINALITIES,
    MANIFEST,
    MAX_COUNT,
    NUM_NUMERICAL,
    BestAuc,
    PlantedClicks,
    Rows,
)
from trainmark.clicklog.engine import split_binary
from trainmark.clicklog.engine.splits import Split, SplitRule
from trainmark.clicklog.npy_files import DayWriter
from trainmark.errors import InputError, raise_all
from trainmark.progress import SafeConsole


@dataclass(frozen=True, kw_only=True)
class Options:
    """Generate a click log; with a planted signal, its best possible AUC is known."""

    output: Path
    """Folder to write; it appears when everything is written."""
    format: Literal["raw", "split_binary", "npy"] = "raw"
    """raw: text days as Criteo's; split_binary: ready for `train`; npy: TorchRec's day files."""
    rows: int = 1_800_000
    """Rows of all days together."""
    days: int = 9
    """Days of equal length (the last takes the remainder); the last is for evaluation."""
    seed: int = 0
    """Another seed gives another hidden model and other rows."""
    cardinalities: tuple[int, ...] = CARDINALITIES
    """Number of ids of each categorical column."""
    num_numerical: int = NUM_NUMERICAL
    """Number of integer columns."""
    ids: Literal["power_law", "uniform"] = "power_law"
    """How categorical values are distributed: a few very frequent ones, or all alike."""
    signal: bool = True
    """Draw the labels from a hidden model; without, every row is as likely a click."""


def prepare(options: Options) -> None:
    """Write the log, unless the folder already holds it."""
    _check(options)
    settings = {key: v for key, v in asdict(options).items() if key != "output"}
    if files.is_finished(options.output, MANIFEST, settings):
        print(f"{options.output} already holds this log; nothing to do.")
    else:
        _generate(options, settings)
    _show(options.output, files.read_json(options.output / MANIFEST))


def _check(options: Options) -> None:
    problems = []
    if options.days < 2:
        problems.append(f"--days is {options.days}; at least 2 are needed (the last is for tests).")
    elif options.rows < 2 * options.days:
        problems.append(f"--rows is {options.rows}; at least 2 per day are needed.")
    if options.num_numerical < 0:
        problems.append(f"--num-numerical is {options.num_numerical}; 0 or more is expected.")
    if min(options.cardinalities, default=2) < 2:
        problems.append(
            f"--cardinalities has {min(options.cardinalities)}; at least 2 is expected."
        )
    if options.seed < 0:
        problems.append(f"--seed is {options.seed}; 0 or more is expected.")
    shape = (options.num_numerical, len(options.cardinalities))
    if options.format == "raw" and shape != (13, 26):
        problems.append(
            f"A raw Criteo log has 13 integer and 26 categorical columns, not {shape[0]} and "
            f"{shape[1]}. Use --format split_binary for other shapes."
        )
    raise_all(problems)


def _pieces(options: Options) -> list[Split]:
    """The rows of each day or split."""
    per_day = options.rows // options.days
    bounds = [day * per_day for day in range(options.days)] + [options.rows]
    if options.format != "split_binary":
        days = enumerate(pairwise(bounds))
        return [Split(f"day_{number}", start, stop) for number, (start, stop) in days]
    return SplitRule().apply([bounds[-2], options.rows - bounds[-2]])


def _generate(options: Options, settings: dict[str, Any]) -> None:
    log = PlantedClicks(
        seed=options.seed,
        cardinalities=options.cardinalities,
        num_numerical=options.num_numerical,
        ids=options.ids,
        signal=options.signal,
    )
    last_day_start = (options.days - 1) * (options.rows // options.days)
    every_day, last_day = BestAuc(), BestAuc()
    write = WRITERS[options.format](log)
    with (
        files.building(options.output) as partial,
        Progress(console=SafeConsole(stderr=True)) as bar,
    ):
        task = bar.add_task("Generating rows", total=options.rows)

        def watched(piece: Split) -> Iterator[Rows]:
            for rows in log.blocks(piece.start, piece.stop):
                every_day.add(rows)
                if piece.start >= last_day_start:
                    last_day.add(rows)
                yield rows
                bar.advance(task, len(rows))

        for piece in _pieces(options):
            write(partial, piece, watched(piece))
        if not 0 < last_day.click_rate < 1:
            raise InputError(
                "All rows of the last day have the same label, so that no AUC can be measured. "
                f"Ask for more --rows than {options.rows}, or another --seed."
            )
        # Without a signal there is nothing to reach, and so no best AUC to set a target by.
        metadata = {"best_auc": last_day.value} if options.signal else {}
        facts = {"click_rate": every_day.click_rate} | metadata
        if options.signal:
            facts["best_auc_all_days"] = every_day.value
        if options.format == "split_binary":
            split_binary.write_specs(
                partial, options.cardinalities, options.num_numerical, metadata
            )
        schema = {"schema": "trainmark.synthetic/1"}
        files.write_json(partial / MANIFEST, schema | {"settings": settings} | facts)


def _show(output: Path, manifest: dict[str, Any]) -> None:
    settings = manifest["settings"]
    table = Table(title=str(output), show_header=False)
    table.add_row("format", f"{settings['format']}, {settings['days']} days")
    table.add_row("rows", f"{settings['rows']:,}")
    table.add_row("click rate", f"{manifest['click_rate']:.4f}")
    if "best_auc" in manifest:
        table.add_row("best possible AUC, last day", f"{manifest['best_auc']:.4f}")
        table.add_row("best possible AUC, all days", f"{manifest['best_auc_all_days']:.4f}")
    SafeConsole().print(table)


# --- raw text


class _RawWriter:
    """Days of tab-separated text.

    Every field gets its widest form in a matrix of characters with one line per row; unused
    characters are 0 and dropped at the end.
    """

    LABEL = np.frombuffer(b"01", np.uint8)
    HEX_PAIRS = np.frombuffer("".join(f"{i:02x}" for i in range(256)).encode(), np.uint16)
    COUNT_WIDTH = len(str(MAX_COUNT))

    def __init__(self, log: PlantedClicks) -> None:
        self.log = log
        # The text of every possible count; the last entry is the empty field.
        counts = np.arange(-2, MAX_COUNT + 1).astype(f"S{self.COUNT_WIDTH}")
        self.count_text = np.append(counts, b"")

    def __call__(self, partial: Path, piece: Split, blocks: Iterable[Rows]) -> None:
        with (partial / piece.name).open("wb") as file:
            for rows in blocks:
                file.write(self._text(rows).data)

    def _text(self, rows: Rows) -> NDArray[np.uint8]:
        fields = [self.LABEL.take(rows.labels.view(np.uint8))[:, None]]
        fields += [self._counts(column) for column in rows.numerical.T]
        fields += [self._values(number, ids) for number, ids in enumerate(rows.categorical)]
        text = np.empty((len(rows), sum(field.shape[1] + 1 for field in fields)), np.uint8)
        end = 0
        for field in fields:
            start, end = end, end + field.shape[1] + 1
            text[:, start : end - 1] = field
            text[:, end - 1] = ord("\t")
        text[:, -1] = ord("\n")
        return np.asarray(text[text != 0])

    def _counts(self, counts: NDArray[np.int32]) -> NDArray[np.uint8]:
        index = np.where(counts == MISSING, len(self.count_text) - 1, counts + 2)
        return self.count_text.take(index).view(np.uint8).reshape(len(counts), -1)

    def _values(self, column: int, ids: NDArray[np.int32]) -> NDArray[np.uint8]:
        big_endian = self.log.values(column, ids).astype(">u4").view(np.uint8)
        text = self.HEX_PAIRS.take(big_endian).view(np.uint8).reshape(len(ids), -1)
        text[ids == 0] = 0
        return text


# --- the other formats


class _NpyWriter:
    """TorchRec's three arrays per day."""

    def __init__(self, log: PlantedClicks) -> None:
        self.log = log

    def __call__(self, partial: Path, piece: Split, blocks: Iterable[Rows]) -> None:
        shape = (self.log.num_numerical, len(self.log.cardinalities))
        day = int(piece.name.removeprefix("day_"))
        writer = DayWriter(partial, day, piece.stop - piece.start, *shape)
        for rows in blocks:
            # TorchRec takes a missing integer for a 0, so that it is ln 3 there, not 0.
            counts = np.where(rows.numerical == MISSING, 0, rows.numerical)
            writer.append(rows.labels, np.log(counts + np.float32(3)), rows.categorical)


class _SplitBinaryWriter:
    """The dataset that `trainmark train` reads. The rows need no shuffling."""

    def __init__(self, log: PlantedClicks) -> None:
        self.log = log

    def __call__(self, partial: Path, piece: Split, blocks: Iterable[Rows]) -> None:
        shape = (self.log.cardinalities, self.log.num_numerical)
        with split_binary.Writer(partial, piece.name, *shape) as writer:
            for rows in blocks:
                writer.append(rows.labels, log_transform(rows.numerical), rows.categorical)


WRITERS: dict[str, Callable[[PlantedClicks], Callable[[Path, Split, Iterable[Rows]], None]]]
WRITERS = {"raw": _RawWriter, "npy": _NpyWriter, "split_binary": _SplitBinaryWriter}
