"""DLRM's input: batches of click rows, from a dataset on disk or made in memory (`rows.py`).

Rows travel in their narrow types (about 90 bytes a row for Criteo) until they are on the device.
A background thread assembles batches ahead of the step.

The order of rows is a function of (seed, epoch): windows of consecutive rows are read in shuffled
order, and rows within a window are shuffled, so that reading stays sequential and any position of
the stream can be found again, at any world size.
"""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainmark import feature_spec
from trainmark.config import SYNTHETIC, filled
from trainmark.embeddings.engine import IdGroup
from trainmark.errors import InputError
from trainmark.workloads.dlrm.rows import Columns, RowSource, SplitBinary, SyntheticRows
from trainmark.workloads.dlrm.runs import DlrmRun

PREFETCHED_BATCHES = 4
MOST_WINDOWS = 2**26  # their order is kept in memory


@dataclass(frozen=True, kw_only=True)
class ClickBatch:
    """One optimiser step's share of a data-parallel rank, in host memory."""

    numerical: Tensor
    """[B, N] float16"""
    labels: Tensor
    """[B] bool"""
    groups: list[IdGroup]
    samples: int
    global_samples: int
    """Samples of all ranks in this step."""
    position: int
    """Samples of all ranks up to the end of this batch's global batch, over all epochs."""
    partial: bool
    """Fewer samples than a full batch, at the end of an epoch."""


class RowOrder:
    """The order of one epoch's rows, a function of `key` = (seed, epoch)."""

    def __init__(self, num_rows: int, shuffle: str, window: int, key: tuple[int, int]) -> None:
        self._num_rows, self._window, self._key = num_rows, window, key
        self._shuffles_rows = shuffle == "rows"
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

    def permutation(self, window: int) -> NDArray[np.int64] | None:
        """The order of a window's rows; None if they come as stored."""
        if not self._shuffles_rows:
            return None
        first, last = self.bounds(window)
        return np.random.default_rng((*self._key, 1 + window)).permutation(last - first)

    def rows(self, window: int) -> NDArray[np.int64]:
        """The global rows of a window, in the order they are read."""
        rows = np.arange(*self.bounds(window))
        permutation = self.permutation(window)
        return rows if permutation is None else rows[permutation]


class ClickData:
    """Batches of one split for one data-parallel rank. Iterate once; `restore` before that.

    Args:
        source: the rows.
        cfg: a resolved configuration.
        split: `train` runs over all epochs in shuffled order; others once, as stored.
        dp_rank, dp_size: which share of every global batch is this rank's.
    """

    def __init__(
        self, source: RowSource, cfg: DlrmRun, split: str, dp_rank: int, dp_size: int
    ) -> None:
        self._source, self._cfg, self.split = source, cfg, split
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._training = split == "train"
        self._batch = (
            filled(cfg.global_batch) if self._training else filled(cfg.eval_batch) * dp_size
        )
        self._epochs = cfg.epochs if self._training else 1
        self._position = 0
        self._order_of_epoch: tuple[int, RowOrder] | None = None
        self._shuffled_window: tuple[tuple[RowOrder, int], Columns] | None = None
        if source.num_rows == 0:
            raise InputError(f"The {split} split has no rows.")
        if source.num_rows / cfg.shuffle_window > MOST_WINDOWS:
            raise InputError(
                f"shuffle_window {cfg.shuffle_window} cuts the {source.num_rows:,} rows of {split} "
                f"into more than {MOST_WINDOWS:,} windows. Raise it."
            )
        if self.rows_per_epoch == 0:
            raise InputError(
                f"The {split} split has {source.num_rows:,} rows, fewer than one global batch "
                f"({self._batch:,}), and last_batch is 'drop'. Lower global_batch."
            )

    @property
    def rows_per_epoch(self) -> int:
        rows = self._source.num_rows
        dropping = self._training and self._cfg.last_batch == "drop"
        return rows // self._batch * self._batch if dropping else rows

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.rows_per_epoch // self._batch)

    def restore(self, state: dict[str, int]) -> None:
        """Begin after `samples` global samples, whatever the world size that trained on them.

        There is no `state()`: batches are made ahead of the step, and only the loop knows how
        many samples were trained on.
        """
        self._position = state["samples"]

    def __iter__(self) -> Iterator[ClickBatch]:
        return _in_background(self._batches())

    def _batches(self) -> Iterator[ClickBatch]:
        position = self._position
        while position < self._epochs * self.rows_per_epoch:
            epoch, start = divmod(position, self.rows_per_epoch)
            stop = min(start + self._batch, self.rows_per_epoch)
            position += stop - start
            share = self._share(start, stop)
            columns = self._read(self._order(epoch), *share)
            yield self._assemble(columns, stop - start, position)

    def _share(self, start: int, stop: int) -> tuple[int, int]:
        """This rank's part of a global batch; parts differ by at most one row."""
        size = stop - start
        return (
            start + size * self._dp_rank // self._dp_size,
            start + size * (self._dp_rank + 1) // self._dp_size,
        )

    def _order(self, epoch: int) -> RowOrder:
        known = self._order_of_epoch  # once: `describe` may be called while the reader runs
        if known is not None and known[0] == epoch:
            return known[1]
        shuffle = self._cfg.shuffle if self._training else "none"
        key = (self._cfg.seed, epoch)
        order = RowOrder(self._source.num_rows, shuffle, self._cfg.shuffle_window, key)
        self._order_of_epoch = (epoch, order)
        return order

    def _read(self, order: RowOrder, start: int, stop: int) -> Columns:
        parts = [self._read_piece(order, w, piece) for w, piece in order.pieces(start, stop)]
        return Columns.join(parts or [self._source.read(0, 0)])

    def _read_piece(self, order: RowOrder, window: int, piece: slice) -> Columns:
        first, last = order.bounds(window)
        permutation = order.permutation(window)
        if permutation is None:
            return self._source.read(first + piece.start, first + piece.stop)
        if self._shuffled_window is None or self._shuffled_window[0] != (order, window):
            columns = self._source.read(first, last).take(permutation)
            self._shuffled_window = ((order, window), columns)
        return self._shuffled_window[1].take(piece)

    def _assemble(self, columns: Columns, global_samples: int, position: int) -> ClickBatch:
        """Contiguous tensors, pinned where they go to a GPU: one per integer type of the ids."""
        groups = []
        for dtype in sorted({ids.dtype for ids in columns.ids}, key=lambda d: d.itemsize):
            features = [i for i, ids in enumerate(columns.ids) if ids.dtype == dtype]
            stacked = np.stack([columns.ids[i] for i in features])
            groups.append(IdGroup(features, self._tensor(stacked)))
        return ClickBatch(
            numerical=self._tensor(columns.numerical),
            labels=self._tensor(columns.labels),
            groups=groups,
            samples=len(columns.labels),
            global_samples=global_samples,
            position=position,
            partial=global_samples < self._batch,
        )

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        # A copy, because a memory-mapped array is read-only and may be cut from a larger one.
        tensor = torch.from_numpy(np.array(array, copy=True, order="C"))
        return tensor.pin_memory() if self._cfg.device == "cuda" else tensor

    def describe(self, position: int) -> str:
        """Which rows the global batch that ends at `position` holds, for an error message."""
        epoch, last = divmod(position - 1, self.rows_per_epoch)
        start = last // self._batch * self._batch
        order = self._order(epoch)
        rows = np.concatenate([order.rows(w)[piece] for w, piece in order.pieces(start, last + 1)])
        shown = ", ".join(str(row) for row in rows[:8])
        return (
            f"{len(rows):,} rows of {self.split} between global rows {rows.min()} and "
            f"{rows.max()}, in this order: {shown}{', ...' if len(rows) > 8 else ''}"
        )


def _in_background(batches: Iterator[ClickBatch]) -> Iterator[ClickBatch]:
    """The same batches, made by a thread that runs a few ahead."""
    ready: queue.Queue[ClickBatch | BaseException | None] = queue.Queue(PREFETCHED_BATCHES)
    abandoned = threading.Event()

    def put(item: ClickBatch | BaseException | None) -> None:
        while not abandoned.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for batch in batches:
                put(batch)
                if abandoned.is_set():
                    return
            put(None)
        except BaseException as error:  # handed to the consumer, who raises it
            put(error)

    threading.Thread(target=work, name="click-reader", daemon=True).start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        abandoned.set()


def build_data(cfg: DlrmRun, split: str, dp_rank: int, dp_size: int) -> ClickData:
    """The batches of `split` for one data-parallel rank."""
    data = filled(cfg.data)
    source: RowSource = (
        SyntheticRows(cfg, split) if data == SYNTHETIC else SplitBinary(Path(data), split)
    )
    return ClickData(source, cfg, split, dp_rank, dp_size)


def held_out_splits(cfg: DlrmRun) -> tuple[str, ...]:
    """`test`, and `validation` where the dataset has one."""
    data = filled(cfg.data)
    if data != SYNTHETIC and not feature_spec.path_of(data, "validation").exists():
        return ("test",)
    return ("test", "validation")
