"""Where click rows come from: a dataset on disk, or a generator in memory."""

import os
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from trainmark.clickdata import feature_spec, planted, spec_rules, terabyte
from trainmark.clickdata.counters import random_bits
from trainmark.clickdata.numerical import log_transform
from trainmark.clickdata.planted import BLOCK_ROWS, PlantedClicks
from trainmark.config import filled
from trainmark.errors import InputError
from trainmark.hardware.devices import host_memory_bytes
from trainmark.workloads.dlrm.runs import DlrmRun, PageCache

SYNTHETIC_HELD_OUT = 131_072  # rows of test and of validation, at most
UNIFORM_OFFSET = np.float32(3.83)  # of the logit: 3.3 % clicks, as in Criteo's log
DISK_BLOCK = 512  # a disk with larger ones refuses, and is read through the page cache
MIN_DIRECT = 1 << 16  # bytes; smaller reads are better off with the system's reading ahead


@dataclass(frozen=True)
class Columns:
    """Rows in the types they are stored in: numerical [n, N], labels [n], ids one [n] a feature, or
    [n, hotness]."""

    numerical: NDArray[np.floating]
    labels: NDArray[np.bool_]
    ids: list[NDArray[Any]]

    def room(self, num_rows: int) -> "Columns":
        """Room for so many rows of this kind."""
        columns = (np.empty((num_rows, *c.shape[1:]), c.dtype) for c in self.arrays())
        numerical, labels, *ids = columns
        return Columns(numerical, labels, ids)

    def arrays(self) -> list[NDArray[Any]]:
        return [self.numerical, self.labels, *self.ids]

    def part(self, rows: slice) -> "Columns":
        """A view of consecutive rows."""
        return Columns(self.numerical[rows], self.labels[rows], [c[rows] for c in self.ids])

    def copy_from(self, other: "Columns") -> None:
        for mine, theirs in zip(self.arrays(), other.arrays(), strict=True):
            np.copyto(mine, theirs)

    def take_from(self, other: "Columns", rows: NDArray[np.int64]) -> None:
        for mine, theirs in zip(self.arrays(), other.arrays(), strict=True):
            # Any mode but `raise` writes straight into `out`; these rows are never out of range.
            np.take(theirs, rows, axis=0, out=mine, mode="clip")


def no_rows(
    num_numerical: int, numerical_type: DTypeLike, ids: Iterable[tuple[DTypeLike, int]]
) -> Columns:
    """None, of a kind.

    Args:
        ids: the type of each categorical feature's ids, and how many a row has.
    """
    return Columns(
        np.empty((0, num_numerical), numerical_type),
        np.empty(0, np.bool_),
        [np.empty((0,) if hotness == 1 else (0, hotness), dtype) for dtype, hotness in ids],
    )


class RowSource(Protocol):
    """Anything that has rows: files, or a generator. Several threads read at a time."""

    num_rows: int
    kind: Columns
    """None of its rows: they all have these types and shapes."""

    def read(self, start: int, stop: int, into: Columns) -> None:
        """Fill `into` with rows `start` to `stop`."""
        ...


class SplitBinary:
    """A split on disk, read straight into the batch: no copy in between, no page faults.

    Args:
        folder: where its `feature_spec.yaml` lies.
        split: which one.
        page_cache: see `DlrmRun`.
    """

    def __init__(self, folder: Path, split: str, page_cache: PageCache = "use") -> None:
        path = feature_spec.path_of(folder, split)
        self._spec = feature_spec.read(path)
        spec_rules.check(self._spec, mappings=_mappings(split), source=str(path))
        self.num_rows = feature_spec.count_rows(self._spec, folder, split)
        types = (str(self._spec.feature_spec[name].dtype) for name in self._spec.categorical)
        self.kind = no_rows(
            len(self._spec.numerical),
            self._spec.numerical_dtype,
            zip(types, self._spec.hotness, strict=True),
        )
        self._folder, self._split = folder, split
        self._files = self._spec.files(split)
        self._descriptors = {file: self._open(file) for file in set(self._files.values())}
        is_large = page_cache == "auto" and self._num_bytes() > host_memory_bytes() // 2
        self._direct = self._open_directly() if is_large or page_cache == "bypass" else {}

    def check_bytes(self) -> None:
        """Refuse files that are not as they were written."""
        feature_spec.check_bytes(self._spec, self._folder, self._split)

    def _num_bytes(self) -> int:
        return sum(os.fstat(descriptor).st_size for descriptor in self._descriptors.values())

    def _open(self, file: str, flags: int = 0) -> int:
        descriptor = os.open(self._folder / file, os.O_RDONLY | flags)
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def _open_directly(self) -> dict[str, int]:
        """Descriptors that go past the page cache; none where there are no such."""
        try:
            return {file: self._open(file, os.O_DIRECT) for file in self._descriptors}
        except (AttributeError, OSError):  # the system, or the file system
            return {}

    def read(self, start: int, stop: int, into: Columns) -> None:
        self._read_file(self._spec.label, start, into.labels)
        self._check_labels(into.labels.view(np.uint8), start)
        if self._spec.numerical:
            self._read_file(self._spec.numerical[0], start, into.numerical)
        for name, ids in zip(self._spec.categorical, into.ids, strict=True):
            self._read_file(name, start, ids)
        self._check_ids(into, start)

    def _read_file(self, feature: str, start: int, into: NDArray[Any]) -> None:
        """Fill `into` with rows from `start` on of the file that holds `feature`."""
        room = into.reshape(-1).view(np.uint8)
        row_bytes = into.itemsize * (into.shape[1] if into.ndim > 1 else 1)
        offset = start * row_bytes
        while room.size:
            count = self._read_some(self._files[feature], offset, room)
            if count == 0:
                raise InputError(
                    f"{self._path(feature)} ends at byte {offset}, earlier than when the run "
                    "began. Do not change a dataset while it is in use."
                )
            room, offset = room[count:], offset + count

    def _read_some(self, file: str, offset: int, room: NDArray[np.uint8]) -> int:
        """Fill `room`, or a part of it; the number of bytes."""
        if file in self._direct and _suits_disk(offset, room):
            with suppress(OSError):  # not to this memory, or not in such blocks
                return os.preadv(self._direct[file], [room.data], offset)
        return os.preadv(self._descriptors[file], [room.data], offset)

    def _path(self, feature: str) -> Path:
        return self._folder / self._files[feature]

    def _check_labels(self, labels: NDArray[np.uint8], start: int) -> None:
        if labels.size and labels.max() > 1:
            bad = int(np.argmax(labels > 1))
            raise InputError(
                f"{self._path(self._spec.label)}: row {start + bad} has label {labels[bad]}; "
                "0 or 1 is expected."
            )

    def _check_ids(self, columns: Columns, start: int) -> None:
        """An id outside its table would read, and later write, another table's rows."""
        for name, rows, ids in zip(
            self._spec.categorical, self._spec.cardinalities, columns.ids, strict=True
        ):
            feature = self._spec.feature_spec[name]
            none = int(feature.varies)  # -1 is none, then
            # Negative numbers are large ones without the sign, so that one pass finds both.
            unsigned = (ids + ids.dtype.type(1) if none else ids).view(f"u{ids.itemsize}")
            if ids.size and unsigned.max() >= rows + none:
                bad = int(np.argmax((ids < -none) | (ids >= rows)))
                row = start + bad // feature.hotness
                raise InputError(
                    f"{self._path(name)}: row {row} has id {int(ids.flat[bad])}; {name} has "
                    f"ids 0 to {rows - 1}{', or -1 for none,' * none} in feature_spec.yaml. "
                    "Prepare the data again, or correct the cardinality."
                )


class RowRange:
    """Consecutive rows of a source, as a source."""

    def __init__(self, source: RowSource, start: int, stop: int) -> None:
        self._source, self._start = source, start
        self.num_rows, self.kind = stop - start, source.kind

    def read(self, start: int, stop: int, into: Columns) -> None:
        self._source.read(self._start + start, self._start + stop, into)


def has_validation(folder: Path) -> bool:
    """Whether a dataset has a validation split of its own."""
    return feature_spec.path_of(folder, "validation").exists()


def rows_trained_on(cfg: DlrmRun, rows: int) -> int:
    """How many of a dataset's training rows are trained on. The others validate, as
    `validation_share` says; at least one of each, as long as there are two."""
    if not cfg.validation_share or has_validation(Path(filled(cfg.data))):
        return rows
    return rows - min(max(round(rows * cfg.validation_share), 1), rows - 1)


def _suits_disk(offset: int, room: NDArray[np.uint8]) -> bool:
    """Whether to read past the page cache: aligned, and large enough to be worth it."""
    aligned = all(n % DISK_BLOCK == 0 for n in (room.ctypes.data, offset, room.size))
    return aligned and room.size >= MIN_DIRECT


def _mappings(split: str) -> tuple[str, ...]:
    return ("validation",) if split == "validation" else ("train", "test")


@dataclass(frozen=True)
class _Block:
    """Rows that were made, and how probable a click each is."""

    columns: Columns
    probability: NDArray[np.float32]


class SyntheticRows:
    """Rows made in memory, a function of (seed, row).

    `planted` rows have power-law ids and a hidden signal. `uniform` ids say nothing; the clicks
    follow the first numerical feature, so that a loss can fall. Rows repeat after
    `DISTINCT_ROWS`, so that a long run costs no more memory or time to make than a short one. Their
    labels are then drawn anew: a network that sees a row with the same label again and again learns
    it by heart, and at the published learning rates that ends in a loss that is not finite.
    """

    DISTINCT_ROWS = 1 << 21

    def __init__(self, cfg: DlrmRun, split: str) -> None:
        self._first, last = synthetic_range(cfg, split)
        self.num_rows = last - self._first
        self._cfg = cfg
        self._planted = planted_clicks(cfg) if cfg.synthetic_ids == "planted" else None
        types = (feature_spec.dtype_for(rows) for rows in cfg.model.table_rows)
        # Of each feature one id: `multi_hot.py` adds others.
        self.kind = no_rows(cfg.model.numerical_features, np.float16, ((t, 1) for t in types))
        self._blocks: dict[int, _Block] = {}
        self._stream = np.random.default_rng((cfg.seed, 1)).integers(2**64, dtype=np.uint64)

    def read(self, start: int, stop: int, into: Columns) -> None:
        done = 0
        while start + done < stop:
            position = (start + done) % self.DISTINCT_ROWS
            block, offset = divmod(self._first + position, BLOCK_ROWS)
            size = min(stop - start - done, BLOCK_ROWS - offset, self.DISTINCT_ROWS - position)
            part, made = into.part(slice(done, done + size)), self._block(block)
            rows = slice(offset, offset + size)
            part.copy_from(made.columns.part(rows))
            if start + done >= self.DISTINCT_ROWS:
                part.labels[:] = self._drawn(start + done, made.probability[rows])
            done += size

    def _drawn(self, start: int, probability: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Labels of rows from `start` on, a function of the row."""
        numbers = np.arange(start, start + len(probability), dtype=np.uint64)
        bits = random_bits(numbers, self._stream) >> np.uint64(40)
        return np.asarray(bits.astype(np.float32) * np.float32(2**-24) < probability)

    def _block(self, number: int) -> "_Block":
        if number not in self._blocks:
            self._blocks[number] = self._make_block(number)
        return self._blocks[number]

    def _make_block(self, number: int) -> "_Block":
        if self._planted is None:
            return self._uniform_block(number)
        rows = self._planted.rows(number * BLOCK_ROWS, (number + 1) * BLOCK_ROWS)
        ids = [c.astype(i.dtype) for c, i in zip(rows.categorical, self.kind.ids, strict=True)]
        columns = Columns(log_transform(rows.numerical), rows.labels, ids)
        return _Block(columns, rows.probability)

    def _uniform_block(self, number: int) -> "_Block":
        model = self._cfg.model
        random = np.random.default_rng((self._cfg.seed, number))
        dense = random.standard_normal((BLOCK_ROWS, model.numerical_features), np.float32)
        signal = dense[:, 0] if model.numerical_features else np.zeros(BLOCK_ROWS, np.float32)
        probability = 1 / (1 + np.exp(UNIFORM_OFFSET - signal))
        clicks = random.random(BLOCK_ROWS, np.float32) < probability
        ids = [
            random.integers(0, rows, BLOCK_ROWS, kind.dtype)
            for rows, kind in zip(model.table_rows, self.kind.ids, strict=True)
        ]
        return _Block(Columns(dense.astype(np.float16), clicks, ids), probability)


def planted_clicks(cfg: DlrmRun) -> PlantedClicks:
    """The log that `--data synthetic` draws planted rows from."""
    return PlantedClicks(
        seed=cfg.seed,
        cardinalities=cfg.model.table_rows,
        num_numerical=cfg.model.numerical_features,
        # The published learning rates are for as few clicks as Criteo's log has.
        click_rate=planted.CLICK_RATE if cfg.name == "dlrm-demo" else terabyte.CLICK_RATE,
    )


def synthetic_range(cfg: DlrmRun, split: str) -> tuple[int, int]:
    """The rows of a synthetic split: train first, then test and validation, equally long."""
    train = filled(cfg.synthetic_rows)
    held_out = min(train, SYNTHETIC_HELD_OUT)
    start = {"train": 0, "test": train, "validation": train + held_out}[split]
    return start, start + (train if split == "train" else held_out)
