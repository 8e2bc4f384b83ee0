"""Numbers as people read them; a dash where there is none."""

import itertools
import math
from collections.abc import Sequence

GIB = 2**30

DASH = "—"


def human(value: float | None) -> str:
    """Three digits: 917, 20.0 k, 4.47 M."""
    if value is None or not math.isfinite(value):
        return DASH
    for at, size, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= at:
            return f"{_three_digits(value / size)} {unit}"
    return f"{value:,.0f}" if abs(value) >= 100 else _three_digits(value)


def _three_digits(value: float) -> str:
    return f"{value:#.3g}".rstrip(".")


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{_three_digits(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def percent(value: float | None) -> str:
    return DASH if value is None else f"{value:.0%}"


def with_unit(value: float | None, unit: str) -> str:
    return DASH if value is None else f"{value:.0f} {unit}"


def joules(value: float | None) -> str:
    """29.2 uJ, 1.25 mJ, 3.10 J, 151 kJ."""
    if value is None:
        return DASH
    for size, unit in ((1e6, "MJ"), (1e3, "kJ"), (1, "J"), (1e-3, "mJ")):
        if abs(value) >= size:
            return f"{_three_digits(value / size)} {unit}"
    return f"{_three_digits(value * 1e6)} uJ"


def counted(number: int, noun: str) -> str:
    """`1 step`, `2,000 steps`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def readable_size(num_bytes: float | None) -> str:
    """Bytes as people read them: 10 bytes, 1.5 MiB, 421.8 GiB."""
    if num_bytes is None:
        return DASH
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 2**power:
            return f"{num_bytes / 2**power:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


def gib_cell(num_bytes: float) -> str:
    """GiB as a cell of a table whose header has the unit."""
    return f"{num_bytes / GIB:,.2f}" if num_bytes >= GIB / 200 or not num_bytes else "<0.01"


def ranges(numbers: Sequence[int]) -> str:
    """0-3, 7"""
    groups = itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in group] for _, group in groups]
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
