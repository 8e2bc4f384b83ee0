"""The configuration fields in which results differ."""

from collections.abc import Sequence
from typing import Any

from trainmark.config import flatten
from trainmark.formatting import DASH
from trainmark.run.result import Result

SHORT = 3
"""Entries of a list that are shown as they are."""


def different_fields(results: Sequence[Result]) -> list[list[str]]:
    """[name, value, value, ...] for each configuration field that is not the same in all."""
    configs = [dict(flatten(result.config)) for result in results]
    names = dict.fromkeys(name for config in configs for name in config)
    rows = {name: [config.get(name, DASH) for config in configs] for name in names}
    return [
        [name, *_told_apart(values)]
        for name, values in rows.items()
        if len(set(map(str, values))) > 1
    ]


def _told_apart(values: Sequence[Any]) -> list[str]:
    """Values as texts; long lists, as the columns of two datasets, show only what not all have."""
    if not all(_is_long(value) for value in values):
        return [str(value) for value in values]
    in_all, in_any = set.intersection(*map(set, values)), set().union(*values)
    nothing = "in another order" if in_all == in_any else "only what the others have"
    own = ([part for part in value if part not in in_all] for value in values)
    return [_first(parts) if parts else nothing for parts in own]


def _is_long(value: Any) -> bool:
    is_list = isinstance(value, list) and all(isinstance(part, str) for part in value)
    return is_list and len(value) > SHORT


def _first(parts: Sequence[str]) -> str:
    more = f", and {len(parts) - SHORT} more" if len(parts) > SHORT else ""
    return ", ".join(parts[:SHORT]) + more
