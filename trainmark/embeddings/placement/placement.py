"""Who holds what: plain data that says which part of which table lies on which device.

A part is a rectangle of rows and columns. The parts of a table tile it exactly, except that a
data-parallel table lies whole on every device. A placement can be written as JSON, edited, and is
checked when it is read back. No torch here: `trainmark plan` needs none.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from trainmark.errors import InputError, raise_all
from trainmark.validation import parse

SCHEMA = "trainmark.placement/1"

Sharding = Literal["table_wise", "column_wise", "row_wise", "data_parallel"]
Memory = Literal["device", "host"]
Range = tuple[int, int]
"""The first, and the one after the last."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user has decided already."""

    column_slice_threshold: float = math.inf
    """Elements above which a table is cut by columns, into as many slices at least."""
    data_parallel_threshold: float | None = None
    """Elements up to which a table is data-parallel, and no other; None: as the strategy has it."""
    host_tables: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A rectangle of one table on one device."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    device: int
    """Global rank."""
    rows: Range
    columns: Range

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def num_columns(self) -> int:
        return self.columns[1] - self.columns[0]

    @property
    def elements(self) -> int:
        return self.num_rows * self.num_columns


@dataclass(frozen=True, kw_only=True)
class TablePlacement:
    """Where one table lies."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

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

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    devices: int
    tables: tuple[TablePlacement, ...]

    def on(self, device: int) -> Iterator[tuple[TablePlacement, Shard]]:
        """What one device holds, in the order of the tables."""
        for table in self.tables:
            for shard in table.shards:
                if shard.device == device:
                    yield table, shard


# --- making one


def whole_everywhere(rows: int, dim: int, devices: int) -> tuple[Shard, ...]:
    """The shards of a data-parallel table."""
    return tuple(Shard(device=d, rows=(0, rows), columns=(0, dim)) for d in range(devices))


def even_ranges(total: int, parts: int) -> list[Range]:
    """`total` cut into `parts`, as evenly as possible, the first ones larger by one."""
    size, larger = divmod(total, parts)
    sizes = [size + (part < larger) for part in range(parts)]
    return list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


def joined(shards: Iterable[Shard]) -> tuple[Shard, ...]:
    """Shards of a table in order; neighbours on the same device become one."""
    found: list[Shard] = []
    for shard in sorted(shards, key=lambda s: (s.rows, s.columns)):
        last = found[-1] if found else None
        if last and last.device == shard.device and last.rows == shard.rows:
            found[-1] = replace(last, columns=(last.columns[0], shard.columns[1]))
        elif last and last.device == shard.device and last.columns == shard.columns:
            found[-1] = replace(last, rows=(last.rows[0], shard.rows[1]))
        else:
            found.append(shard)
    return tuple(found)


def sharding_of(shards: Sequence[Shard], dim: int) -> Sharding:
    """What a tiling of one table into these rectangles is called."""
    if len(shards) == 1:
        return "table_wise"
    return "column_wise" if all(shard.num_columns < dim for shard in shards) else "row_wise"


# --- checking


def problems(placement: Placement, table_rows: Sequence[int], dim: int) -> list[str]:
    """Everything that is wrong with a placement of these tables, a sentence each."""
    if placement.devices < 1:
        return [f"devices must be at least 1. Received: {placement.devices}."]
    found = []
    times = [0] * len(table_rows)
    for table in placement.tables:
        if not 0 <= table.table < len(table_rows):
            found.append(
                f"Table {table.table} does not exist: the tables are 0 to {len(table_rows) - 1}."
            )
            continue
        times[table.table] += 1
        rows = table_rows[table.table]
        found += _table_problems(table, rows, dim, placement.devices)
    for index, count in enumerate(times):
        if count != 1:
            found.append(f"Table {index} must be placed once. Received: {count} times.")
    return found


def _table_problems(table: TablePlacement, rows: int, dim: int, devices: int) -> list[str]:
    name = f"Table {table.table} ({rows:,} rows, {dim} columns)"
    found = [
        f"{name}: device {shard.device} does not exist; the devices are 0 to {devices - 1}."
        for shard in table.shards
        if not 0 <= shard.device < devices
    ]
    if table.sharding == "data_parallel":
        if sorted(map(_corners, table.shards)) != sorted(
            map(_corners, whole_everywhere(rows, dim, devices))
        ):
            found.append(f"{name} is data_parallel, but does not lie whole on every device once.")
        if table.memory == "host":
            found.append(f"{name} is data_parallel, and so must be in device memory.")
        return found
    if table.sharding == "table_wise" and len(table.shards) != 1:
        found.append(f"{name} is table_wise and must have 1 shard. Received: {len(table.shards)}.")
    cut_rows, cut_columns = table.sharding == "row_wise", table.sharding == "column_wise"
    found += _axis_problems(name, "rows", [s.rows for s in table.shards], rows, cut_rows)
    found += _axis_problems(name, "columns", [s.columns for s in table.shards], dim, cut_columns)
    return found


def _corners(shard: Shard) -> tuple[int, Range, Range]:
    return shard.device, shard.rows, shard.columns


def _axis_problems(name: str, axis: str, ranges: list[Range], size: int, cut: bool) -> list[str]:
    """Ranges must each be everything; or, along the axis that is cut, follow one another."""
    if not cut:
        return [
            f"{name}: a shard must have all {axis}, 0 to {size}. Received: {list(found)}."
            for found in ranges
            if found != (0, size)
        ]
    found, end = [], 0
    for start, stop in sorted(ranges):
        if stop <= start:
            found.append(f"{name}: a shard has no {axis}: [{start}, {stop}].")
            continue
        if start > end:
            found.append(f"{name}: {axis} {end} to {start} are on no device.")
        if start < end:
            found.append(f"{name}: {axis} {start} to {min(end, stop)} are placed twice.")
        end = max(end, stop)
    if end < size:
        found.append(f"{name}: {axis} {end} to {size} are on no device.")
    if end > size:
        found.append(f"{name} has only {size} {axis}; a shard ends at {end}.")
    return found


def checked(
    placement: Placement, table_rows: Sequence[int], dim: int, devices: int, source: str = ""
) -> Placement:
    """`placement`, if it is one of these tables over `devices`; else every problem at once."""
    found = problems(placement, table_rows, dim)
    if placement.devices != devices:
        found.append(
            f"The placement is for {placement.devices} devices, and the run has {devices}. Plan "
            f"for {devices}, or launch {placement.devices} ranks."
        )
    raise_all(f"{source}: {problem}" if source else problem for problem in found)
    return placement


# --- JSON


def to_json(placement: Placement) -> str:
    """JSON with a line per shard. A data-parallel table's shards go without saying."""
    tables = []
    for table in placement.tables:
        fields = dataclasses.asdict(table)
        shards = fields.pop("shards")
        head = ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in fields.items())
        if table.sharding != "data_parallel":
            lines = ",\n".join(f"      {json.dumps(shard)}" for shard in shards)
            head += f', "shards": [\n{lines}\n    ]'
        tables.append(f"    {{{head}}}")
    body = ",\n".join(tables)
    return (
        f'{{\n  "schema": "{SCHEMA}",\n  "devices": {placement.devices},\n'
        f'  "tables": [\n{body}\n  ]\n}}\n'
    )


def read(path: Path, table_rows: Sequence[int], dim: int, devices: int) -> Placement:
    """A placement from a file, checked."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"Placement {path} does not exist. 'trainmark plan RUN --cluster ... --json FILE' "
            "writes one."
        ) from None
    except OSError as error:
        raise InputError(f"Placement {path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"Placement {path} is no JSON ({error}). 'trainmark plan RUN --cluster ... --json "
            "FILE' writes one."
        ) from None
    return checked(
        _from_plain(data, table_rows, dim, str(path)), table_rows, dim, devices, str(path)
    )


def _from_plain(data: Any, table_rows: Sequence[int], dim: int, source: str) -> Placement:
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise InputError(
            f'{source} is no placement: expected an object with "schema": "{SCHEMA}", as '
            "'trainmark plan RUN --json FILE' writes."
        )
    fields = {key: value for key, value in data.items() if key != "schema"}
    tables, devices = fields.get("tables"), fields.get("devices")
    if isinstance(tables, list) and isinstance(devices, int):
        fields["tables"] = [_with_shards(t, table_rows, dim, devices) for t in tables]
    return parse(Placement, fields, source)


def _with_shards(table: Any, table_rows: Sequence[int], dim: int, devices: int) -> Any:
    """A data-parallel table's shards, where they were left out."""
    if not isinstance(table, dict) or table.get("sharding") != "data_parallel":
        return table
    index = table.get("table")
    if "shards" in table or not isinstance(index, int):
        return table
    if not 0 <= index < len(table_rows):
        return {**table, "shards": ()}  # the table is the problem, not its shards
    return {**table, "shards": whole_everywhere(table_rows[index], dim, devices)}
