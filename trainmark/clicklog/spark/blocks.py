"""Blocks of rows on the executors: from lines, and into the embedded engine's store again.

A *block* is the bytes of a file that engine/store.py writes, its rows in input order: a few
megabytes. To Spark it is a binary value beside a few numbers to group and sort by, so there is
nothing that Spark, or Python, does per row.
"""

import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trainmark.clicklog.arrays.primitives import Scratch
from trainmark.clicklog.engine import store as stores
from trainmark.clicklog.engine.store import BlockRecord, Store
from trainmark.clicklog.sources.criteo_text import CriteoSource
from trainmark.clicklog.sources.rows import Schema
from trainmark.clicklog.sources.source import Position
from trainmark.clicklog.sources.text_files import PADDING, Text

Batches = Iterable[pa.RecordBatch]
Place = tuple[int, int, int]
"""Of a block in the input: file, offset of the split that Spark read, number within it."""

_scratch = Scratch()


def row(*, data: bytes, **values: Any) -> pa.RecordBatch:
    """A batch of one row."""
    ends = pa.py_buffer(np.array([0, len(data)], np.int32))
    column = pa.Array.from_buffers(pa.binary(), 1, [None, ends, pa.py_buffer(data)])  # no copy
    others = {name: pa.array([value]) for name, value in values.items()}
    return pa.RecordBatch.from_pydict({**others, "data": column})


def rows_of(batches: Batches) -> Iterator[tuple[Any, ...]]:
    """The values of each row; the last one, its data, as a buffer."""
    for batch in batches:
        *others, column = batch.columns
        data = (value.as_buffer() for value in column)
        yield from zip(*(other.to_pylist() for other in others), data, strict=True)


def grouped(batches: Batches) -> Iterator[tuple[Any, Iterator[list[Any]]]]:
    """The first two values of rows, and the other values of all rows that share them."""
    for keys, rows in itertools.groupby(rows_of(batches), lambda row: row[:2]):
        yield keys, (others for _, _, *others in rows)


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
                yield row(
                    file=file,
                    block=block,
                    part=parts[file, block],
                    lines=rows.lines,
                    record=json.dumps(record.to_json()),
                    bad=json.dumps(bad) if bad else "",
                    data=stores.path_of(folder, 0).read_bytes(),
                )
                parts[file, block] += 1


def _texts(batch: pa.RecordBatch) -> Iterator[tuple[int, int, Text]]:
    """The lines of every split that a batch has some of."""
    if not len(batch):
        return
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
        yield int(files[start]), int(blocks[start]), Text(buffer, length)


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
            for *place, text, data in rows_of(batches):
                stores.path_of(folder, 0).write_bytes(data)
                record = BlockRecord.from_json(json.loads(text))
                record = replace(record, first_row=self.first_rows[tuple(place)])
                store = Store(folder, self.schema, [record], seed=0, bits=0)
                yield store, record
                store.close()


def no_blocks(schema: Schema) -> Store:
    """A store that knows its columns, and nothing else."""
    return Store(Path(), schema, [], seed=0, bits=0)
