"""Looking into the configuration of results."""

from collections.abc import Sequence
from typing import Any

from trainmark.formatting import DASH
from trainmark.run.result import Result


def different_fields(results: Sequence[Result]) -> list[list[str]]:
    """[name, value, value, ...] for each configuration field that is not the same in all."""
    configs = [dict(flatten(result.config)) for result in results]
    names = dict.fromkeys(name for config in configs for name in config)
    rows = [[name, *(str(config.get(name, DASH)) for config in configs)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def flatten(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested dictionaries as (dotted name, value) pairs."""
    pairs: list[tuple[str, Any]] = []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        pairs += flatten(value, f"{name}.") if isinstance(value, dict) else [(name, value)]
    return pairs
