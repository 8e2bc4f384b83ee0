"""Writes a column of the store in the order of a dataset: training rows shuffled, others as read.

The order of the training rows is found once (`write_order`) and then applied to every column,
as many buckets at a time as memory allows; several processes share the buckets.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainmark.checksums import Checksum
from trainmark.clicklog.arrays import primitives, shuffle
from trainmark.clicklog.arrays.primitives import Array, Scratch
from trainmark.clicklog.engine.splits import RowSet
from trainmark.clicklog.engine.store import BlockRecord, Store

_scratch = Scratch()


@dataclass(frozen=True)
class Part:
    """Places `start` to `stop` of a block."""

    record: BlockRecord
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


def rows_of(parts: Sequence[Part]) -> int:
    """How many rows they have together."""
    return sum(part.rows for part in parts)


def with_rows(parts: Sequence[Part], rows: Array) -> Iterator[tuple[Part, Array]]:
    """Each part with its rows out of those of all, which follow one another."""
    end = 0
    for part in parts:
        start, end = end, end + part.rows
        yield part, rows[start:end]


class Field:
    """One or more columns, from the store to a file."""

    dtype: Any
    """Of the file."""
    row_bytes: int
    """Memory that a row takes while it is read."""
    shape: tuple[int, ...] = ()
    """Of a row."""
    count = 0
    """Of the finished rows, those with what is worth knowing: a click, a rare value, ..."""

    def read(self, parts: Sequence[Part]) -> Array:
        """Rows of the parts, one part after the other; they hold until the next call in this
        thread."""
        rows = _scratch.array("read", (rows_of(parts), *self.shape), self.dtype)
        for part, out in with_rows(parts, rows):
            self.fill(out, part)
        return rows

    def fill(self, out: Array, part: Part) -> None:
        """Set the rows of a part."""
        raise NotImplementedError

    def finish(self, rows: Array) -> Array:
        """The rows as they are written, after counting what is to be counted."""
        return rows

    def take_count(self) -> int:
        """What was counted since this was last asked."""
        count, self.count = self.count, 0
        return count


Buckets = range
"""Consecutive buckets that are handled together."""


class TrainRows:
    """The training rows of a store, bucket by bucket.

    Args:
        store: all rows.
        rows: those that train.
        folder: where the order is kept, a file for each bucket, 4 bytes a row.
    """

    def __init__(self, store: Store, rows: RowSet, folder: Path) -> None:
        self.store, self.rows, self.folder = store, rows, folder
        some = [number for number, r in enumerate(store.records) if not rows.has_none(r)]
        self.records = [store.records[number] for number in some]
        self._bounds = store.bounds[some]
        self._starts = self._bounds.sum(axis=0, dtype=np.int64)
        self.all_buckets = Buckets(0, len(self._starts) - 1)

    def groups(self, rows: int, within: Buckets | None = None) -> Iterator[Buckets]:
        """Buckets in groups of about `rows` rows or fewer, at least one bucket each."""
        within = within or self.all_buckets
        start = within.start
        for bucket in range(start + 1, within.stop):
            if self._starts[bucket + 1] - self._starts[start] > rows:
                yield Buckets(start, bucket)
                start = bucket
        yield Buckets(start, within.stop)

    def shares(self, count: int) -> list[Buckets]:
        """All buckets in about so many groups."""
        return list(self.groups(-(-int(self._starts[-1]) // count)))

    def parts(self, buckets: Buckets) -> list[Part]:
        """Where the rows of these buckets are."""
        starts, stops = self._bounds[:, buckets.start], self._bounds[:, buckets.stop]
        places = zip(self.records, starts.tolist(), stops.tolist(), strict=True)
        return [Part(*place) for place in places]

    def joined(self, rows: Array, buckets: Buckets) -> Iterator[Array]:
        """Each bucket's rows out of those of a group, in input order."""
        bounds = self._bounds[:, buckets.start : buckets.stop + 1].astype(np.int64)
        offsets = np.cumsum(bounds[:, -1] - bounds[:, 0]) - (bounds[:, -1] - bounds[:, 0])
        for index in range(len(buckets)):
            starts = offsets + bounds[:, index] - bounds[:, 0]
            yield primitives.join(rows, starts, bounds[:, index + 1] - bounds[:, index])

    # --- the order

    def find_order(self, buckets: Buckets) -> Iterator[Array]:
        """The order of each bucket's training rows, as places among all its rows."""
        seed, keys, trains = self.store.seed, [], []
        for part in self.parts(buckets):
            record = part.record
            rows = self.store.order(record, part.start, part.stop)
            keys.append(shuffle.keys(seed, record.first_row, rows))
            whole = self.rows.has_all(record)
            trains.append(np.ones(len(rows), bool) if whole else self.rows.mask(record)[rows])
        joined_keys = self.joined(np.concatenate(keys), buckets)
        if all(train.all() for train in trains):
            for bucket_keys in joined_keys:
                places = np.arange(len(bucket_keys), dtype=np.uint64)
                yield shuffle.order_of(bucket_keys, places, self.store.bits)
            return
        by_bucket = [bucket_keys.copy() for bucket_keys in joined_keys]
        joined_trains = self.joined(np.concatenate(trains), buckets)
        for bucket_keys, train in zip(by_bucket, joined_trains, strict=True):
            places = np.flatnonzero(train).astype(np.uint64)
            yield shuffle.order_of(bucket_keys[train], places, self.store.bits)

    def write_order(self, share: Buckets, memory: int) -> None:
        """Find the order of some buckets."""
        for buckets in self.groups(memory // 32, share):
            for bucket, order in enumerate(self.find_order(buckets), buckets.start):
                self._path(bucket).write_bytes(order.data)

    def size(self, bucket: int) -> int:
        """How many training rows a bucket has, when its order is found."""
        return self._path(bucket).stat().st_size // 4

    def _path(self, bucket: int) -> Path:
        return self.folder / f"{bucket}.bin"

    def orders(self, buckets: Buckets) -> Iterator[Array]:
        """The order of each bucket; it is good until the next."""
        for bucket in buckets:
            order = _scratch.array("order", self.size(bucket), np.uint32)
            path = self._path(bucket)
            with path.open("rb", buffering=0) as file:
                if file.readinto(order.view(np.uint8).data) != order.nbytes:
                    raise OSError(f"{path} is shorter than it was when it was written")
            yield order


def in_training_order(
    rows: TrainRows, field: Field, most_rows: int, share: Buckets | None = None
) -> Iterator[Array]:
    """A field of the training rows, bucket by bucket; each is valid until the next.

    Args:
        most_rows: how many are read at a time, or one bucket.
        share: which buckets; all, if none are given.
    """
    for buckets in rows.groups(most_rows, share):
        read = field.read(rows.parts(buckets))
        for joined, order in zip(rows.joined(read, buckets), rows.orders(buckets), strict=True):
            out = _scratch.array("out", (len(order), *joined.shape[1:]), field.dtype)
            primitives.take(joined, order, out)
            yield out
        del read


def write_train(rows: TrainRows, field: Field, path: Path, memory: int, share: Buckets) -> Checksum:
    """Write a field of the training rows of some buckets, shuffled, into a file that is there."""
    place = sum(map(rows.size, range(share.start)))
    check: Checksum | None = None
    with path.open("r+b") as file:
        for bucket_rows in in_training_order(rows, field, memory // field.row_bytes, share):
            out = np.ascontiguousarray(field.finish(bucket_rows))
            if check is None:
                file.seek(place * out[:0].itemsize * math.prod(out.shape[1:]))
                check = Checksum(file.tell())
            check.update(out)
            file.write(out.data)
    return check or Checksum()


def write_in_order(store: Store, rows: RowSet, field: Field, path: Path, memory: int) -> Checksum:
    """Write a field of some rows in input order."""
    check = Checksum()
    with path.open("wb") as file:
        for batch in _batches(store, rows, memory // field.row_bytes):
            parts = [Part(record, 0, record.rows) for record in batch]
            read = field.read(parts)
            for part, stored in with_rows(parts, read):
                out = np.empty(stored.shape, field.dtype)
                primitives.put(stored, store.order(part.record), out)
                wanted = out if rows.has_all(part.record) else out[rows.mask(part.record)]
                finished = np.ascontiguousarray(field.finish(wanted))
                check.update(finished)
                file.write(finished.data)
            del read
    return check


def _batches(store: Store, rows: RowSet, most_rows: int) -> Iterator[list[BlockRecord]]:
    batch: list[BlockRecord] = []
    for record in store.records:
        if rows.has_none(record):
            continue
        if batch and sum(held.rows for held in batch) + record.rows > most_rows:
            yield batch
            batch = []
        batch.append(record)
    if batch:
        yield batch
