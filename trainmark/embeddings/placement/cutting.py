"""Cutting tables into pieces that devices can share, by rows or by columns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainmark.embeddings.placement.access import AccessProfile
from trainmark.embeddings.placement.costs import Load, TableCosts
from trainmark.embeddings.placement.placement import Memory, Options, Range, Shard, even_ranges
from trainmark.embeddings.placement.strategies import column_slices

# How rows are cut: into equally many rows, or with regard to how often they are looked up.
LOOKUP_WEIGHTS = (0.0, 0.5, 0.9)
NARROWEST = 4  # columns: 16 bytes, what one thread of a GPU loads at once


@dataclass(frozen=True)
class Piece:
    """A rectangle of a table, for a device that is still to be chosen."""

    table: int
    rows: Range
    columns: Range
    load: Load

    @property
    def compute_s(self) -> float:
        return self.load.gather_s + self.load.update_s + self.load.host_s


class Cutter:
    """The tables of a run, whole or in pieces, with what each piece costs."""

    def __init__(
        self, profiles: Sequence[AccessProfile], costs: TableCosts, options: Options
    ) -> None:
        self.profiles, self.costs, self.options = profiles, costs, options
        self.dim, self.devices = costs.step.dim, costs.machine.devices
        self.whole = [self.piece(t, (0, p.rows), (0, self.dim)) for t, p in enumerate(profiles)]

    def memory(self, table: int) -> Memory:
        return "host" if table in self.options.host_tables else "device"

    def piece(self, table: int, rows: Range, columns: Range) -> Piece:
        shard = Shard(device=0, rows=rows, columns=columns)
        load = self.costs.shard(self.profiles[table], shard, self.memory(table))
        return Piece(table, rows, columns, load)

    def cut(self, table: int, max_s: float, max_memory: float) -> list[Piece]:
        """The fewest pieces of at most so many seconds and bytes; of several ways the best.

        A way that keeps the limits is better than one that cannot, then the one with less work in
        all, then the one with fewer pieces. Of several ids per feature, cut rows travel one by one,
        which is work, too.
        """
        costs, several = self.costs, self.profiles[table].hotness > 1
        per_byte = 2 * several * (costs.all_to_all_s(1.0) - costs.all_to_all_s(0.0))

        def small(pieces: list[Piece]) -> bool:
            return all(p.compute_s <= max_s and p.load.memory <= max_memory for p in pieces)

        def merit(pieces: list[Piece]) -> tuple[bool, float, int]:
            overrun = max(p.load.memory / max_memory + p.compute_s / max_s for p in pieces)
            work = sum(p.compute_s + per_byte * p.load.sent for p in pieces)
            return (True, work, len(pieces)) if small(pieces) else (False, overrun, len(pieces))

        ways = [self._fewest(table, way, small) for way in self._ways(table)]
        return min(ways, key=lambda pieces: (not merit(pieces)[0], *merit(pieces)[1:]))

    def _ways(self, table: int) -> list[float | None]:
        """Weights of the lookups in a cut by rows; None: by columns, of fp32 tables."""
        if self.forced_slices(table) > 1:
            return [None]
        profile = self.profiles[table]
        by_rows = LOOKUP_WEIGHTS[: 1 if len(profile.shares) == 1 else None]
        return [*by_rows, *([None] if profile.stored.is_fp32 else [])]

    def _fewest(
        self, table: int, way: float | None, small: Callable[[list[Piece]], bool]
    ) -> list[Piece]:
        least = self.forced_slices(table)
        most = self.dim // NARROWEST if way is None else self.profiles[table].rows
        most = max(min(most, self.devices), least)
        count = least
        while True:
            pieces = self.pieces(table, way, count)
            if count >= most or small(pieces):
                return pieces
            count = min(count * 2, most)

    def pieces(self, table: int, way: float | None, count: int) -> list[Piece]:
        """A table cut into `count`, or as many as it has columns or rows."""
        profile = self.profiles[table]
        if count == 1:
            return [self.whole[table]]
        if way is None:
            columns = even_ranges(self.dim, min(count, self.dim))
            return [self.piece(table, (0, profile.rows), c) for c in columns]
        return [
            self.piece(table, rows, (0, self.dim))
            for rows in profile.cut(min(count, profile.rows), way)
        ]

    def forced_slices(self, table: int) -> int:
        rows, threshold = self.profiles[table].rows, self.options.column_slice_threshold
        return len(column_slices(rows, self.dim, threshold, self.devices))
