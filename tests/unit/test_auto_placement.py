"""`auto` beside brute force, over random tables, and at the edges of memory."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from trainmark.embeddings.placement import access
from trainmark.embeddings.placement import placement as placements
from trainmark.embeddings.placement.access import AccessProfile
from trainmark.embeddings.placement.auto import DoesNotFitError, auto
from trainmark.embeddings.placement.costs import TableCosts, TableStep, exchanged_tables
from trainmark.embeddings.placement.placement import (
    Options,
    Placement,
    Shard,
    TablePlacement,
    even_ranges,
    sharding_of,
    whole_everywhere,
)
from trainmark.hardware.machine import Machine

GIB = 2**30


def machine(devices: int, per_node: int | None = None, **changes: Any) -> Machine:
    """Like A100s, unless said otherwise."""
    numbers: dict[str, Any] = {
        "bandwidth": 2e12,
        "node_link": 3e11,
        "network": 2.5e10,
        "host_link": 3e10,
    }
    return Machine(
        devices=devices, devices_per_node=per_node or devices, memory=None, **numbers | changes
    )


def costs(devices: int, *, batch: int = 8192, dim: int = 32, **changes: Any) -> TableCosts:
    step = TableStep(batch=batch, dim=dim, element_bytes=2, optimizer="sgd")
    return TableCosts(machine(devices, **changes), step)


def slowest(placed: Placement, priced: TableCosts, profiles: Sequence[AccessProfile]) -> float:
    loads = priced.loads(placed, list(profiles))
    received = priced.received(exchanged_tables(placed))
    return max(priced.time(load, received).total for load in loads)


def largest(placed: Placement, priced: TableCosts, profiles: Sequence[AccessProfile]) -> int:
    return max(load.memory for load in priced.loads(placed, list(profiles)))


def needed(profiles: Sequence[AccessProfile], priced: TableCosts) -> int:
    """Bytes of all tables, wherever they lie."""
    dim = priced.step.dim
    whole = [Shard(device=0, rows=(0, p.rows), columns=(0, dim)) for p in profiles]
    return sum(priced.shard(p, s).memory for p, s in zip(profiles, whole, strict=True))


def placed_and_checked(
    profiles: Sequence[AccessProfile],
    priced: TableCosts,
    room: float = math.inf,
    options: Options | None = None,
) -> Placement:
    placed = auto(profiles, priced, room, options or Options())
    rows = [profile.rows for profile in profiles]
    return placements.checked(placed, rows, priced.step.dim, priced.machine.devices)


# --- beside brute force


def every_way(table: int, rows: int, dim: int, devices: int) -> Iterator[TablePlacement]:
    yield TablePlacement(
        table=table, sharding="data_parallel", shards=whole_everywhere(rows, dim, devices)
    )
    for parts in range(1, devices + 1):
        for owners in itertools.permutations(range(devices), parts):
            by_rows = [(r, (0, dim)) for r in even_ranges(rows, parts)]
            by_columns = [((0, rows), c) for c in even_ranges(dim, parts)]
            for cut in [by_rows] if parts == 1 else [by_rows, by_columns]:
                shards = tuple(
                    Shard(device=d, rows=r, columns=c)
                    for d, (r, c) in zip(owners, cut, strict=True)
                )
                sharding = sharding_of(shards, dim)
                yield TablePlacement(table=table, sharding=sharding, shards=shards)


def optimum(profiles: Sequence[AccessProfile], priced: TableCosts, room: float) -> float:
    """The slowest device's time in the best of all placements that fit."""
    dim, devices = priced.step.dim, priced.machine.devices
    ways = [list(every_way(t, p.rows, dim, devices)) for t, p in enumerate(profiles)]
    best = math.inf
    for tables in itertools.product(*ways):
        placed = Placement(devices=devices, tables=tables)
        if largest(placed, priced, profiles) <= room:
            best = min(best, slowest(placed, priced, profiles))
    return best


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("full", [False, True], ids=["roomy", "tight"])
def test_close_to_the_best_of_all_placements(seed: int, full: bool) -> None:
    rng = np.random.default_rng([seed, full])
    rows = [int(10 ** rng.uniform(1, 6)) for _ in range(3)]
    make = access.power_law if seed % 2 else access.uniform
    profiles = [make(count) for count in rows]
    links: dict[str, Any] = {"node_link": float(10 ** rng.uniform(9, 12)), "network": 1e10}
    priced = costs(2, batch=int(2 ** rng.integers(8, 14)), **links)
    room = math.inf
    if full:  # 15 % more than an even split needs
        room = 1.15 / 2 * needed(profiles, priced)
    placed = placed_and_checked(profiles, priced, room)
    assert largest(placed, priced, profiles) <= room
    best = optimum(profiles, priced, room)
    assert best < math.inf
    assert slowest(placed, priced, profiles) <= 1.3 * best


# --- any tables


@pytest.mark.parametrize("seed", range(30))
def test_any_tables_are_placed_within_memory(seed: int) -> None:
    """Random tables, devices and memory, down to 2 % more than an even split would need."""
    rng = np.random.default_rng(seed)
    devices = int(rng.choice([2, 3, 7, 8, 16]))
    per_node = devices // 2 if devices % 2 == 0 and rng.random() < 0.5 else devices
    priced = costs(devices, batch=4096, dim=int(rng.choice([4, 32, 100])), per_node=per_node)
    make = access.power_law if rng.random() < 0.5 else access.uniform
    profiles = [make(int(10 ** rng.uniform(0, 6.5))) for _ in range(rng.integers(1, 20))]
    # Rows are not cut, so that a device may be left with a row that does not fit.
    room = needed(profiles, priced) / devices * rng.uniform(1.02, 3) + 8 * priced.step.dim * 4
    placed = placed_and_checked(profiles, priced, room)
    assert largest(placed, priced, profiles) <= room
    for table in placed.tables:
        assert table.reason


@pytest.mark.parametrize("make", [access.uniform, access.power_law])
def test_filled_to_the_last_row(make: Callable[[int], AccessProfile]) -> None:
    """Where exactly the whole memory is needed, all of it is used."""
    profiles = [make(rows) for rows in (1000, 3001, 77, 12000)]
    priced = costs(4, batch=64)
    even, row = needed(profiles, priced) / 4, 32 * 4 * 2
    placed = placed_and_checked(profiles, priced, even + row)
    assert largest(placed, priced, profiles) <= even + row
    with pytest.raises(DoesNotFitError):
        auto(profiles, priced, even - row, Options())


def test_one_table_larger_than_a_device() -> None:
    rows = 10**7
    profiles = [access.uniform(rows)]
    priced = costs(4, dim=128)
    placed = placed_and_checked(profiles, priced, rows * 128 * 4 * 0.3)
    (table,) = placed.tables
    assert table.sharding == "row_wise"
    assert {shard.device for shard in table.shards} == {0, 1, 2, 3}
    assert "GiB, and a device has" in table.reason


def test_small_tables_lie_everywhere_and_large_ones_do_not() -> None:
    profiles = [access.uniform(rows) for rows in (3, 50, 10**6, 2 * 10**6)]
    placed = placed_and_checked(profiles, costs(8, batch=65536, dim=128))
    kinds = [table.sharding for table in placed.tables]
    assert kinds[:2] == ["data_parallel"] * 2
    assert "data_parallel" not in kinds[2:]


def test_frequent_rows_are_shared_out() -> None:
    """With counts by falling frequency, equal numbers of rows would give one device most work."""
    rows, devices = 10**6, 4
    profile = access.power_law(rows)
    priced = costs(devices, batch=2**22, dim=16)  # too narrow to be cut by columns
    placed = placed_and_checked([profile], priced, math.inf, Options(data_parallel_threshold=1))
    evenly = Placement(
        devices=devices,
        tables=(
            TablePlacement(
                table=0,
                sharding="row_wise",
                shards=tuple(
                    Shard(device=d, rows=r, columns=(0, 16))
                    for d, r in enumerate(even_ranges(rows, devices))
                ),
            ),
        ),
    )
    assert slowest(placed, priced, [profile]) < 0.6 * slowest(evenly, priced, [profile])


def test_the_users_decisions_stand() -> None:
    profiles = [access.uniform(rows) for rows in (40, 5000, 10**6, 10**5)]
    options = Options(
        column_slice_threshold=10**6 * 32 / 3, data_parallel_threshold=5000 * 32, host_tables=(3,)
    )
    placed = placed_and_checked(profiles, costs(4), math.inf, options)
    assert [t.sharding for t in placed.tables[:3]] == [
        "data_parallel", "data_parallel", "column_wise",
    ]  # fmt: skip
    assert len(placed.tables[2].shards) == 4
    assert [t.memory for t in placed.tables] == ["device", "device", "device", "host"]


def test_host_tables_take_no_device_memory() -> None:
    profiles = [access.uniform(10**7), access.uniform(10**4)]
    priced = costs(2)
    room = 10**7 * 32 * 4 / 4
    with pytest.raises(DoesNotFitError):
        auto(profiles, priced, room, Options())
    placed = placed_and_checked(profiles, priced, room, Options(host_tables=(0,)))
    assert largest(placed, priced, profiles) <= room
    host = sum(load.host for load in priced.loads(placed, profiles))
    assert host == 10**7 * 32 * 4


# --- sanity


def best_time(rows: Sequence[int], priced: TableCosts, room: float = math.inf) -> float:
    profiles = [access.uniform(count) for count in rows]
    return slowest(placed_and_checked(profiles, priced, room), priced, profiles)


TABLES = (4 * 10**6, 10**6, 300_000, 300_000, 5000, 700, 60, 4, 2 * 10**6, 90_000)


def test_better_machines_are_not_slower() -> None:
    """But for the few percent that the search leaves."""
    for name, numbers in {
        "node_link": (1e10, 1e11, 1e12),
        "bandwidth": (1e11, 1e12, 1e13),
        "network": (1e9, 1e10, 1e11),
    }.items():
        times = [
            best_time(TABLES, costs(8, batch=65536, dim=128, per_node=4, **{name: number}))
            for number in numbers
        ]
        assert all(b <= 1.05 * a for a, b in itertools.pairwise(times)), (name, times)
        assert times[-1] < times[0]


def test_more_memory_is_not_slower() -> None:
    even = sum(TABLES) * 128 * 4 / 8
    priced = costs(8, batch=65536, dim=128)
    times = [best_time(TABLES, priced, even * factor) for factor in (1.2, 1.5, 2, 4, 100)]
    assert all(b <= 1.05 * a for a, b in itertools.pairwise(times)), times


def test_a_larger_batch_is_not_faster() -> None:
    times = [best_time(TABLES, costs(8, batch=2**k, dim=128)) for k in (10, 12, 14, 16, 18)]
    assert all(a <= b for a, b in itertools.pairwise(times)), times


def test_one_device_holds_everything() -> None:
    profiles = [access.uniform(rows) for rows in TABLES]
    placed = placed_and_checked(profiles, costs(1), 1.0)
    assert {(t.sharding, t.shards[0].device) for t in placed.tables} == {("table_wise", 0)}


def test_the_same_everywhere() -> None:
    """Every rank must come to the same placement."""
    profiles = [access.power_law(rows) for rows in TABLES]
    assert auto(profiles, costs(8), math.inf, Options()) == auto(
        profiles, costs(8), math.inf, Options()
    )
