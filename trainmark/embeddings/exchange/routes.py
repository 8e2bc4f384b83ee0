"""Which ids go to which rank, and where the rows that come back belong: plain arithmetic.

From a placement follows, the same on every rank, what each device stores and in which order ids
and rows travel. A block from one rank to another holds, for each of the receiver's stores in turn,

    whole rows (table- and column-wise)    [parts of the store, samples of the sender]
    cut rows (row-wise)                    the ids whose rows lie there, by feature, then sample

so that the length of the first is known from the placement and the samples alone, and only that of
the second has to be exchanged. Rows travel back in the order of their ids, `width` elements each.

Where a feature has several ids, each of them is a *slot*, and `samples` above is one row of ids per
slot. A device adds the rows of a bag up and sends the sum. So that this holds of row-wise tables,
too, each of their parts gets all ids of its feature, and travels as whole rows do; unless a bag has
fewer ids than the table has parts: then every id's row travels, and the receiver adds them up. So a
sample receives a *vector* for each feature, each part of a row-wise one, or each of its slots. An
id of -1 is none, and so is one whose row lies elsewhere: a device gets it and leaves it out, and
where rows travel one by one it is not sent.

A table may be narrower than the model's rows: the placement says how wide it is. Nobody sends what
it lacks; zeros take that place where the rows are put together. Only whole rows may be so.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainmark.embeddings.placement.placement import Memory, Placement, Range
from trainmark.embeddings.tables.store import TablePart, table_names

EVERY_DEVICE = -1


@dataclass(frozen=True, kw_only=True)
class StoreParts:
    """Parts of tables that one device keeps in one store: of one width and format, in one kind of
    memory."""

    device: int
    memory: Memory
    width: int
    table_format: str
    cut: bool
    """Whether some rows of the parts' tables lie elsewhere, and ids go only where their row is."""
    parts: tuple[TablePart, ...]
    tables: tuple[int, ...]
    """The table, and so the feature, of each part."""

    @property
    def starts(self) -> list[int]:
        """The row of the store at which each part begins, and where the last one ends."""
        return list(itertools.accumulate((part.num_rows for part in self.parts), initial=0))

    @property
    def num_rows(self) -> int:
        return self.starts[-1]


@dataclass(frozen=True, kw_only=True)
class SlotRows:
    """The rows of a part that one slot of its feature looks up."""

    slot: int
    rows: Range
    """Of the table."""
    start: int
    """Where they begin in their store."""


@dataclass(frozen=True, kw_only=True)
class CutShard:
    """Some rows of a row-wise table."""

    table: int
    first_row: int
    bucket: int
    """Which of `Routes.cut_stores` holds it."""
    start: int
    """Its first row in that store."""


class Routes:
    """The way of ids, rows and gradients under one placement.

    Args:
        placement: who holds what.
        table_rows: rows of each table; categorical feature i looks up table i.
        dim: width of a row.
        hotness: ids of each feature; None: one of each, never -1.
        table_formats: how each table is stored; None: all in fp32.
    """

    def __init__(
        self,
        placement: Placement,
        table_rows: Sequence[int],
        dim: int,
        hotness: Sequence[int] | None = None,
        table_formats: Sequence[str] | None = None,
    ) -> None:
        self.devices, self.table_rows, self.dim = placement.devices, list(table_rows), dim
        self.num_features = len(table_rows)
        self.has_bags = hotness is not None
        self.hotness = list(hotness or [1] * len(table_rows))
        widths = {t.table: max(shard.columns[1] for shard in t.shards) for t in placement.tables}
        self.widths = [widths[table] for table in range(len(table_rows))]
        """Of each table's rows."""
        formats = table_formats or ["fp32"] * len(table_rows)
        self._firsts = {
            t.table: sorted({shard.rows[0] for shard in t.shards}) for t in placement.tables
        }
        """Where the row-wise parts of each table begin: one at 0, if its rows are whole."""
        found = _parts(placement, self.table_rows, self.widths, formats, self._adds_up)
        self.stores = [
            [_store(key, found[key]) for key in sorted(found) if key.device == device]
            for device in range(placement.devices)
        ]
        """Of each device, those of whole rows first."""
        on_all = _Key(EVERY_DEVICE, cut=False, memory="device", width=dim, table_format="fp32")
        self.replicas = _store(on_all, found.get(on_all, []))
        """The tables that lie whole on every device."""
        self.unit = math.gcd(
            dim, *(n for store in self._all_stores() for p in store.parts for n in p.columns)
        )
        """Elements that always travel together: rows are put together from pieces of this width."""

    @property
    def lacking(self) -> int:
        """Elements of a sample's rows that no table has."""
        return sum(self.dim - width for width in self.widths)

    @property
    def num_slots(self) -> int:
        return sum(self.hotness)

    def slots(self, feature: int) -> range:
        """Of a feature, among those of all."""
        first = sum(self.hotness[:feature])
        return range(first, first + self.hotness[feature])

    def ids_per_sample(self, store: StoreParts) -> int:
        """That a store gets which is not cut."""
        return sum(self.hotness[table] for table in store.tables)

    def _adds_up(self, table: int) -> bool:
        """Whether the parts of a table add up what they have of a bag, and send no more than it has
        ids."""
        return self.has_bags and 1 < self.hotness[table] >= len(self._firsts[table])

    def vectors(self) -> list[int]:
        """The feature of each vector that a sample receives."""
        cut = {table for store in self.cut_stores for table in store.tables}
        return [
            feature
            for feature, hotness in enumerate(self.hotness)
            for _ in range(hotness if feature in cut else len(self._firsts[feature]))
        ]

    def _all_stores(self) -> Iterator[StoreParts]:
        return itertools.chain.from_iterable(self.stores)

    # --- ids out

    @property
    def max_rows(self) -> int:
        """Rows of the largest table or store: ids need a type that can count them.

        Tables count although their shards are smaller: a row's number in the table tells its shard.
        """
        stores = [*self._all_stores(), self.replicas]
        return max([*self.table_rows, *(store.num_rows for store in stores)])

    def whole_parts(self) -> list[SlotRows]:
        """What the slots of every part look up that gets all ids of its feature, by receiver."""
        whole = [store for store in self._all_stores() if not store.cut]
        return [rows for store in whole for rows in self.slot_rows(store)]

    def slot_rows(self, store: StoreParts) -> list[SlotRows]:
        """What the slots of every part of a store look up."""
        return [
            SlotRows(slot=slot, rows=part.rows, start=start)
            for table, part, start in zip(store.tables, store.parts, store.starts[:-1], strict=True)
            for slot in self.slots(table)
        ]

    def num_whole(self, device: int) -> int:
        """Ids that a device gets for each sample, of features whose ids it gets all."""
        whole = [store for store in self.stores[device] if not store.cut]
        return sum(self.ids_per_sample(store) for store in whole)

    @property
    def cut_stores(self) -> list[StoreParts]:
        """The stores of row-wise parts, by receiver: the buckets that ids are sorted into."""
        return [store for store in self._all_stores() if store.cut]

    def num_cut(self, device: int) -> int:
        return sum(store.cut for store in self.stores[device])

    def cut_shards(self) -> list[CutShard]:
        """Every row-wise part, by table and row."""
        shards = [
            CutShard(table=table, first_row=part.rows[0], bucket=bucket, start=start)
            for bucket, store in enumerate(self.cut_stores)
            for part, table, start in zip(store.parts, store.tables, store.starts[:-1], strict=True)
        ]
        return sorted(shards, key=lambda shard: (shard.table, shard.first_row))

    # --- rows back

    def places(
        self, samples: int, cut_counts: Sequence[int]
    ) -> tuple[list[int], list[int], list[int]]:
        """Where the rows of a rank's samples lie in what it receives, in units.

        The columns of all vectors, one below the other, are numbered q. Piece q of sample b lies
        at `first[q] + b * step[q]`; those of row-wise tables, which depend on the ids, have 0
        there. Behind what is received come the rows of the tables that lie on every device, zeros
        for what tables lack, and zeros for each id of a row-wise table that is none.

        Args:
            samples: of this rank.
            cut_counts: how many of its ids fall into each of `cut_stores`.

        Returns:
            first, step, and where each of `cut_stores` begins, and then the last of those zeros.
        """
        pieces, vectors = self.dim // self.unit, self.vectors()
        first, step = [0] * len(vectors) * pieces, [0] * len(vectors) * pieces
        buckets, offset, counts = [], 0, iter(cut_counts)
        for store in [*self._all_stores(), self.replicas]:
            width = store.width // self.unit
            if store.cut:
                buckets.append(offset)
                offset += next(counts) * width
                continue
            for table, part in zip(store.tables, store.parts, strict=True):
                vector = vectors.index(table) + self._firsts[table].index(part.rows[0])
                column = vector * pieces + part.columns[0] // self.unit
                first[column : column + width] = range(offset, offset + width)
                step[column : column + width] = [width] * width
                offset += samples * width
        for table, width in enumerate(self.widths):
            zeros = (self.dim - width) // self.unit
            end = (vectors.index(table) + 1) * pieces
            first[end - zeros : end] = range(offset, offset + zeros)
            step[end - zeros : end] = [zeros] * zeros
            offset += samples * zeros
        return first, step, [*buckets, offset]


class _Key(NamedTuple):
    """What parts have in common that lie in one store. Sorted, whole rows come first."""

    device: int
    cut: bool
    memory: Memory
    width: int
    table_format: str


def _parts(
    placement: Placement,
    table_rows: Sequence[int],
    widths: Sequence[int],
    table_formats: Sequence[str],
    adds_up: Callable[[int], bool],
) -> dict[_Key, list[tuple[int, TablePart]]]:
    """Every part with its table, by store."""
    names = table_names(len(table_rows))
    found: dict[_Key, list[tuple[int, TablePart]]] = {}
    for table in placement.tables:
        rows = table_rows[table.table]
        is_replicated = table.sharding == "data_parallel"
        for shard in table.shards[:1] if is_replicated else table.shards:
            key = _Key(
                device=EVERY_DEVICE if is_replicated else shard.device,
                cut=shard.num_rows < rows and not adds_up(table.table),
                memory=table.memory,
                width=shard.num_columns,
                table_format=table_formats[table.table],
            )
            part = TablePart(
                name=names[table.table],
                shape=(rows, widths[table.table]),
                rows=shard.rows,
                columns=shard.columns,
            )
            found.setdefault(key, []).append((table.table, part))
    return found


def _store(key: _Key, found: list[tuple[int, TablePart]]) -> StoreParts:
    in_order = sorted(found, key=lambda entry: (entry[0], entry[1].rows, entry[1].columns))
    return StoreParts(
        **key._asdict(),
        parts=tuple(part for _, part in in_order),
        tables=tuple(table for table, _ in in_order),
    )
