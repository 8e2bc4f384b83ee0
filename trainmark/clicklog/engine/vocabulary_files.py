"""A vocabulary's file: Parquet, with the columns value, id and count, by rising value.

Where a missing value has an id of its own, it is a null, in the first row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmark.errors import InputError

GROUP_ROWS = 1 << 20
"""Entries of a row group."""
BATCH_ROWS = 1 << 16
"""Entries that are read at a time."""

Entries = tuple[Any, Any, Any]
"""Values, ids and counts: arrays of Arrow's."""


@dataclass(frozen=True)
class MissingEntry:
    """Of the missing value."""

    id: int
    count: int


def num_kept(path: Path) -> int:
    """How many values have an id of their own."""
    import pyarrow.parquet as pq

    try:
        return int(pq.read_metadata(path).num_rows)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as a vocabulary: {error}.") from None


class Writer:
    """Writes a vocabulary. Its bytes do not depend on how the entries come in pieces.

    Args:
        path: the file.
        value_type: Arrow's type of the values.
    """

    def __init__(self, path: Path, value_type: Any) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        fields = [("value", value_type), ("id", pa.int32()), ("count", pa.int64())]
        self._schema = pa.schema(fields)
        self._waiting: list[Any] = []
        self._file = pq.ParquetWriter(
            path, self._schema, compression="none", use_dictionary=False, write_statistics=False
        )

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *exception: object) -> None:
        self._write(sum(map(len, self._waiting)))
        self._file.close()

    def write(self, values: Any, ids: Any, counts: Any) -> None:
        """Add entries, by rising value: arrays of Arrow's."""
        import pyarrow as pa

        self._waiting.append(pa.Table.from_arrays([values, ids, counts], schema=self._schema))
        self._write(sum(map(len, self._waiting)) // GROUP_ROWS * GROUP_ROWS)

    def write_missing(self, entry: MissingEntry) -> None:
        """Add the missing value, before all others."""
        import pyarrow as pa

        columns = ([None], [entry.id], [entry.count])
        self.write(*map(pa.array, columns, self._schema.types))

    def _write(self, rows: int) -> None:
        import pyarrow as pa

        if rows:
            waiting = pa.concat_tables(self._waiting)
            ready = waiting.slice(0, rows).combine_chunks()
            self._file.write_table(ready, row_group_size=GROUP_ROWS)
            self._waiting = [waiting.slice(rows)]


def read(path: Path) -> Iterator[Entries]:
    """The entries of all values, some at a time."""
    import pyarrow.parquet as pq

    from trainmark.clicklog.sources.parquet_files import readable

    with readable(path), pq.ParquetFile(path) as file:
        for batch in file.iter_batches(BATCH_ROWS, use_threads=False):
            known = of_values(batch)
            yield known.column("value"), known.column("id"), known.column("count")


def of_values(entries: Any) -> Any:
    """Rows of the file without that of the missing value."""
    has_missing = len(entries) and not entries.column("value")[0].is_valid
    return entries.slice(1) if has_missing else entries


def read_missing(path: Path) -> MissingEntry | None:
    """None if it has no id of its own."""
    import pyarrow.parquet as pq

    from trainmark.clicklog.sources.parquet_files import readable

    with readable(path), pq.ParquetFile(path) as file:
        for batch in file.iter_batches(1, use_threads=False):
            (row,) = batch.to_pylist()
            return MissingEntry(row["id"], row["count"]) if row["value"] is None else None
    return None


def merged(first: Iterator[Entries], second: Iterator[Entries]) -> Iterator[Entries]:
    """The entries of both, which have no value in common, by rising value."""
    import pyarrow as pa
    import pyarrow.compute as pc

    streams = [_Stream(first), _Stream(second)]
    while waiting := [stream for stream in streams if stream.load()]:
        # Neither has values up to the smaller of the last ones besides those in memory.
        bound = min((stream.last() for stream in waiting), key=lambda value: value.as_py())
        parts = [stream.take(bound) for stream in waiting]
        columns = [pa.concat_arrays(column) for column in zip(*parts, strict=True)]
        order = pc.sort_indices(columns[0])  # texts by their bytes
        values, ids, counts = (column.take(order) for column in columns)
        yield values, ids, counts


class _Stream:
    """Entries, of which some are in memory."""

    def __init__(self, entries: Iterator[Entries]) -> None:
        self._entries = entries
        self._here: list[Any] = []

    def load(self) -> bool:
        """Whether there are any more."""
        while not self._here or not len(self._here[0]):
            found = next(self._entries, None)
            if found is None:
                return False
            self._here = list(found)
        return True

    def last(self) -> Any:
        """Of the column's type: Arrow takes no plain number of 2^63 or more."""
        return self._here[0][-1]

    def take(self, bound: Any) -> list[Any]:
        """Remove the entries up to a value."""
        import pyarrow.compute as pc

        count = pc.sum(pc.less_equal(self._here[0], bound)).as_py() or 0
        taken = [column.slice(0, count) for column in self._here]
        self._here = [column.slice(count) for column in self._here]
        return taken
