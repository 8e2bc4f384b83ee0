"""Numbers as people read them; a dash where there is none."""

import math

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


def gib(count: int | None) -> str:
    if count is None:
        return DASH
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"


def percent(value: float | None) -> str:
    return DASH if value is None else f"{value:.0%}"


def with_unit(value: float | None, unit: str) -> str:
    return DASH if value is None else f"{value:.0f} {unit}"


def readable_size(num_bytes: int) -> str:
    """Bytes as people read them: 10 bytes, 1.50 MiB, 421.77 GiB."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 2**power:
            return f"{num_bytes / 2**power:.2f} {unit}"
    return f"{num_bytes} bytes"
