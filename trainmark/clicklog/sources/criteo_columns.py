"""What the parsers of Criteo's text take of a piece: columns; and the lines that they do not."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainmark.clicklog.arrays.primitives import Array
from trainmark.clicklog.sources.criteo_format import NUM_CATEGORICAL, NUM_NUMERICAL, Line
from trainmark.clicklog.sources.rows import NumberFacts


@dataclass
class CriteoColumns:
    """Rows of a piece, in the types of the store."""

    labels: NDArray[np.uint8]
    numerical: NDArray[np.uint16]
    """[rows, 13], bits of float16."""
    categorical: Array
    """[26, rows] uint32, 0 where missing."""
    zeros: list[Array]
    """Per column: the rows that hold the number 0."""
    facts: Sequence[NumberFacts]
    """Of the integers, a column each."""

    def with_lines(self, rows: Sequence[tuple[int, Line]]) -> "CriteoColumns":
        """These, with lines put in before the rows with the given numbers; facts stay as they
        are."""
        if not rows:
            return self
        places = np.array([place for place, _ in rows])
        labels = [row.label or 0 for _, row in rows]
        numerical = [row.numerical for _, row in rows]
        values = [[value or 0 for value in row.categorical] for _, row in rows]
        # Where the new rows end up, and by how much the old ones move.
        new_places = places + np.arange(len(places))
        zeros = []
        for column, old in enumerate(self.zeros):
            moved = old + np.searchsorted(places, old, side="right")
            added = [
                p
                for p, (_, row) in zip(new_places, rows, strict=True)
                if row.categorical[column] == 0
            ]
            zeros.append(np.sort(np.concatenate([moved, np.array(added, np.int64)])))
        return CriteoColumns(
            np.insert(self.labels, places, np.array(labels, np.uint8)),
            np.insert(self.numerical, places, np.array(numerical, np.uint16), axis=0),
            np.insert(self.categorical, places, np.array(values, np.uint32).T, axis=1),
            zeros,
            self.facts,
        )


def no_rows() -> CriteoColumns:
    return CriteoColumns(
        np.empty(0, np.uint8),
        np.empty((0, NUM_NUMERICAL), np.uint16),
        np.empty((NUM_CATEGORICAL, 0), np.uint32),
        [np.empty(0, np.int64)] * NUM_CATEGORICAL,
        [NumberFacts(0, None, None)] * NUM_NUMERICAL,
    )


@dataclass(frozen=True)
class OddLine:
    """A line that a fast parser did not take."""

    text: bytes
    line: int
    """Index within the piece."""
    before: int
    """The row of the parsed ones before which it belongs."""


@dataclass(frozen=True)
class Taken:
    """What a parser took of a piece."""

    columns: CriteoColumns
    lines: int
    """How many there were."""
    odd_lines: Sequence[OddLine]
    damage: str | None
    """Why the file ends here."""
