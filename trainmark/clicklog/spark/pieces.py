"""Writing on the executors: values to ids, and rows into their order, in two steps.

A task encodes its blocks, and cuts them into parts by the *share* of the dataset that each row
belongs to. Then the parts of each share meet in one task, which brings its rows in order.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from trainmark.clicklog.arrays import shuffle
from trainmark.clicklog.arrays.primitives import Array
from trainmark.clicklog.engine.arrange import Field, Part
from trainmark.clicklog.engine.column_reader import ColumnReader
from trainmark.clicklog.engine.fields import (
    CategoricalField,
    LabelField,
    NumericalField,
    dtype_of_ids,
)
from trainmark.clicklog.engine.splits import Split
from trainmark.clicklog.engine.store import Store
from trainmark.clicklog.engine.vocabulary import Rules, SpecialIds, Vocabulary
from trainmark.clicklog.spark.blocks import Batches, Blocks, grouped, no_blocks, row

FACTS = "facts"
"""Beside the names of files: what was counted in some rows."""


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

        reader = ColumnReader(no_blocks(self.blocks.schema), 0)  # all columns are of one type
        paths = [SparkFiles.get(f"{self.tables}{number}") for number in range(len(self.rules))]
        return [Vocabulary(Path(), reader, 0, Path(path)) for path in paths]

    def _fields(self, store: Store, vocabularies: Sequence[Vocabulary]) -> list[Field]:
        fields: list[Field] = [LabelField(store), NumericalField(store)]
        columns = zip(vocabularies, self.cardinalities, self.special, strict=True)
        for number, (vocabulary, cardinality, special) in enumerate(columns):
            reader = ColumnReader(store, number, self.rules[number].value_modulus)
            dtype = dtype_of_ids(cardinality)
            fields.append(CategoricalField(reader, vocabulary, dtype, special))
        return fields

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
            yield row(
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
        for (split, share), rows in grouped(batches):
            parts, counted = [], np.zeros(len(self.files), np.int64)
            for first, count, text, data in rows:
                parts.append((first, count, data))
                counted += json.loads(text) if text else 0
            for name, data in self._files(self.shares.splits[split], parts):
                yield row(split=split, share=share, file=name, data=data)
            facts = json.dumps(counted.tolist()).encode()
            yield row(split=split, share=share, file=FACTS, data=facts)

    def _files(
        self, split: Split, parts: Sequence[tuple[int, int, bytes]]
    ) -> Iterator[tuple[str, bytes]]:
        # Copied, as loops are compiled anew for arrays that cannot be written to.
        numbers = [(part[0], np.frombuffer(part[2], np.uint32, part[1]).copy()) for part in parts]
        order = self.shares.order(split, numbers)
        before = np.dtype(np.uint32).itemsize
        for name, width in self.files:
            dtype = np.dtype(f"u{width}" if width in (1, 2, 4) else f"V{width}")
            columns = [np.frombuffer(data, dtype, rows, before * rows) for _, rows, data in parts]
            yield name, np.concatenate(columns)[order].tobytes()
            before += width
