"""`auto`: the placement whose slowest device is predicted to be fastest, within its memory.

1. Small tables become data-parallel where reducing their dense gradient is predicted to be cheaper
   than exchanging their rows.
2. The others are cut, by rows or by columns, where whole they would load one device too much;
   several finenesses are tried.
3. The pieces are dealt, the most demanding first, each to the device that is then least loaded and
   has room. The deal with the fastest slowest device wins, the one with fewest pieces if they are
   about equal.

If no deal fits, rows are poured: each device takes rows until it is full. That fits whenever the
devices together have room for the tables and for one row each.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from trainmark.embeddings.placement.access import AccessProfile
from trainmark.embeddings.placement.costs import TableCosts
from trainmark.embeddings.placement.cutting import Cutter, Piece
from trainmark.embeddings.placement.placement import (
    Options,
    Placement,
    Shard,
    TablePlacement,
    joined,
    sharding_of,
    whole_everywhere,
)
from trainmark.formatting import GIB

Array = NDArray[np.float64]

# Buffers are estimates, so that a device should not be filled to the brim without need.
FULL = 0.9
# The largest piece allowed: in average loads of a device, and in what a device can hold.
FINENESS = ((math.inf, 1.0), (1.0, 0.5), (0.5, 0.25), (0.25, 0.125), (0.125, 0.0625))
MANY_PIECES = 4096
# More pieces must be faster by this part: each is an entry in the exchange.
WORTH = 0.05


class DoesNotFitError(Exception):
    """No placement of the tables has room on the devices."""


def auto(
    profiles: Sequence[AccessProfile],
    costs: TableCosts,
    room: float,
    options: Options,
) -> Placement:
    """Place tables so that the slowest device is predicted to be fastest.

    Args:
        profiles: rows and lookups of each table.
        costs: of the step on the machine.
        room: bytes that a device has for tables and the rows on their way; may be infinite.

    Raises:
        DoesNotFitError: the tables fit no placement on the devices.
    """
    cutter = Cutter(profiles, costs, options)
    if cutter.devices == 1:
        deal = Deal(cutter, math.inf, frozenset())
        deal.add(cutter.whole)
        return _explained(cutter, deal, room)
    deals = list(_deals(cutter, room))
    if not deals:
        return _explained(cutter, _poured(cutter, room), room)
    best = _best(deals, FULL * room)
    if best.memory.max() > FULL * room:
        best = _best([best, *_deals(cutter, FULL * room)], FULL * room)
    return _explained(cutter, best, room)


def _best(deals: Sequence["Deal"], full: float) -> "Deal":
    """The one that is fastest, or nearly so and simpler, or nearly so and less full."""
    fastest = min(deal.slowest_s for deal in deals)
    good = [deal for deal in deals if deal.slowest_s <= fastest * (1 + WORTH)]
    return min(good, key=lambda d: (d.memory.max() > full, len(d.pieces), d.slowest_s))


def _deals(cutter: Cutter, room: float) -> Iterator["Deal"]:
    for replicated in _replicated(cutter):
        others = [t for t in range(len(cutter.profiles)) if t not in replicated]
        average = sum(cutter.whole[t].compute_s for t in others) / cutter.devices
        for max_load, max_memory in FINENESS:
            limits = max_load * average, max_memory * room
            deal = Deal(cutter, room, replicated)
            if deal.add(piece for t in others for piece in cutter.cut(t, *limits)):
                yield deal
                if not others or len(deal.pieces) > MANY_PIECES:
                    break


# --- data-parallel tables


def _replicated(cutter: Cutter) -> list[frozenset[int]]:
    """Sets of tables to keep whole on every device, to be tried.

    Besides those for which it is cheaper, all and none: without any exchange, or without any
    reduction, a step is shorter by its latency.
    """
    in_fp32 = [t for t, profile in enumerate(cutter.profiles) if profile.stored.is_fp32]
    tables = frozenset(in_fp32) - set(cutter.options.host_tables)
    threshold = cutter.options.data_parallel_threshold
    if threshold is not None:
        rows = [profile.rows for profile in cutter.profiles]
        return [frozenset(t for t in tables if rows[t] * cutter.dim <= threshold)]
    cheaper = frozenset(t for t in tables if _replica_s(cutter, t) < _exchanged_s(cutter, t))
    return list(dict.fromkeys([cheaper, frozenset(), tables]))


def _replica_s(cutter: Cutter, table: int) -> float:
    """A device's predicted time for a table that lies on every device."""
    costs, profile = cutter.costs, cutter.profiles[table]
    load = costs.replica(profile, whole_everywhere(profile.rows, cutter.dim, 1)[0])
    return load.gather_s + load.update_s + costs.all_reduce_s(load.reduced) - costs.all_reduce_s(0)


def _exchanged_s(cutter: Cutter, table: int) -> float:
    """A device's predicted time for its part in a table that is exchanged and well spread."""
    costs = cutter.costs
    exchange = 2 * (costs.all_to_all_s(costs.received(1)) - costs.all_to_all_s(0))
    return cutter.whole[table].compute_s / cutter.devices + exchange


# --- dealing


class Deal:
    """Pieces on devices, and how loaded those are."""

    def __init__(self, cutter: Cutter, room: float, replicated: frozenset[int]) -> None:
        self.cutter, self.room, self.replicated = cutter, room, replicated
        self.pieces: list[tuple[Piece, int]] = []
        costs, dim = cutter.costs, cutter.dim
        copies = [
            costs.replica(cutter.profiles[t], whole_everywhere(cutter.profiles[t].rows, dim, 1)[0])
            for t in replicated
        ]
        self.reduced = sum(load.reduced for load in copies)
        self.received = costs.received(len(cutter.profiles) - len(replicated))
        self.start_s = costs.all_to_all_s(0.0) if self.received else 0.0
        self.seconds_per_byte = costs.all_to_all_s(1.0) - costs.all_to_all_s(0.0)
        compute = sum(load.gather_s + load.update_s for load in copies)
        self.compute = np.full(cutter.devices, float(compute))
        self.memory = np.full(cutter.devices, float(sum(load.memory for load in copies)))
        self.sent = np.zeros(cutter.devices)

    def add(self, pieces: Iterable[Piece]) -> bool:
        """Deal pieces, the most demanding first; False if one fits nowhere."""
        pieces = list(pieces)
        average = sum(p.compute_s for p in pieces) / self.cutter.devices or 1.0

        def demand(piece: Piece) -> float:
            return max(piece.compute_s / average, piece.load.memory / self.room)

        pieces.sort(key=demand, reverse=True)
        return bool(self.memory.max() <= self.room) and all(map(self._add, pieces))

    def _add(self, piece: Piece) -> bool:
        sent = self.sent + piece.load.sent
        seconds = self._seconds(self.compute + piece.compute_s, sent)
        seconds[self.memory + piece.load.memory > self.room] = math.inf
        device = int(seconds.argmin())
        if seconds[device] == math.inf:
            return False
        self.put(piece, device)
        return True

    def put(self, piece: Piece, device: int) -> None:
        self.compute[device] += piece.compute_s
        self.memory[device] += piece.load.memory
        self.sent[device] += piece.load.sent
        self.pieces.append((piece, device))

    def _seconds(self, compute: Array, sent: Array) -> Array:
        size: Array = np.maximum(sent, self.received)
        return compute + 2 * (self.start_s + self.seconds_per_byte * size)

    @property
    def slowest_s(self) -> float:
        """Predicted time of the slowest device, less what is the same for all deals."""
        reduce = self.cutter.costs.all_reduce_s(self.reduced) if self.reduced else 0.0
        return float(self._seconds(self.compute, self.sent).max()) + reduce


def _poured(cutter: Cutter, room: float) -> Deal:
    """Every device takes rows, table after table, until it is full."""
    deal = Deal(cutter, room, frozenset())
    device = 0
    for table, profile in enumerate(cutter.profiles):
        start = 0
        while start < profile.rows:
            if device == cutter.devices:
                raise DoesNotFitError
            stop = _rows_that_fit(cutter, table, start, room - deal.memory[device])
            if stop > start:
                deal.put(cutter.piece(table, (start, stop), (0, cutter.dim)), device)
            if stop < profile.rows:
                device += 1
            start = stop
    return deal


def _rows_that_fit(cutter: Cutter, table: int, start: int, room: float) -> int:
    """The last row, at most, up to which a piece from `start` takes no more than `room`."""
    low, high = start, cutter.profiles[table].rows
    while low < high:
        middle = (low + high + 1) // 2
        if cutter.piece(table, (start, middle), (0, cutter.dim)).load.memory <= room:
            low = middle
        else:
            high = middle - 1
    return low


# --- the placement, with reasons


def _explained(cutter: Cutter, deal: Deal, room: float) -> Placement:
    shards: dict[int, list[Shard]] = {t: [] for t in range(len(cutter.profiles))}
    for piece, device in deal.pieces:
        shards[piece.table].append(Shard(device=device, rows=piece.rows, columns=piece.columns))
    tables = [
        _replicated_table(cutter, table)
        if table in deal.replicated
        else _spread_table(cutter, table, joined(shards[table]), room)
        for table in shards
    ]
    return Placement(devices=cutter.devices, tables=tuple(tables))


def _replicated_table(cutter: Cutter, table: int) -> TablePlacement:
    profile = cutter.profiles[table]
    if cutter.options.data_parallel_threshold is not None:
        reason = f"at most {cutter.options.data_parallel_threshold:g} elements"
    else:
        ratio = _replica_s(cutter, table) / _exchanged_s(cutter, table)
        reason = f"its all-reduce takes {ratio:.2f} of the time of its exchange"
    return TablePlacement(
        table=table,
        sharding="data_parallel",
        shards=whole_everywhere(profile.rows, cutter.dim, cutter.devices),
        reason=reason,
    )


def _spread_table(
    cutter: Cutter, table: int, shards: tuple[Shard, ...], room: float
) -> TablePlacement:
    sharding = sharding_of(shards, cutter.dim)
    return TablePlacement(
        table=table,
        sharding=sharding,
        shards=shards,
        memory=cutter.memory(table),
        reason=_why_whole(cutter, table)
        if len(shards) == 1
        else _why_cut(cutter, table, shards, room),
    )


def _why_whole(cutter: Cutter, table: int) -> str:
    if cutter.devices == 1:
        return "there is one device"
    return f"{_of_average(cutter, table)}: whole, on the least loaded device"


def _why_cut(cutter: Cutter, table: int, shards: tuple[Shard, ...], room: float) -> str:
    whole = cutter.whole[table]
    if cutter.forced_slices(table) > 1 and shards[0].num_columns < cutter.dim:
        return f"more than {cutter.options.column_slice_threshold:g} elements"
    if whole.load.memory > room:
        why = f"{whole.load.memory / GIB:.3g} GiB, and a device has {room / GIB:.3g} for tables"
    else:
        why = _of_average(cutter, table)
    by_rows = sum(piece.compute_s for piece in cutter.pieces(table, 0.0, len(shards)))
    by_columns = sum(piece.compute_s for piece in cutter.pieces(table, None, len(shards)))
    return f"{why}: cut (columns: {by_columns / by_rows:.2f} x the work of rows)"


def _of_average(cutter: Cutter, table: int) -> str:
    average = sum(piece.compute_s for piece in cutter.whole) / cutter.devices
    return f"{cutter.whole[table].compute_s / average:.2f} of a device's average work"
