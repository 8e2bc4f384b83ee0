"""`trainmark prepare synthetic`: a click log with a planted signal, in three formats.

    raw           day_0 ... day_k, tab-separated as Criteo's, for `trainmark prepare criteo`
    split_binary  a dataset that `trainmark train` reads
    npy           day_N_dense.npy, day_N_sparse.npy, day_N_labels.npy, as TorchRec reads them

The last day is there for evaluation: its first half is the test split, the rest the validation
split. `synthetic.json` beside the data holds the settings and the best possible AUC.

Processes make the rows block by block, and each writes its own into the files that they share.
"""

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from trainmark import files, progress
from trainmark.clickdata import feature_spec, terabyte
from trainmark.clickdata.best_auc import NO_ROWS, BinCounts
from trainmark.clickdata.planted import (
    CARDINALITIES,
    MANIFEST,
    NUM_NUMERICAL,
    PlantedClicks,
)
from trainmark.clicklog import synthetic_blocks
from trainmark.clicklog.engine import split_binary
from trainmark.clicklog.engine.splits import Split, SplitRule
from trainmark.clicklog.synthetic_blocks import Block
from trainmark.clicklog.synthetic_files import FORMATS
from trainmark.clicklog.synthetic_logs import Log, TerabyteLog
from trainmark.errors import InputError, raise_all
from trainmark.progress import SafeConsole

TERABYTE_DAY = terabyte.ROWS - terabyte.TRAIN_ROWS
"""Rows of a day: as many as are held out."""


NO_SETTINGS = ("output", "workers")
"""Options that do not change the log."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Generate a click log; with a planted signal, its best possible AUC is known."""

    output: Path
    """Folder to write; it appears when everything is written."""
    like: Literal["demo", "terabyte"] = "demo"
    """demo: a log that two cores learn in a minute; terabyte: rows of the planted Terabyte, as
    `train --data terabyte` makes them, the last day's from those held out."""
    format: Literal["raw", "split_binary", "npy"] = "raw"
    """raw: text days as Criteo's; split_binary: ready for `train`; npy: TorchRec's day files."""
    rows: int | None = None
    """Rows of all days together; by default 1,800,000, of the Terabyte 178 million a day."""
    days: int | None = None
    """Days of equal length (the last takes the remainder); the last is for evaluation. By default
    9, of the Terabyte 24."""
    seed: int = 0
    """Another seed gives another hidden model and other rows."""
    cardinalities: tuple[int, ...] | None = None
    """Number of ids of each categorical column; the Terabyte's ids beyond it become 0, the id of
    rare values (raw days have all values)."""
    num_numerical: int = NUM_NUMERICAL
    """Number of integer columns."""
    ids: Literal["power_law", "uniform"] = "power_law"
    """Distribution of categorical values: by a power law, or uniform."""
    signal: bool = True
    """Draw the labels from a hidden model; without it, labels are independent of the row."""
    workers: int | None = None
    """Processes that make rows; by default one for each core."""


@dataclass(frozen=True, kw_only=True)
class Wanted(Options):
    """Options, with everything filled in that they leave to the log it is to be like."""

    rows: int
    days: int
    cardinalities: tuple[int, ...]
    workers: int

    @property
    def last_day(self) -> int:
        """The row that it begins with."""
        return (self.days - 1) * (self.rows // self.days)

    def settings(self) -> dict[str, Any]:
        """What decides the bytes: as a finished folder records them."""
        return {key: value for key, value in asdict(self).items() if key not in NO_SETTINGS}

    def log(self) -> Log:
        if self.like == "terabyte":
            # Raw values are all there: preparation counts them, and finds the rare ones.
            return TerabyteLog(self.last_day, None if self.format == "raw" else self.cardinalities)
        return PlantedClicks(
            seed=self.seed,
            cardinalities=self.cardinalities,
            num_numerical=self.num_numerical,
            ids=self.ids,
            signal=self.signal,
        )


def prepare(options: Options) -> None:
    """Write the log, unless the folder already holds it."""
    wanted = _filled(options)
    _check(wanted)
    if files.is_finished(wanted.output, MANIFEST, wanted.settings()):
        print(f"{wanted.output} already holds this log; nothing to do.")
    else:
        _generate(wanted)
    _show(wanted.output, files.read_json(wanted.output / MANIFEST))


def _filled(options: Options) -> Wanted:
    is_demo, days = options.like == "demo", options.days
    if days is None:
        days = 9 if is_demo else 24
    filled: dict[str, Any] = {
        "rows": 1_800_000 if is_demo else TERABYTE_DAY * max(days, 0),
        "cardinalities": CARDINALITIES if is_demo else terabyte.VOCABULARY,
        "workers": len(os.sched_getaffinity(0)),
    }
    given = {key: value for key, value in vars(options).items() if value is not None}
    return Wanted(**filled | given | {"days": days})


def _check(wanted: Wanted) -> None:
    problems = []
    if wanted.workers < 1:
        problems.append(f"--workers is {wanted.workers}; at least 1 is expected.")
    if wanted.days < 2:
        problems.append(f"--days is {wanted.days}; at least 2 are needed (the last is for tests).")
    elif wanted.rows < 2 * wanted.days:
        problems.append(f"--rows is {wanted.rows}; at least 2 per day are needed.")
    elif wanted.like == "terabyte":
        problems += _terabyte_problems(wanted)
    if wanted.num_numerical < 0:
        problems.append(f"--num-numerical is {wanted.num_numerical}; 0 or more is expected.")
    if min(wanted.cardinalities, default=2) < 2:
        problems.append(f"--cardinalities has {min(wanted.cardinalities)}; at least 2 is expected.")
    if wanted.seed < 0:
        problems.append(f"--seed is {wanted.seed}; 0 or more is expected.")
    shape = (wanted.num_numerical, len(wanted.cardinalities))
    if wanted.format == "raw" and shape != (13, 26):
        problems.append(
            f"A raw Criteo log has 13 integer and 26 categorical columns, not {shape[0]} and "
            f"{shape[1]}. Use --format split_binary for other shapes."
        )
    raise_all(problems)


def _terabyte_problems(wanted: Wanted) -> Iterator[str]:
    held_out = wanted.rows - wanted.last_day
    if wanted.last_day > terabyte.TRAIN_ROWS or held_out > TERABYTE_DAY:
        yield (
            f"The planted Terabyte has {terabyte.TRAIN_ROWS:,} rows to train on, and "
            f"{TERABYTE_DAY:,} for the last day. Received: --rows {wanted.rows:,} in "
            f"{wanted.days} days. Ask for fewer."
        )
    if len(wanted.cardinalities) != len(terabyte.VOCABULARY):
        yield (
            f"The planted Terabyte has {len(terabyte.VOCABULARY)} categorical columns. Received: "
            f"{len(wanted.cardinalities)} --cardinalities."
        )
    own = Options(output=Path())
    for name in ("seed", "num_numerical", "ids", "signal"):
        if getattr(wanted, name) != getattr(own, name):
            flag = "--no-signal" if name == "signal" else f"--{name.replace('_', '-')}"
            yield f"{flag} is for --like demo: there is one planted Terabyte. Leave it out."


def _pieces(wanted: Wanted) -> list[Split]:
    """The rows of each day or split."""
    per_day = wanted.rows // wanted.days
    bounds = [day * per_day for day in range(wanted.days)] + [wanted.rows]
    if wanted.format != "split_binary":
        days = enumerate(pairwise(bounds))
        return [Split(f"day_{number}", start, stop) for number, (start, stop) in days]
    return SplitRule().apply([bounds[-2], wanted.rows - bounds[-2]])


def _generate(wanted: Wanted) -> None:
    log = wanted.log()
    counts = {"earlier days": NO_ROWS, "last day": NO_ROWS}
    with files.building(wanted.output) as partial:
        with progress.rate_bar("Generating rows", wanted.rows, "M values") as advance:

            def done(block: Block, made: BinCounts) -> None:
                counts["earlier days" if block.start < wanted.last_day else "last day"] += made
                advance(block.stop - block.start)

            form = FORMATS[wanted.format](log, wanted.cardinalities, wanted.num_numerical)
            synthetic_blocks.write(log, form, _pieces(wanted), partial, wanted.workers, done)
        last_day, every_day = counts["last day"], sum(counts.values(), NO_ROWS)
        if not (last_day.clicks.any() and last_day.others.any()):
            raise InputError(
                "All rows of the last day have the same label, so that no AUC can be measured. "
                f"Ask for more --rows than {wanted.rows}, or another --seed."
            )
        # Without a signal there is nothing to reach, and so no best AUC to set a target by.
        metadata = {"best_auc": last_day.auc} if wanted.signal else {}
        facts = {"click_rate": float(every_day.clicks.sum() / every_day.rows)} | metadata
        if wanted.signal:
            facts["best_auc_all_days"] = every_day.auc
        if wanted.format == "split_binary":
            shape = (wanted.cardinalities, wanted.num_numerical)
            split_binary.write_specs(partial, feature_spec.default_spec(*shape, metadata))
        schema = {"schema": "trainmark.synthetic/1"}
        files.write_json(partial / MANIFEST, schema | {"settings": wanted.settings()} | facts)


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
