"""How often the rows of a table are looked up: what a placement must know besides their number.

A profile gives the share of the lookups that each range of rows gets. Preparation numbers values
by falling frequency, so that the first rows of a table can get most of its lookups.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainmark import checksums
from trainmark.embeddings.placement.placement import Range
from trainmark.errors import InputError

HEAD_ROWS = 4096
"""Rows at the beginning of a table that are counted one by one."""
TAIL_BINS = 1024


@dataclass(frozen=True, kw_only=True)
class StoredRow:
    """Bytes of a table's rows."""

    weight: int = 4
    """Of each weight,"""
    scale: int = 0
    """and of each row besides."""
    state: int | None = None
    """Of an optimiser's state that is as wide as a row, for each weight; None: fp32."""

    @property
    def is_fp32(self) -> bool:
        return self.weight == 4


@dataclass(frozen=True, eq=False)
class AccessProfile:
    """The share of lookups in consecutive ranges of rows; within a range, rows are equal.

    And what the rows are, as far as a placement must know it.
    """

    edges: NDArray[np.int64]
    """Where the ranges begin, and the table's end."""
    shares: NDArray[np.float64]
    """Of all lookups, for each range; they add up to 1."""
    hotness: int = 1
    """Lookups of a sample."""
    stored: StoredRow = StoredRow()

    @property
    def rows(self) -> int:
        return int(self.edges[-1])

    def share(self, rows: Range) -> float:
        """Part of the lookups that fall between two rows."""
        return float(np.diff(np.interp(rows, self.edges, self._cumulative))[0])

    def distinct(self, rows: Range, lookups: float) -> float:
        """How many different rows of a range `lookups` draws from the whole table hit, expected."""
        if lookups not in self._distinct:
            counts = np.diff(self.edges)
            each = np.minimum(self.shares / counts, 1 - 1e-12)  # the chance of one row
            expected = counts * -np.expm1(lookups * np.log1p(-each))
            self._distinct[lookups] = np.concatenate([[0.0], np.cumsum(expected)])
        return float(np.diff(np.interp(rows, self.edges, self._distinct[lookups]))[0])

    def cut(self, parts: int, lookup_weight: float) -> list[Range]:
        """Cut the rows into `parts` of equal weight.

        Args:
            lookup_weight: 0 cuts into equally many rows, 1 into equally many lookups; in between,
                a part has at most 1/(1 - w) of its even share of the rows, and 1/w of the lookups.
        """
        even = self.edges / self.rows
        weight = (1 - lookup_weight) * even + lookup_weight * self._cumulative
        inner = np.interp(np.arange(1, parts) / parts, weight, self.edges)
        bounds = [0, *np.rint(inner).astype(int).tolist(), self.rows]
        # Every part has a row, however the weight is spread.
        for part in range(1, parts):
            bounds[part] = max(bounds[part], bounds[part - 1] + 1)
        for part in range(parts - 1, 0, -1):
            bounds[part] = min(bounds[part], bounds[part + 1] - 1)
        return list(itertools.pairwise(bounds))

    @cached_property
    def _distinct(self) -> dict[float, NDArray[np.float64]]:
        """Expected different rows before each edge, by the number of lookups."""
        return {}

    @cached_property
    def _cumulative(self) -> NDArray[np.float64]:
        return np.concatenate([[0.0], np.cumsum(self.shares)])


def uniform(rows: int) -> AccessProfile:
    """All rows are looked up equally often."""
    return AccessProfile(np.array([0, rows]), np.array([1.0]))


def power_law(rows: int) -> AccessProfile:
    """Row k gets a share near 1 / k, as in planted data."""
    edges = _edges(rows)
    cumulative = np.log1p(edges) / np.log1p(rows)
    return AccessProfile(edges, np.diff(cumulative))


def from_counts(
    counts: Iterable[tuple[NDArray[np.int64], NDArray[np.int64]]], rows: int, others: float = 0.0
) -> AccessProfile:
    """From (row, how often) in pieces.

    Args:
        others: the share of lookups of row 0 by values that have no entry: missing and rare ones.
    """
    edges = _edges(rows)
    head = min(HEAD_ROWS, rows)
    width = _tail_width(rows)
    totals = np.zeros(len(edges) - 1)
    for ids, found in counts:
        is_tail = ids >= head
        totals[:head] += np.bincount(ids[~is_tail], found[~is_tail], minlength=head)
        tail = (ids[is_tail] - head) // width
        totals[head:] += np.bincount(tail, found[is_tail], minlength=len(totals) - head)
    if not totals.sum():
        return uniform(rows)
    shares = totals / totals.sum() * (1 - others)
    shares[0] += others
    return AccessProfile(edges, shares)


def read_vocabulary(path: Path, rows: int, others: float) -> AccessProfile:
    """From the vocabulary that preparation wrote: the id and the count of every value."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    checksums.check_file(path)
    try:
        with pq.ParquetFile(path) as file:
            batches = file.iter_batches(1 << 20, columns=["id", "count"], use_threads=False)
            counts = (
                (batch.column(0).to_numpy().astype(np.int64), batch.column(1).to_numpy())
                for batch in batches
            )
            return from_counts(counts, rows, others)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} is damaged: {str(error).rstrip('.')}.") from None


def _edges(rows: int) -> NDArray[np.int64]:
    if rows <= HEAD_ROWS:
        return np.arange(rows + 1)
    tail = np.arange(HEAD_ROWS, rows, _tail_width(rows))
    return np.concatenate([np.arange(HEAD_ROWS), tail, [rows]])


def _tail_width(rows: int) -> int:
    return max(1, -(-(rows - HEAD_ROWS) // TAIL_BINS))
