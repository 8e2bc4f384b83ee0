"""The store: a log's rows as integer columns on disk, a file per block of consecutive rows.

Within a block the rows are grouped by bucket (shuffle.py). The file holds, in this order:

    bucket sizes   uint32 [2**bits]
    order          uint32 [rows], the row (from the block's first one) at each place
    labels         uint8 [rows]
    numerical      float16 [rows, columns]; where they are yet to be transformed (`Schema.numbers`),
                   float64 [rows] of one column after the other, NaN where missing
    each categorical column (of lists, one for each place in them):
        zeros      uint32, places of the rows that hold the number 0 (a stored 0 is a missing value)
        dictionary numbers in order of appearance, then uint32 how often each occurs
        rows       codes of 1 or 2 bytes into the dictionary, or none if it has a single entry;
                   without one, the numbers themselves

Columns that are carried along as they are lie beside it, as Parquet, in the rows' own order. A
record (a line in blocks.jsonl) says where things are, and what the file's checksum is.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from trainmark import checksums
from trainmark.clicklog.arrays import primitives, shuffle
from trainmark.clicklog.arrays.primitives import Array, Scratch
from trainmark.clicklog.engine import kept
from trainmark.clicklog.sources.rows import (
    Column,
    Kind,
    NumberFacts,
    ParsedRows,
    Schema,
    Values,
)
from trainmark.clicklog.sources.source import Position

DICTIONARY_SHARE = 4
"""A dictionary may have one entry for this many rows; with more it would save too little."""

_scratch = Scratch()


@dataclass(frozen=True)
class StoredColumn:
    """Where a categorical column lies in a block's file."""

    offset: int
    width: int
    """Bytes per row; 0: all rows hold the dictionary's only entry."""
    distinct: int
    """Size of the dictionary; 0: there is none."""
    zeros: int
    missing: int


@dataclass(frozen=True)
class BlockRecord:
    """A finished block."""

    index: int
    first_row: int
    rows: int
    bad: int
    stop: Position
    check: list[Any]
    columns: list[StoredColumn]
    strings: dict[str, list[Any]]
    """Checksums of the block's other files, by name: dictionaries of string columns, and `kept`."""
    numbers: list[NumberFacts]
    """Of each numerical column."""
    other_labels: tuple[str, ...] = ()
    """As `ParsedRows` has them."""

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        for key in ("columns", "numbers"):
            data[key] = [list(column.values()) for column in data[key]]
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "BlockRecord":
        columns = [StoredColumn(*column) for column in data["columns"]]
        numbers = [NumberFacts(*column) for column in data["numbers"]]
        stop = Position(**data["stop"])
        return cls(**data | {"stop": stop, "columns": columns, "numbers": numbers})


def dtype_of(column: Column) -> Any:
    """The number type of a column in the store. Strings are numbered block by block."""
    return np.dtype(np.uint32 if column.kind in ("uint32", "string") else np.uint64)


def path_of(folder: Path, index: int) -> Path:
    return folder / f"{index:06d}.bin"


# --- writing


def write(
    folder: Path, block: ParsedRows, schema: Schema, seed: int, bits: int, record: dict[str, Any]
) -> BlockRecord:
    """Write a block's file.

    Args:
        record: index, first_row and stop of the block's `BlockRecord`.
    """
    first, index = record["first_row"], record["index"]
    order, bounds = shuffle.group(seed, first, first + len(block), bits)
    numerical = block.numerical.T if schema.numbers else [block.numerical.view(np.uint16)]
    columns, others = [], {}
    with path_of(folder, index).open("wb") as file:
        writer = _Writer(file, order)
        writer.put(np.diff(bounds).astype(np.uint32), order)
        writer.put_rows(block.labels.view(np.uint8))
        for numbers in numerical:
            writer.put_rows(np.ascontiguousarray(numbers))
        for together in schema.vocabularies():
            column = schema.stored[together[0]]
            given = [block.categorical[number] for number in together]
            if column.kind == "string":
                from trainmark.clicklog.arrays import strings

                path = strings.dictionary_path(folder, index, together[0])
                of_columns, dictionary = strings.number_blocks(given)
                stored = ((numbers, np.empty(0, np.int64)) for numbers in of_columns)
                others[path.name] = strings.write_dictionary(path, dictionary)
            else:
                stored = (split_zeros(column, values) for values in given)
            columns += [writer.put_column(numbers, zeros) for numbers, zeros in stored]
    if block.kept is not None:
        path = kept.path_of(folder, index)
        others[path.name] = kept.write(path, block.kept)
    return BlockRecord(
        rows=len(block),
        bad=len(block.bad),
        other_labels=block.other_labels,
        check=writer.check.value(),
        columns=columns,
        strings=others,
        numbers=_facts(block, schema),
        **record,
    )


class _Writer:
    """Writes the arrays of a block one after another, each at once: while the processor's cache
    holds what it was made of, and it is in it."""

    def __init__(self, file: BinaryIO, order: Array) -> None:
        self._file, self._order = file, order
        self.check = checksums.Checksum()

    def put(self, *arrays: Array) -> None:
        for array in arrays:
            self.check.update(array)
            self._file.write(array.data)

    def put_rows(self, rows: Array) -> None:
        self.put(_taken(rows, self._order))

    def put_column(self, numbers: Array, zeros: Array) -> StoredColumn:
        """A categorical column, of which the rows `zeros` really hold 0."""
        places = self._place_of[zeros] if len(zeros) else zeros
        parts = [np.sort(places).astype(np.uint32), *_rows(numbers, self._order)]
        column = _describe(self.check.size, parts, numbers)
        self.put(*parts)
        return column

    @cached_property
    def _place_of(self) -> Array:
        """The place of each row."""
        places = np.empty(len(self._order), np.uint32)
        places[self._order] = np.arange(len(places), dtype=np.uint32)
        return places


def _facts(block: ParsedRows, schema: Schema) -> list[NumberFacts]:
    if not schema.numbers:
        return list(block.numbers)
    return [describe_numbers(column) for column in block.numerical.T]


def describe_numbers(column: Array) -> NumberFacts:
    """What is known of numbers, NaN where missing."""
    present = column[~np.isnan(column)]
    if not len(present):
        return NumberFacts(len(column), None, None)
    return NumberFacts(len(column) - len(present), float(present.min()), float(present.max()))


def _taken(source: Array, order: Array, dtype: Any = None) -> Array:
    """Rows in another order, which hold until the next call in this thread."""
    out = _scratch.array("taken", (len(order), *source.shape[1:]), dtype or source.dtype)
    primitives.take(source, order, out)
    return out


def intact(folder: Path, data: dict[str, Any]) -> bool:
    """Whether the files of a block (its record as JSON) are as they were written."""
    files = data["strings"] | {path_of(folder, data["index"]).name: data["check"]}
    return all(checksums.matches(folder / name, check) for name, check in files.items())


def split_zeros(column: Column, values: Values) -> tuple[Array, Array]:
    """Numbers with 0 for missing rows, and the rows that really hold 0."""
    numbers = encode(column.kind, values.numbers)
    zeros = values.zeros
    if zeros is None:
        is_zero = numbers == 0
        if values.missing is not None:
            is_zero &= ~values.missing
            numbers = np.where(values.missing, numbers.dtype.type(0), numbers)
        zeros = np.flatnonzero(is_zero)
    return numbers, zeros


def encode(kind: Kind, values: Array) -> Array:
    """Unsigned numbers that rise as the values do."""
    if kind == "int64":
        return values.view(np.uint64) ^ np.uint64(1 << 63)
    if kind == "float64":
        bits = (values + 0.0).view(np.uint64)  # -0.0 becomes 0.0
        negative = bits >> np.uint64(63) == 1
        return np.where(negative, ~bits, bits | np.uint64(1 << 63))
    return values


def decode(kind: Kind, numbers: Array) -> Array:
    """The values that the numbers stand for."""
    if kind == "int64":
        return (numbers ^ np.uint64(1 << 63)).view(np.int64)
    if kind == "float64":
        positive = numbers >> np.uint64(63) == 1
        return np.where(positive, numbers ^ np.uint64(1 << 63), ~numbers).view(np.float64)
    return numbers


def _rows(numbers: Array, order: Array) -> list[Array]:
    """Dictionary, counts and codes if they are few enough, else the numbers; they hold until the
    next call in this thread."""
    encoded = primitives.encode(numbers, max(len(numbers) // DICTIONARY_SHARE, 16))
    if encoded is None:
        return [numbers[:0], np.empty(0, np.uint32), _taken(numbers, order)]
    codes, dictionary, counts = encoded
    if len(dictionary) == 1:  # such as of a place that no list of the block reaches
        return [dictionary, counts, np.empty(0, np.uint8)]
    width = np.uint8 if len(dictionary) <= 1 << 8 else np.uint16
    return [dictionary, counts, _taken(codes, order, width)]


def _describe(offset: int, parts: Sequence[Array], numbers: Array) -> StoredColumn:
    zeros, dictionary, counts, rows = parts
    if len(dictionary):
        stored_zeros = int(counts[dictionary == 0].sum())
    else:
        stored_zeros = len(numbers) - int(np.count_nonzero(numbers))
    return StoredColumn(
        offset=offset,
        width=rows.itemsize if len(rows) else 0,
        distinct=len(dictionary),
        zeros=len(zeros),
        missing=stored_zeros - len(zeros),
    )


# --- reading


class Store:
    """The finished blocks.

    Args:
        folder: where the files are.
        schema: the columns.
        records: all blocks, in order.
        seed, bits: what the rows are grouped by.
    """

    def __init__(
        self, folder: Path, schema: Schema, records: Sequence[BlockRecord], seed: int, bits: int
    ) -> None:
        self.folder, self.schema, self.records = folder, schema, list(records)
        self.seed, self.bits = seed, bits
        self._descriptors = _Descriptors()
        # Of this store alone: another run of this process may have a folder of the same name.
        self.string_numbers = lru_cache(maxsize=4)(partial(_string_numbers, folder))
        """Of a block's own strings in a column, or in several that are numbered together and have
        this first one: their numbers in all blocks."""
        self.rows = sum(record.rows for record in self.records)
        self.bounds = np.zeros((len(self.records), (1 << bits) + 1), np.uint32)
        """[blocks, buckets + 1]: the places where each bucket of a block starts, and its end."""
        for bounds, record in zip(self.bounds, self.records, strict=True):
            np.cumsum(self._read(record, 0, 1 << bits, np.uint32), out=bounds[1:])

    def close(self) -> None:
        """Let its files be removed."""
        self._descriptors.close()

    def _read(
        self, record: BlockRecord, offset: int, count: int, dtype: Any, out: Array | None = None
    ) -> Array:
        out = np.empty(count, dtype) if out is None else out.reshape(-1)
        path = path_of(self.folder, record.index)
        if os.preadv(self._descriptors.of(path), [out.view(np.uint8).data], offset) != out.nbytes:
            raise OSError(f"{path} is shorter than it was when it was written")
        return out

    def order(self, record: BlockRecord, start: int = 0, stop: int | None = None) -> Array:
        """The rows, from the block's first one, at the places `start` to `stop` of a block."""
        count = (record.rows if stop is None else stop) - start
        return self._read(record, (4 << self.bits) + 4 * start, count, np.uint32)

    def labels(self, record: BlockRecord, start: int, stop: int) -> Array:
        """Labels of the places `start` to `stop` of a block."""
        return self._read(record, self._labels_at(record) + start, stop - start, np.uint8)

    def _labels_at(self, record: BlockRecord) -> int:
        return (4 << self.bits) + 4 * record.rows

    def numerical(self, record: BlockRecord, start: int, stop: int, out: Array) -> None:
        """Read bits of the float16 numbers [rows, columns] of these places."""
        width = self.schema.num_numerical
        offset = self._labels_at(record) + record.rows + start * 2 * width
        self._read(record, offset, (stop - start) * width, np.uint16, out)

    def number(self, record: BlockRecord, column: int, start: int, stop: int) -> Array:
        """A column of `Schema.numbers` of these places; NaN where missing."""
        offset = self._labels_at(record) + record.rows + 8 * (column * record.rows + start)
        return self._read(record, offset, stop - start, np.float64)

    def zeros(self, record: BlockRecord, column: int) -> Array:
        """Rising places of a block's rows that hold the number 0."""
        stored = record.columns[column]
        return self._read(record, stored.offset, stored.zeros, np.uint32)

    def dictionary(self, record: BlockRecord, column: int) -> tuple[Array, Array]:
        """Numbers in order of appearance, 0 for missing or 0, and their counts."""
        stored = record.columns[column]
        dtype = dtype_of(self.schema.stored[column])
        offset = stored.offset + 4 * stored.zeros
        numbers = self._read(record, offset, stored.distinct, dtype)
        offset += numbers.nbytes
        return numbers, self._read(record, offset, stored.distinct, np.uint32)

    def codes(self, record: BlockRecord, column: int, start: int, stop: int) -> Array:
        """Codes (or numbers, where there is no dictionary) of the places `start` to `stop`."""
        stored = record.columns[column]
        dtype = dtype_of(self.schema.stored[column])
        offset = stored.offset + 4 * stored.zeros
        if stored.distinct and not stored.width:
            return np.zeros(stop - start, np.uint8)
        if stored.distinct:
            offset += stored.distinct * (dtype.itemsize + 4)
            dtype = np.dtype(f"u{stored.width}")
        return self._read(record, offset + start * stored.width, stop - start, dtype)


def _string_numbers(folder: Path, index: int, column: int) -> Array:
    from trainmark.clicklog.arrays import strings  # pyarrow, which logs without strings do without

    return strings.read_numbers(folder, index, column)


class _Descriptors:
    """Of files that were read lately: opening one takes as long as reading what is wanted."""

    MOST = 512

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def of(self, path: Path) -> int:
        if path not in self._open:
            if len(self._open) >= self.MOST:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[path] = os.open(path, os.O_RDONLY)
        return self._open[path]

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        self.close()
