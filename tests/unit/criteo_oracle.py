"""The documented rules of `prepare criteo` in plain Python, one value at a time, for tests.

Written from the description (recipes.py, shuffle.py), without the code it checks.
"""

import math
import random
import struct
from collections import Counter
from pathlib import Path

Line = list[str]
"""40 fields."""
Row = tuple[int, bytes, tuple[int, ...]]
"""Label, float16 numbers as bytes, ids."""


def random_lines(rng: random.Random, count: int) -> list[Line]:
    """Lines with few distinct values, so that thresholds and ties matter, in odd spellings."""

    def integer() -> str:
        kind = rng.random()
        if kind < 0.2:
            return ""
        if kind < 0.3:
            return str(rng.choice([-1, -2, -3, -4, -100, -(2**63)]))
        if kind < 0.32:
            return rng.choice(["-0", "007", "0" * 25 + "5", "-00000000000000000000000002"])
        return str(rng.choice([0, 1, 2, rng.randrange(1000), 10**6, 2**31 - 1, 2**63 - 1]))

    def value(column: int) -> str:
        # Values that look like other things: floating-point numbers, infinities, words, nulls.
        odd = ["1e095050", "00000000", "ffffffff", "deadbeef", "0", "0e000001", "80000000", "ab"]
        kind = rng.random()
        if kind < 0.1:
            return ""
        text = rng.choice(odd) if kind < 0.5 else f"{rng.randrange(20 + 9 * column) * 7919:08x}"
        return rng.choice([text, text.upper()])

    return [
        [str(rng.randrange(2)), *(integer() for _ in range(13)), *(value(c) for c in range(26))]
        for _ in range(count)
    ]


def write_day(path: Path, lines: list[Line], end: str = "\n") -> None:
    path.write_bytes("".join("\t".join(line) + end for line in lines).encode())


class Oracle:
    """What a dataset must hold.

    Args:
        days: parsed lines of each file.
        thresholds, max_rows: one per categorical column.
    """

    def __init__(
        self,
        days: list[list[Line]],
        recipe: str = "nvidia",
        thresholds: list[int] | None = None,
        max_rows: list[int | None] | None = None,
        holdout: float | None = None,
        test_half: str | None = None,
        vocabulary_from: str = "all",
        seed: int = 0,
    ) -> None:
        self.recipe, self.seed = recipe, seed
        self.thresholds = thresholds or [0] * 26
        self.max_rows = max_rows or [None] * 26
        lines = [line for day in days for line in day]
        if holdout is not None:
            held = int(len(lines) * holdout)
        else:
            held = len(lines) // 7 if len(days) == 1 else len(days[-1])
        train = len(lines) - held
        middle = train + (held // 2 if recipe == "nvidia" else -(-held // 2))
        halves = {"first": (train, middle), "second": (middle, len(lines))}
        test_half = test_half or ("second" if recipe == "torchrec" else "first")
        other = "second" if test_half == "first" else "first"
        counted = lines if vocabulary_from == "all" else lines[:train]
        self.ids = [self._vocabulary(counted, column) for column in range(26)]
        self.rows: dict[str, list[Row]] = {
            "train": [self.row(lines[number]) for number in self._order(train)],
            "test": [self.row(line) for line in lines[slice(*halves[test_half])]],
            "validation": [self.row(line) for line in lines[slice(*halves[other])]],
        }

    def _order(self, rows: int) -> list[int]:
        return sorted(range(rows), key=lambda row: (self._key(row), row))

    def _key(self, row: int) -> int:
        golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1

        def mix(x: int) -> int:
            x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
            x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
            return x ^ (x >> 31)

        origin = mix((self.seed * golden + 1) & mask)
        return mix((origin + (row + 1) * golden) & mask) >> 24

    def _value(self, field: str, column: int) -> int | None:
        if self.recipe == "nvidia":
            return int(field, 16) if field else None
        value = int(field or "0", 16)
        most = self.max_rows[column]
        return value % most if most and self.recipe == "dlrm" else value

    def _vocabulary(self, lines: list[Line], column: int) -> dict[int, int]:
        values = [self._value(line[14 + column], column) for line in lines]
        # A Counter keeps the order of first appearance.
        counts = Counter(value for value in values if value is not None)
        kept = [value for value in counts if counts[value] >= self.thresholds[column]]
        if self.recipe == "nvidia":
            kept.sort(key=lambda value: (-counts[value], value))
        first = {"nvidia": 1, "torchrec": 2, "dlrm": 0}[self.recipe]
        return {value: first + rank for rank, value in enumerate(kept)}

    def row(self, line: Line) -> Row:
        numbers = [self._number(field) for field in line[1:14]]
        ids = tuple(self._id(field, column) for column, field in enumerate(line[14:]))
        return int(line[0]), struct.pack("<13e", *numbers), ids

    def _number(self, field: str) -> float:
        if self.recipe == "nvidia":
            return math.log(int(field) + 3) if field and int(field) > -3 else 0.0
        x = int(field or "0")
        if self.recipe == "torchrec":
            return math.log(x + 3) if x > -3 else 0.0
        return math.log(max(x, 0) + 1)

    def _id(self, field: str, column: int) -> int:
        rare = 1 if self.recipe == "torchrec" else 0
        value = self._value(field, column)
        found = rare if value is None else self.ids[column].get(value, rare)
        most = self.max_rows[column]
        return found % most if most and self.recipe != "dlrm" else found

    def cardinality(self, column: int) -> int:
        reserved = {"nvidia": 1, "torchrec": 2, "dlrm": 0}[self.recipe]
        size = max(len(self.ids[column]) + reserved, 1)
        most = self.max_rows[column]
        return min(size, most) if most and self.recipe != "dlrm" else size
