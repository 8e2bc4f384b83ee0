"""Who holds what: plain data that says which part of which table lies on which device.

A part is a rectangle of rows and columns. The parts of a table tile it exactly, except that a
data-parallel table lies whole on every device.
"""

from dataclasses import dataclass
from typing import Literal

Sharding = Literal["table_wise", "column_wise", "row_wise", "data_parallel"]
Memory = Literal["device", "host"]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A rectangle of one table on one device."""

    device: int
    """Global rank."""
    rows: tuple[int, int]
    """First row, and the one after the last."""
    columns: tuple[int, int]
    """First column, and the one after the last."""


@dataclass(frozen=True, kw_only=True)
class TablePlacement:
    """Where one table lies."""

    table: int
    """Its index among the categorical features."""
    sharding: Sharding
    shards: tuple[Shard, ...]
    memory: Memory = "device"
    """`host`: rows stay in the owner's pinned host memory, and travel for each batch."""
    reason: str = ""
    """Why it was put there, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where all tables lie, over `devices` ranks."""

    devices: int
    tables: tuple[TablePlacement, ...]
