"""DLRM's input: batches of click rows, from a dataset on disk or made in memory (`rows.py`); those
of the planted Terabyte are made where they are used (`terabyte.py`).

Rows travel in their narrow types (about 90 bytes a row for Criteo) until they are on the device.
Background threads read them, ahead of the step, into the memory that is copied to the device.

The order of rows is a function of (seed, epoch): windows of consecutive rows are read in shuffled
order, and rows within a window are shuffled, so that reading stays sequential and any position of
the stream can be found again, at any world size.
"""

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainmark import checksums
from trainmark.config import SYNTHETIC, filled
from trainmark.embeddings.tables.batch import IdGroup
from trainmark.errors import InputError
from trainmark.hardware.backends import is_accelerator
from trainmark.training.background import LatestCache, in_background
from trainmark.training.batches import BatchCounts, GlobalBatch, RankBatches, rank_shares
from trainmark.training.transfer import Make
from trainmark.workloads.dlrm.rows import (
    Columns,
    RowRange,
    RowSource,
    SplitBinary,
    SyntheticRows,
    has_validation,
    rows_trained_on,
)
from trainmark.workloads.dlrm.runs import TERABYTE, DlrmRun, is_generated, makes_rows_on_gpu
from trainmark.workloads.dlrm.terabyte import TerabyteRows

MAX_READERS = 16  # 8 brought 19 M rows/s from a cold disk, where an H200 took 23
# Batches that wait for a GPU. A disk that is fast enough on average still pauses now and then, for
# a tenth of a second, in which an H200 takes 40 batches.
WAITING_BYTES, MAX_WAITING, MIN_WAITING = 1 << 29, 64, 4
WINDOWS_KEPT = 24  # under shuffle: more than batches in the making are cut from
MAX_WINDOWS = 2**26  # their order is kept in memory


@dataclass(frozen=True, kw_only=True)
class ClickBatch(BatchCounts):
    """One optimiser step's share of a data-parallel rank, in host memory.

    With `make`, its tensors have shapes only, and `make` fills such ones on a GPU.
    """

    numerical: Tensor
    """[B, N] float16, or float32 where the dataset has that"""
    labels: Tensor
    """[B] bool"""
    groups: list[IdGroup]
    global_samples: int
    """Samples of all ranks in this step."""
    make: Make | None = None


class RowOrder:
    """The order of one epoch's rows, a function of `key` = (seed, epoch)."""

    def __init__(self, num_rows: int, shuffle: str, window: int, key: tuple[int, int]) -> None:
        self._num_rows, self._window, self._key = num_rows, window, key
        self.shuffles_rows = shuffle == "rows"
        self._windows = np.arange(-(-num_rows // window))
        if shuffle != "none":
            np.random.default_rng(key).shuffle(self._windows)
        # Stream positions at which each window ends; the short one may come anywhere.
        self._ends = np.cumsum(np.minimum(window, num_rows - self._windows * window))

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, slice]]:
        """The windows that hold stream positions `start` to `stop`, with the part of each."""
        place = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            begin = int(self._ends[place - 1]) if place else 0
            end = min(stop, int(self._ends[place]))
            yield int(self._windows[place]), slice(start - begin, end - begin)
            start, place = end, place + 1

    def bounds(self, window: int) -> tuple[int, int]:
        """First row of a window, and the one after its last."""
        first = window * self._window
        return first, min(first + self._window, self._num_rows)

    def permutation(self, window: int) -> NDArray[np.int64]:
        """The order of a window's rows, where they are shuffled."""
        first, last = self.bounds(window)
        return np.random.default_rng((*self._key, 1 + window)).permutation(last - first)

    def rows(self, window: int) -> NDArray[np.int64]:
        """The global rows of a window, in the order they are read."""
        rows = np.arange(*self.bounds(window))
        return rows[self.permutation(window)] if self.shuffles_rows else rows


class ClickData(RankBatches):
    """Batches of a split's rows, shuffled for training, else as stored."""

    def __init__(
        self, source: RowSource, cfg: DlrmRun, split: str, dp_rank: int, dp_size: int
    ) -> None:
        drops_last = cfg.last_batch == "drop"
        super().__init__(source.num_rows, cfg, split, dp_rank, dp_size, drops_last=drops_last)
        self._source, self._cfg = source, cfg
        self._made_on_gpu: TerabyteRows | None = None
        if isinstance(source, TerabyteRows) and makes_rows_on_gpu(cfg):
            self._made_on_gpu = source
        self._orders = LatestCache[int, RowOrder](most=2)
        self._windows = LatestCache[tuple[int, int], tuple[Columns, NDArray[np.int64]]](
            WINDOWS_KEPT
        )
        if source.num_rows == 0:
            raise InputError(f"The {split} split has no rows.")
        if source.num_rows / cfg.shuffle_window > MAX_WINDOWS:
            raise InputError(
                f"shuffle_window {cfg.shuffle_window} cuts the {source.num_rows:,} rows of {split} "
                f"into more than {MAX_WINDOWS:,} windows. Raise it."
            )
        if self.steps_per_epoch == 0:
            raise InputError(
                f"The {split} split has {source.num_rows:,} rows, fewer than one global batch "
                f"({self._batches.size:,}), and last_batch is 'drop'. Lower global_batch."
            )

    def __iter__(self) -> Iterator[ClickBatch]:
        # A CPU that trains has no cores to spare; one that feeds a GPU has little else to do, and
        # readers mostly wait for the disk.
        batches = self._to_come()
        if self._made_on_gpu is not None:
            return map(partial(self._make_batch, self._made_on_gpu), batches)
        if self._cfg.device == "cpu":
            return in_background(self._read_batch, batches, 1, MIN_WAITING)
        readers = min(MAX_READERS, len(os.sched_getaffinity(0)))
        return in_background(self._read_batch, batches, readers, self._waiting_for_gpu())

    def _waiting_for_gpu(self) -> int:
        """How many batches: as much time as they give, within a modest part of the memory."""
        row_bytes = sum(column.nbytes for column in self._source.kind.room(1).arrays())
        batch_bytes = max(rank_shares(self._batches.size, self._dp_size)) * row_bytes
        return max(MIN_WAITING, min(MAX_WAITING, WAITING_BYTES // batch_bytes))

    def _make_batch(self, rows: TerabyteRows, whole: GlobalBatch) -> ClickBatch:
        """This rank's share of a global batch, to be made ahead of the step by the GPU itself."""
        return dataclasses.replace(
            self._empty_batch(whole), make=rows.maker(self._share(whole).start)
        )

    def _read_batch(self, whole: GlobalBatch) -> ClickBatch:
        """This rank's share of a global batch, read straight into the batch's own memory."""
        share, batch = self._share(whole), self._empty_batch(whole)
        columns, done = self._columns(batch), 0
        for window, piece in self._order(whole.epoch).pieces(share.start, share.stop):
            size = piece.stop - piece.start
            self._read_piece((whole.epoch, window), piece, columns.part(slice(done, done + size)))
            done += size
        return batch

    def _order(self, epoch: int) -> RowOrder:
        return self._orders.get(epoch, self._make_order)

    def _make_order(self, epoch: int) -> RowOrder:
        shuffle = self._cfg.shuffle if self._training else "none"
        key = (self._cfg.seed, epoch)
        return RowOrder(self._source.num_rows, shuffle, self._cfg.shuffle_window, key)

    def _read_piece(self, where: tuple[int, int], piece: slice, into: Columns) -> None:
        """Part of a window, which is named by its epoch and number."""
        epoch, window = where
        order = self._order(epoch)
        if order.shuffles_rows:
            columns, permutation = self._windows.get(where, self._read_window)
            into.take_from(columns, permutation[piece])
        else:
            first, _ = order.bounds(window)
            self._source.read(first + piece.start, first + piece.stop, into)

    def _read_window(self, where: tuple[int, int]) -> tuple[Columns, NDArray[np.int64]]:
        epoch, window = where
        first, last = self._order(epoch).bounds(window)
        columns = self._source.kind.room(last - first)
        self._source.read(first, last, columns)
        return columns, self._order(epoch).permutation(window)

    def _empty_batch(self, whole: GlobalBatch) -> ClickBatch:
        """Contiguous tensors, pinned where they go to a GPU: one per integer type of the ids, and
        number of them."""
        samples, made = len(self._share(whole)), self._made_on_gpu is not None
        # PyTorch keeps and reuses pinned memory.
        pinned = is_accelerator(self._cfg.device) and not made
        room = partial(torch.empty, pin_memory=pinned, device="meta" if made else "cpu")
        numbers = self._source.kind.numerical
        kinds = [(ids.dtype, ids.shape[1:]) for ids in self._source.kind.ids]
        groups = []
        for dtype, of_row in sorted(set(kinds), key=lambda kind: (kind[0].itemsize, kind[1])):
            features = [i for i, kind in enumerate(kinds) if kind == (dtype, of_row)]
            ids = room(len(features), samples, *of_row, dtype=_torch_type(dtype))
            groups.append(IdGroup(features, ids))
        return ClickBatch(
            numerical=room(samples, *numbers.shape[1:], dtype=_torch_type(numbers.dtype)),
            labels=room(samples, dtype=torch.bool),
            groups=groups,
            global_samples=whole.size,
            **self._counts(whole),
        )

    def _columns(self, batch: ClickBatch) -> Columns:
        """The batch's memory as arrays, one per feature."""
        by_feature = {
            feature: ids
            for group in batch.groups
            for feature, ids in zip(group.features, group.ids.numpy(), strict=True)
        }
        ids = [by_feature[feature] for feature in range(len(by_feature))]
        return Columns(batch.numerical.numpy(), batch.labels.numpy(), ids)

    def describe(self, position: int) -> str:
        """Which rows the global batch that ends at `position` holds, for an error message."""
        batch = self._batches.ending_at(position)
        order = self._order(batch.epoch)
        pieces = order.pieces(batch.start, batch.stop)
        rows = np.concatenate([order.rows(window)[piece] for window, piece in pieces])
        shown = ", ".join(str(row) for row in rows[:8])
        return (
            f"{len(rows):,} rows of {self.split} between global rows {rows.min()} and "
            f"{rows.max()}, in this order: {shown}{', ...' if len(rows) > 8 else ''}"
        )


def _torch_type(dtype: "np.dtype[Any]") -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def row_source(cfg: DlrmRun, split: str) -> RowSource:
    """The rows of `split`."""
    data = filled(cfg.data)
    if data == SYNTHETIC:
        return SyntheticRows(cfg, split)
    if data == TERABYTE:
        return TerabyteRows(cfg, split)
    # Held-out rows are read again and again.
    page_cache = cfg.page_cache if split == "train" else "use"
    if split == "test" or not _holds_out_training_rows(cfg):
        return SplitBinary(Path(data), split, page_cache)
    rows = SplitBinary(Path(data), "train", page_cache)
    end = rows_trained_on(cfg, rows.num_rows)
    return RowRange(rows, *((0, end) if split == "train" else (end, rows.num_rows)))


def _holds_out_training_rows(cfg: DlrmRun) -> bool:
    return bool(cfg.validation_share) and not has_validation(Path(filled(cfg.data)))


def build_data(cfg: DlrmRun, split: str, dp_rank: int, dp_size: int) -> ClickData:
    """The batches of `split` for one data-parallel rank."""
    source = row_source(cfg, split)
    if isinstance(source, SplitBinary) and dp_rank == 0:
        source.check_bytes()
    return ClickData(source, cfg, split, dp_rank, dp_size)


GROUPS = "group.bin"


def groups(cfg: DlrmRun, split: str) -> Tensor | None:
    """The number of each row's group, where the data were prepared with `--group`."""
    if is_generated(cfg.data):
        return None
    is_held_out = split == "validation" and _holds_out_training_rows(cfg)
    path = Path(filled(cfg.data)) / ("train" if is_held_out else split) / GROUPS
    if not path.is_file():
        return None
    numbers = np.fromfile(checksums.check_file(path), np.int32)
    return torch.from_numpy(
        numbers[rows_trained_on(cfg, len(numbers)) :] if is_held_out else numbers
    )


def held_out_splits(cfg: DlrmRun) -> tuple[str, ...]:
    """`test`, and `validation` where the dataset has one, or the run makes one."""
    data = filled(cfg.data)
    has_both = is_generated(data) or cfg.validation_share or has_validation(Path(data))
    return ("test", "validation") if has_both else ("test",)
