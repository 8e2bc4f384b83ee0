"""What the executors do: Arrow batches in, Arrow batches out, by the code of the embedded engine.

Rows travel as *blocks*: the bytes of the files that engine/store.py writes, in input order, a few
megabytes each. To Spark they are binary values beside a few numbers to group and sort by, so there
is nothing that it, or Python, does per row.
"""

import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trainmark.clicklog.arrays import counting, shuffle
from trainmark.clicklog.arrays.counting import Counts
from trainmark.clicklog.arrays.primitives import NO_KEYS, Array, Scratch
from trainmark.clicklog.engine import store as stores
from trainmark.clicklog.engine.arrange import Field, Part
from trainmark.clicklog.engine.column_reader import ColumnReader
from trainmark.clicklog.engine.fields import CategoricalField, LabelField, NumericalField
from trainmark.clicklog.engine.splits import Split
from trainmark.clicklog.engine.store import BlockRecord, Store
from trainmark.clicklog.engine.vocabulary import Rules, SpecialIds, Vocabulary
from trainmark.clicklog.sources.criteo_text import CriteoSource
from trainmark.clicklog.sources.rows import Schema
from trainmark.clicklog.sources.source import Position
from trainmark.clicklog.sources.text_files import PADDING, Text

Batches = Iterable[pa.RecordBatch]
Task = Callable[[Batches], Iterator[pa.RecordBatch]]
Place = tuple[int, int, int]
"""Of a block in the input: file, offset of the split that Spark read, number within it."""

FACTS = "facts"
"""Beside the names of files: what was counted in some rows."""
NO_LIMIT = 1 << 40
VALUE_BITS = 32

_scratch = Scratch()


def _row(*, data: bytes, **values: Any) -> pa.RecordBatch:
    """A batch of one row."""
    ends = pa.py_buffer(np.array([0, len(data)], np.int32))
    column = pa.Array.from_buffers(pa.binary(), 1, [None, ends, pa.py_buffer(data)])  # no copy
    others = {name: pa.array([value]) for name, value in values.items()}
    return pa.RecordBatch.from_pydict({**others, "data": column})


def _rows(batches: Batches) -> Iterator[tuple[Any, ...]]:
    """The values of each row; the last one, its data, as a buffer."""
    for batch in batches:
        *others, column = batch.columns
        data = (value.as_buffer() for value in column)
        yield from zip(*(other.to_pylist() for other in others), data, strict=True)


# --- lines to blocks


@dataclass(frozen=True)
class Parse:
    """Lines (file, offset of Spark's split, text with its line end) to blocks."""

    source: CriteoSource

    gives = "file long, block long, part long, lines long, record string, bad string, data binary"

    def __call__(self, batches: Batches) -> Iterator[pa.RecordBatch]:
        parts = Counter[tuple[int, int]]()
        nowhere = {"index": 0, "first_row": 0, "stop": Position()}  # known when all are counted
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for file, block, text in itertools.chain.from_iterable(map(_texts, batches)):
                rows = self.source.parse_text(Position(file), text)
                record = stores.write(folder, rows, self.source.schema, 0, 0, nowhere)
                bad = [[row.line, row.reason] for row in rows.bad]
                yield _row(
                    file=file,
                    block=block,
                    part=parts[file, block],
                    lines=text.lines,
                    record=json.dumps(record.to_json()),
                    bad=json.dumps(bad) if bad else "",
                    data=stores.path_of(folder, 0).read_bytes(),
                )
                parts[file, block] += 1


def _texts(batch: pa.RecordBatch) -> Iterator[tuple[int, int, Text]]:
    """The lines of every split that a batch has some of."""
    files, blocks = batch.column(0).to_numpy(), batch.column(1).to_numpy()
    changes = np.flatnonzero((np.diff(files) != 0) | (np.diff(blocks) != 0)) + 1
    lines = batch.column(2)
    _, offsets, data = lines.buffers()
    ends = np.frombuffer(offsets, np.int32)[lines.offset :]
    raw = np.frombuffer(data, np.uint8)
    for start, stop in itertools.pairwise([0, *changes.tolist(), len(batch)]):
        length = int(ends[stop] - ends[start])
        buffer = _scratch.array("text", length + PADDING, np.uint8)
        buffer[:length] = raw[ends[start] : ends[stop]]
        buffer[length:] = 0
        yield int(files[start]), int(blocks[start]), Text(buffer, length, stop - start)


@dataclass(frozen=True)
class Blocks:
    """The blocks, when the numbers of their first rows are known."""

    schema: Schema
    first_rows: Mapping[Place, int]

    columns = ("file", "block", "part", "record", "data")

    def opened(self, batches: Batches) -> Iterator[tuple[Store, BlockRecord]]:
        """One after the other, each good until the next."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for *place, text, data in _rows(batches):
                stores.path_of(folder, 0).write_bytes(data)
                record = BlockRecord.from_json(json.loads(text))
                record = replace(record, first_row=self.first_rows[tuple(place)])
                store = Store(folder, self.schema, [record], seed=0, bits=0)
                yield store, record
                store.close()


def no_blocks(schema: Schema) -> Store:
    """A store that knows its columns, and nothing else."""
    return Store(Path(), schema, [], seed=0, bits=0)


# --- how often every value occurs


class _Tally:
    """Counts of a column's values, 0 among them."""

    def __init__(self, keyed: bool) -> None:
        every = (1, (1 << VALUE_BITS) - 1)
        self._counter = counting.counter(np.uint32, every, NO_LIMIT, keyed)
        self._zeros: list[tuple[int, int]] = []

    def add(self, values: Array, counts: Array | None, keys: Array) -> None:
        self._counter.add(values, counts, keys)

    def add_zeros(self, count: int, first: int) -> None:
        if count:
            self._zeros.append((count, first))

    def result(self, threshold: int) -> Counts:
        counts = self._counter.result(threshold)
        zeros = sum(count for count, _ in self._zeros)
        distinct = counts.distinct + bool(zeros)
        if not zeros or zeros < threshold:
            return replace(counts, distinct=distinct)
        keyed = self._counter.keyed
        first = [min(first for _, first in self._zeros)] if keyed else NO_KEYS
        return Counts(
            np.concatenate([np.zeros(1, np.uint32), counts.values]),
            np.concatenate([[zeros], counts.counts]),
            np.concatenate([first, counts.firsts]).astype(np.int64),
            distinct,
        )


def _packed(counts: Counts) -> bytes:
    return b"".join(array.tobytes() for array in counts.arrays)


def entries(data: bytes, keyed: bool) -> int:
    """How many values were packed."""
    return len(data) // (4 + 8 + 8 * keyed)


def _unpacked(data: bytes, keyed: bool) -> Counts:
    count = entries(data, keyed)
    values = np.frombuffer(data, np.uint32, count).copy()
    counts = np.frombuffer(data, np.int64, count, offset=4 * count).copy()
    firsts = np.frombuffer(data, np.int64, count * keyed, offset=12 * count * keyed).copy()
    return Counts(values, counts, firsts)


@dataclass(frozen=True)
class Count:
    """Blocks to counts: of every column, those of every range of values."""

    blocks: Blocks
    rules: Sequence[Rules]
    rows: Split
    """Those whose values count."""
    range_bits: int
    """How many bits of a value number its range."""

    gives = "column long, range long, data binary"

    def __call__(self, batches: Batches) -> Iterator[pa.RecordBatch]:
        recipe = self.rules[0].recipe
        keyed = recipe.order == "appearance"
        tallies = [_Tally(keyed) for _ in self.rules]
        for store, record in self.blocks.opened(batches):
            if self.rows.has_none(record):
                continue
            for number, (tally, rule) in enumerate(zip(tallies, self.rules, strict=True)):
                reader = ColumnReader(store, number, rule.value_modulus)
                tally.add(*reader.occurrences(record, self.rows, keyed))
                tally.add_zeros(*reader.zeros_and_first(self.rows, recipe.missing_is_zero))
        lowest = np.arange(1 << self.range_bits) << (VALUE_BITS - self.range_bits)
        for number, tally in enumerate(tallies):
            counts = tally.result(0)
            bounds = [*np.searchsorted(counts.values, lowest).tolist(), len(counts)]
            for of_range, (start, stop) in enumerate(itertools.pairwise(bounds)):
                if start < stop:
                    data = _packed(counts.keep(slice(start, stop)))
                    yield _row(column=number, range=of_range, data=data)


@dataclass(frozen=True)
class Merge:
    """Counts of the same values, grouped by column and range, to one; rare values are left out."""

    thresholds: Sequence[int]
    keyed: bool

    gives = "column long, range long, distinct long, data binary"

    def __call__(self, batches: Batches) -> Iterator[pa.RecordBatch]:
        for (column, of_range), rows in itertools.groupby(_rows(batches), lambda row: row[:2]):
            tally = _Tally(self.keyed)
            for *_, data in rows:
                counts = _unpacked(data, self.keyed)
                if counts.values[0] == 0:
                    first = int(counts.firsts[0]) if self.keyed else 0
                    tally.add_zeros(int(counts.counts[0]), first)
                tally.add(counts.values, counts.counts, counts.firsts)
            merged = tally.result(self.thresholds[column])
            yield _row(
                column=column, range=of_range, distinct=merged.distinct, data=_packed(merged)
            )


# --- values to ids, and rows into their order


@dataclass(frozen=True)
class Shares:
    """What of the dataset is written by one task: consecutive rows of a split."""

    splits: Sequence[Split]
    """In input order."""
    seed: int
    bits: int
    """How many bits of a training row's key number its share."""
    rows: int
    """Of a share of the other splits."""

    def of(self, split: Split, start: int, stop: int) -> tuple[Array, list[tuple[int, int, int]]]:
        """The order of some of a split's rows by their shares, from `start`; and share, first and
        last place in that order of each share."""
        if split.name == "train":
            order, bounds = shuffle.group(self.seed, start, stop, self.bits)
            spans = enumerate(itertools.pairwise(bounds.tolist()))
        else:
            order = np.arange(stop - start, dtype=np.uint32)
            first, last = ((row - split.start) // self.rows for row in (start, stop - 1))
            ends = [split.start + share * self.rows - start for share in range(first + 1, last + 1)]
            spans = enumerate(itertools.pairwise([0, *ends, stop - start]), first)
        return order, [(share, low, high) for share, (low, high) in spans if low < high]

    def order(self, split: Split, parts: Sequence[tuple[int, Array]]) -> Array:
        """The order of a share's rows.

        Args:
            parts: first row, and rows counted from it, by rising rows.
        """
        rows = sum(len(part) for _, part in parts)
        if split.name != "train":
            return np.arange(rows)
        keys = np.concatenate([shuffle.keys(self.seed, first, part) for first, part in parts])
        return shuffle.order_of(keys, np.arange(rows, dtype=np.uint64), self.bits)


@dataclass(frozen=True)
class Encode:
    """Blocks to parts of shares: the rows of each share, column after column."""

    blocks: Blocks
    shares: Shares
    rules: Sequence[Rules]
    cardinalities: Sequence[int]
    special: Sequence[SpecialIds]
    tables: str
    """How the names of the tables of ids begin, which Spark has brought to every machine."""

    gives = "split long, share long, first long, rows long, counted string, data binary"

    def __call__(self, batches: Batches) -> Iterator[pa.RecordBatch]:
        vocabularies = self._vocabularies()
        for store, record in self.blocks.opened(batches):
            fields = self._fields(store, vocabularies)
            for number, split in enumerate(self.shares.splits):
                start = max(split.start, record.first_row)
                stop = min(split.stop, record.first_row + record.rows)
                if start < stop:
                    part = Part(record, start - record.first_row, stop - record.first_row)
                    yield from self._encoded(number, start, part, fields)

    def _vocabularies(self) -> list[Vocabulary]:
        from pyspark import SparkFiles

        store = no_blocks(self.blocks.schema)
        tables = [Path(SparkFiles.get(f"{self.tables}{i}")) for i in range(len(self.rules))]
        return [
            Vocabulary(Path(), ColumnReader(store, number), 0, path)
            for number, path in enumerate(tables)
        ]

    def _fields(self, store: Store, vocabularies: Sequence[Vocabulary]) -> list[Field]:
        columns = zip(self.rules, vocabularies, self.cardinalities, self.special, strict=True)
        return [
            LabelField(store),
            NumericalField(store),
            *(
                CategoricalField(ColumnReader(store, number, rule.value_modulus), *others)
                for number, (rule, *others) in enumerate(columns)
            ),
        ]

    def _encoded(
        self, split: int, first: int, part: Part, fields: Sequence[Field]
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a part, all of one split, in parts of that split's shares."""
        order, spans = self.shares.of(self.shares.splits[split], first, first + part.rows)
        pieces = [[order[low:high].tobytes()] for _, low, high in spans]
        for field in fields:
            taken = field.finish(field.read([part]))[order]
            for piece, (_, low, high) in zip(pieces, spans, strict=True):
                piece.append(taken[low:high].tobytes())
        counted = json.dumps([field.take_count() for field in fields])
        for piece, (share, low, high) in zip(pieces, spans, strict=True):
            yield _row(
                split=split,
                share=share,
                first=first,
                rows=high - low,
                counted=counted,
                data=b"".join(piece),
            )
            counted = ""  # of the whole part, and so once


@dataclass(frozen=True)
class Order:
    """Parts of a share, by rising rows, to its bytes of every file."""

    shares: Shares
    files: Sequence[tuple[str, int]]
    """Name and bytes of a row, in the order of the columns of a part."""

    gives = "split long, share long, file string, data binary"

    def __call__(self, batches: Batches) -> Iterator[pa.RecordBatch]:
        for (split, share), rows in itertools.groupby(_rows(batches), lambda row: row[:2]):
            parts, counted = [], np.zeros(len(self.files), np.int64)
            for _, _, first, count, text, data in rows:
                parts.append((first, count, data))
                counted += json.loads(text) if text else 0
            for name, data in self._files(self.shares.splits[split], parts):
                yield _row(split=split, share=share, file=name, data=data)
            facts = json.dumps(counted.tolist()).encode()
            yield _row(split=split, share=share, file=FACTS, data=facts)

    def _files(
        self, split: Split, parts: Sequence[tuple[int, int, bytes]]
    ) -> Iterator[tuple[str, bytes]]:
        numbers = [(first, np.frombuffer(data, np.uint32, rows)) for first, rows, data in parts]
        order = self.shares.order(split, numbers)
        before = np.dtype(np.uint32).itemsize
        for name, width in self.files:
            dtype = np.dtype(f"u{width}" if width in (1, 2, 4) else f"V{width}")
            columns = [np.frombuffer(data, dtype, rows, before * rows) for _, rows, data in parts]
            yield name, np.concatenate(columns)[order].tobytes()
            before += width
