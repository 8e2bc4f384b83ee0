"""Parquet files with any columns, as a source."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trainmark.clicklog.sources import apart, column_spec, lists, remote
from trainmark.clicklog.sources.arrow_columns import utf8
from trainmark.clicklog.sources.column_match import AskedColumns
from trainmark.clicklog.sources.column_spec import ColumnUse
from trainmark.clicklog.sources.column_types import common_type, has_text, resolve
from trainmark.clicklog.sources.convert import Converted, convert, is_text, parsed_rows
from trainmark.clicklog.sources.parquet_files import batches, columns_of, open_parquet
from trainmark.clicklog.sources.rows import BadRow, ParsedRows
from trainmark.clicklog.sources.source import (
    BadRows,
    Piece,
    Position,
    Room,
    names_and_sizes,
    starts,
)
from trainmark.clicklog.sources.unpack import Unpacker
from trainmark.errors import InputError, raise_all

PIECES_OF_A_SHARE = 4
"""At least, so that it is worth a process."""
PROCESS_ROWS = 1 << 14
"""Rows of the largest share from which on processes decode them: one takes 10 ms to start."""
PAGE_BYTES = 5 << 18
"""Of each column: a page, and what it was packed to. Few programs write larger ones."""
BATCHES = 3
"""What a batch takes while it is made, in pieces."""
DICTIONARY_COPIES = 4
"""Of a column's strings, which is what they take to be read as codes and a dictionary."""
LIST_ROWS = 65_536
"""Rows at a time, where the longest list of a column is looked for."""


@dataclass(frozen=True)
class _Share:
    """Consecutive groups of a file's rows, which a process or a thread decodes."""

    start: Position
    """Where to begin: in the first group."""
    groups: list[int]
    first_row: int
    """Of the first group."""
    rows: int
    """Of all groups."""


class ParquetSource:
    """Parquet files. A position in a file is a row.

    Args:
        files: in the order of their rows.
        asked, bad_rows: as for `CsvSource`.
    """

    def __init__(
        self, files: Sequence[Path], asked: AskedColumns, *, bad_rows: BadRows = "stop"
    ) -> None:
        self.files = list(files)
        self.warnings: list[str] = []
        self.bad_rows = bad_rows
        self._asked = asked
        schemas = [columns_of(open_parquet(path).schema_arrow) for path in self.files]
        self._no_rows = pa.RecordBatch.from_pylist([], schemas[0])
        self.names: list[str] = schemas[0].names
        uses = asked.uses(self.names, str(self.files[0]))
        self._read_names = asked.read(uses)
        kinds = dict(zip(schemas[0].names, schemas[0].types, strict=True))
        raise_all(self._differences(schemas, uses, kinds))
        types = [kinds[use.column] for use in uses]
        resolved = resolve(uses, types, asked.numerical)
        self.uses = [
            self._with_longest(now) if now.reading != use.reading and lists.is_list(kind) else now
            for use, now, kind in zip(uses, resolved, types, strict=True)
        ]
        if asked.old is not None:
            raise_all(self._other_texts(kinds, asked.old.dataset))
        self.schema = column_spec.schema(self.uses)
        self._texts = [
            use.column
            for use in self.uses
            if is_text(use) and use.column not in asked.keep
            if kinds[use.column] in (pa.string(), pa.large_string())
        ]

    def _with_longest(self, use: ColumnUse) -> ColumnUse:
        """A column of lists whose longest one nobody said: it is looked for."""
        reading = lists.parse(use.reading)
        if reading is None:
            return use
        found = np.zeros(2, np.int64)
        for path in self.files:
            file = open_parquet(path)
            for batch in batches(file, path, LIST_ROWS, columns=[use.column]):
                more = lists.lengths(batch.column(0))
                both = np.zeros(max(len(found), len(more)), np.int64)
                both[: len(found)] += found
                both[: len(more)] += more
                found = both
        self.warnings += filter(None, [lists.outlier(use.column, reading, found)])
        longest = len(found) - 1
        if longest > lists.LIMIT:
            most = replace(reading, most=lists.LIMIT)
            raise InputError(
                f"The longest list of {use.column} has {longest:,} values; at most {lists.LIMIT:,} "
                "are stored, because every row has room for so many. Say "
                f"{use.column}:{most} with --bad-rows keep to take the first ones."
            )
        return replace(use, reading=str(replace(reading, most=longest)))

    def _differences(
        self, schemas: Sequence[pa.Schema], uses: Sequence[ColumnUse], kinds: dict[str, pa.DataType]
    ) -> Iterator[str]:
        """Columns to be read that a file has twice, not at all, or in a type that does not agree
        with the others'. In `kinds`, what the types of the first file become."""
        uses_of = {name: [u for u in uses if u.column == name] for name in self._read_names}
        for name in self._asked.keep:
            uses_of[name] = []  # it is carried along as it is
        for path, schema in zip(self.files, schemas, strict=True):
            for name in self._read_names:
                count = schema.names.count(name)
                if count > 1:
                    yield f"{path} has more than one column {name}. Rename all but one."
                elif count == 0:
                    yield f"{path} has no column {name!r}, which {self.files[0]} has."
                elif kind := common_type(kinds[name], schema.field(name).type, uses_of[name]):
                    kinds[name] = kind
                else:
                    found, before = schema.field(name).type, kinds[name]
                    hint = (
                        f", or say {name}:int64 or {name}:uint64 in --columns"
                        if pa.types.is_integer(found) and pa.types.is_integer(before)
                        else " (pandas makes floats of whole numbers where one is missing; Int64 "
                        "keeps them)"
                    )
                    yield (
                        f"{path} has {name!r} as {found}, files from {self.files[0]} on as "
                        f"{before}. Write the column as one type in all files{hint}."
                    )

    def _other_texts(self, kinds: Mapping[str, pa.DataType], dataset: str) -> Iterator[str]:
        """Columns of text by now of a type whose values have no text of their own: 7.0 is not 7."""
        for use in self.uses:
            kind = kinds[use.column]
            if use.role == "categorical" and use.reading == "string" and not has_text(kind):
                yield (
                    f"{self.files[0]} has {use.column!r} as {kind}; {dataset} has it as string. "
                    "Write it as text, as it was there."
                )

    def settings(self) -> Mapping[str, Any]:
        return {"input": names_and_sizes(self.files), **self._asked.settings(self.schema)}

    def inputs(self) -> Mapping[str, Any]:
        return column_spec.inputs(self.uses, missing=[])

    def bytes_per_row(self) -> float:
        rows: int = sum(open_parquet(path).metadata.num_rows for path in self.files)
        return sum(path.stat().st_size for path in self.files) / max(rows, 1)

    def pieces(self, start: Position, piece_bytes: int, room: Room) -> Generator[Piece]:
        # In memory a row takes about this much, whatever it takes in the file.
        batch_rows = max(piece_bytes // (16 * max(len(self.uses), 1)), 1)
        shares = {
            share.start: share
            for of_file in starts(self.files, start)
            for share in self._shares(of_file, PIECES_OF_A_SHARE * batch_rows)
        }
        # Threads of one process would wait for each other whenever one of them needs memory.
        here = not any(remote.is_remote(str(path)) for path in self.files)
        most_rows = max((share.rows for share in shares.values()), default=0)
        is_apart = here and room.threads > 1 and len(shares) > 1 and most_rows >= PROCESS_ROWS
        least = BATCHES * piece_bytes + PAGE_BYTES * len(self._read_names)
        encoded = least + max(map(self._dictionary_bytes, self.files[start.file :]), default=0)
        is_tight = room.memory < room.threads * encoded
        if is_tight:
            room = replace(room, threads=min(max(room.memory // least, 1), room.threads))

        def unpack(place: Position) -> Iterator[Piece]:
            chosen = (batch_rows, room.folder, is_apart, is_tight)
            pieces = partial(self._pieces_of, shares[place], *chosen)
            yield from apart.iterate(pieces) if is_apart else pieces()
            # Who has the last row asks no more; whoever waits for it would wait without end.
            raise InputError(f"{self.files[place.file]} is damaged: it lacks rows that it counts.")

        with Unpacker(list(shares), unpack, room) as unpacker:
            for place in shares:
                yield from unpacker.pieces(place)
        pa.default_memory_pool().release_unused()

    def _dictionary_bytes(self, path: Path) -> int:
        """What the dictionaries of a file's strings take, of one group of rows at a time."""
        metadata = open_parquet(path).metadata
        columns = range(metadata.num_columns)
        texts = [n for n in columns if metadata.schema.column(n).path in self._texts]
        groups = map(metadata.row_group, range(metadata.num_row_groups))
        of_groups = (sum(g.column(n).total_uncompressed_size for n in texts) for g in groups)
        return DICTIONARY_COPIES * max(of_groups, default=0)

    def _shares(self, start: Position, least_rows: int) -> Iterator[_Share]:
        """A file's rows from a place on, in shares of so many rows or more."""
        metadata = open_parquet(self.files[start.file]).metadata
        if metadata.num_rows == 0:
            yield _Share(start, [], 0, 0)
        row = first = 0
        groups: list[int] = []
        for group in range(metadata.num_row_groups):
            begin, row = row, row + metadata.row_group(group).num_rows
            if row > max(begin, start.offset):
                first = first if groups else begin
                groups.append(group)
            place = max(first, start.offset)
            if groups and (row - place >= least_rows or row == metadata.num_rows):
                yield _Share(Position(start.file, place), groups, first, row - first)
                groups = []

    def _pieces_of(
        self, share: _Share, batch_rows: int, folder: Path, is_apart: bool, is_tight: bool
    ) -> Iterator[Piece]:
        place, row = share.start, share.first_row
        number, path = place.file, self.files[place.file]
        # Each group has dictionaries of its own, and a batch with one ends where its group does.
        is_large = share.rows >= batch_rows * len(share.groups)
        encoded = self._texts if is_large and not is_tight else ()
        file = open_parquet(path, encoded, little_by_little=is_tight)
        size = path.stat().st_size
        total = file.metadata.num_rows
        if total == 0:
            yield Piece(Position(number), Position(number + 1), None, size)
            return
        found = batches(
            file,
            path,
            batch_rows,
            row_groups=share.groups,
            columns=self._read_names,
            use_threads=not is_apart,
        )
        for batch in found:
            begin, row = row, row + batch.num_rows
            if row <= place.offset:
                continue
            batch = batch.slice(max(place.offset - begin, 0))
            begin = max(begin, place.offset)
            stop = Position(number + 1) if row == total else Position(number, row)
            num_bytes = size * row // total - size * begin // total
            unpacked = folder / f"{number}.{begin}.arrow"
            with pa.ipc.new_file(unpacked, batch.schema) as writer:
                writer.write_batch(batch)
            disk_bytes = unpacked.stat().st_size
            yield Piece(Position(number, begin), stop, unpacked, num_bytes, disk_bytes)

    def parse(self, piece: Piece) -> ParsedRows:
        path = self.files[piece.start.file]
        if piece.raw is None:
            bad = [BadRow(str(path), 1, "the file is empty")]
            rows = self._no_rows
        else:
            bad = []
            with pa.memory_map(str(piece.raw)) as file:
                rows = pa.ipc.open_file(file).get_batch(0)
            piece.raw.unlink()
        lines = np.arange(1, rows.num_rows + 1)
        converted = self._converted(rows)
        return parsed_rows(converted, str(path), lines, bad, self.bad_rows, len(lines))

    def _converted(self, rows: pa.RecordBatch) -> Converted:
        columns = [utf8(rows.column(use.column)) for use in self.uses]
        converted = convert(columns, self.uses, takes_columns=self._asked.old is None)
        if not (names := list(self._asked.keep)):
            return converted
        kept = pa.table([rows.column(name) for name in names], names=names)
        return replace(converted, kept=kept)
