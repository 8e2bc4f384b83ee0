"""The placements of the published systems, by name.

A strategy deals parts (tables, or column slices of them) to devices by their size alone:
`round_robin`, `memory_balanced` and `memory_optimized` are NVIDIA's Merlin distributed embeddings,
`greedy` is NVIDIA's DLRM for PyTorch.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from trainmark.embeddings.placement.placement import (
    Options,
    Placement,
    Range,
    Shard,
    Sharding,
    TablePlacement,
    even_ranges,
    joined,
    sharding_of,
    whole_everywhere,
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a strategy deals: a table, or some of its columns."""

    table: int
    columns: Range
    elements: int


NOTHING_DECIDED = Options()
Deal = Callable[[Sequence[Part], int], list[list[Part]]]
"""(parts, devices) -> the parts of each device."""


def round_robin(parts: Sequence[Part], devices: int) -> list[list[Part]]:
    """Part i to device i modulo the number of devices."""
    return [list(parts[device::devices]) for device in range(devices)]


def memory_balanced(parts: Sequence[Part], devices: int) -> list[list[Part]]:
    """By falling size, dealt to and fro: devices 0 to n, n to 0, and so on."""
    hands: list[list[Part]] = [[] for _ in range(devices)]
    # Of equally large parts the last one comes first, as in the published placement.
    by_size = sorted(parts, key=lambda part: part.elements)[::-1]
    for place, part in enumerate(by_size):
        turn, device = divmod(place, devices)
        hands[device if turn % 2 == 0 else devices - 1 - device].append(part)
    return hands


def memory_optimized(parts: Sequence[Part], devices: int) -> list[list[Part]]:
    """The largest first, each to the device that holds least so far."""
    hands: list[list[Part]] = [[] for _ in range(devices)]
    for part in _largest_first(parts):
        min(hands, key=_elements).append(part)
    return hands


def greedy(parts: Sequence[Part], devices: int) -> list[list[Part]]:
    """As `memory_optimized`, with equally many parts for each; devices are numbered as they fill.

    Above four devices, device 0 gets none: in the published system it has the bottom MLP.
    """
    dealt = devices - 1 if devices > 4 else devices
    most = math.ceil(len(parts) / dealt)
    hands: list[list[Part]] = [[] for _ in range(dealt)]
    full: list[list[Part]] = []
    for part in _largest_first(parts):
        lightest = hands[0]
        lightest.append(part)
        if len(lightest) == most:
            full.append(hands.pop(0))
        hands.sort(key=_elements)
    return [[] for _ in range(devices - dealt)] + full + hands


STRATEGIES: dict[str, Deal] = {
    "round_robin": round_robin,
    "memory_balanced": memory_balanced,
    "memory_optimized": memory_optimized,
    "greedy": greedy,
}

_REASONS = {
    "round_robin": "round_robin: tables are dealt in turn",
    "memory_balanced": "memory_balanced: tables are dealt to and fro by falling size",
    "memory_optimized": "memory_optimized: the largest first, to the device that holds least",
    "greedy": "greedy: the largest first, to the device that holds least of those not yet full",
}


def _largest_first(parts: Sequence[Part]) -> list[Part]:
    return sorted(parts, key=lambda part: -part.elements)


def _elements(parts: Iterable[Part]) -> int:
    return sum(part.elements for part in parts)


# --- column slices


def column_slices(rows: int, dim: int, threshold: float, devices: int) -> list[Range]:
    """The columns of a table, halved until no slice has more than `threshold` elements.

    There are at most as many slices as devices, and as columns.
    """
    slices = 1
    while rows * dim / slices > threshold:
        slices *= 2
        if slices >= min(devices, dim):
            break
    return even_ranges(dim, min(slices, devices, dim))


# --- placements


def by_strategy(
    name: str,
    table_rows: Sequence[int],
    widths: Sequence[int],
    devices: int,
    options: Options = NOTHING_DECIDED,
) -> Placement:
    """Place tables by a published strategy, which replicates none by itself.

    Args:
        widths: of each table's rows.
    """
    sizes = list(zip(table_rows, widths, strict=True))
    threshold, host = options.data_parallel_threshold or 0, options.host_tables
    replicated = {
        table
        for table, (rows, width) in enumerate(sizes)
        if rows * width <= threshold and table not in host and devices > 1
    }
    parts = [
        Part(table=table, columns=columns, elements=rows * (columns[1] - columns[0]))
        for table, (rows, width) in enumerate(sizes)
        if table not in replicated
        for columns in column_slices(rows, width, options.column_slice_threshold, devices)
    ]
    slices: dict[int, list[Shard]] = {table: [] for table in range(len(sizes))}
    for device, hand in enumerate(STRATEGIES[name](parts, devices)):
        for part in hand:
            rows = (0, table_rows[part.table])
            slices[part.table].append(Shard(device=device, rows=rows, columns=part.columns))
    tables = []
    for table, (num_rows, width) in enumerate(sizes):
        if table in replicated:
            sharding: Sharding = "data_parallel"
            shards = whole_everywhere(num_rows, width, devices)
            reason = f"at most {threshold:g} elements"
        else:
            shards = joined(slices[table])
            sharding, reason = sharding_of(shards, width), _REASONS[name]
            if len(slices[table]) > 1:
                reason += f"; more than {options.column_slice_threshold:g} elements"
        tables.append(
            TablePlacement(
                table=table,
                sharding=sharding,
                shards=shards,
                memory="host" if table in host else "device",
                reason=reason,
            )
        )
    return Placement(devices=devices, tables=tuple(tables))
