"""The published placements of the frequency-threshold-15 tables, and column slices."""

import itertools

import pytest

from trainmark.embeddings.placement import placement as placements
from trainmark.embeddings.placement.placement import Options
from trainmark.embeddings.placement.strategies import STRATEGIES, by_strategy, column_slices
from trainmark.workloads.dlrm.runs import THRESHOLD_0, THRESHOLD_3, THRESHOLD_15

GREEDY = {
    2: [
        [0, 21, 10, 22, 11, 1, 4, 2, 23, 14, 3, 6, 13],
        [19, 9, 20, 7, 17, 15, 24, 8, 25, 18, 12, 5, 16],
    ],
    4: [
        [21, 10, 22, 1, 4, 2, 23], [19, 3, 13, 7, 15, 24, 8], [0, 11, 14, 6, 17, 25, 18],
        [9, 20, 12, 5, 16],
    ],
    8: [
        [], [22, 11, 1, 4], [10, 2, 23, 14], [20, 3, 6, 13], [9, 7, 17, 15], [21, 24, 8, 25],
        [0, 18, 12, 5], [19, 16],
    ],
}  # fmt: skip
MEMORY_BALANCED_8 = [
    [19, 7, 13], [0, 17, 6], [21, 15, 3], [9, 24, 14], [20, 8, 23], [10, 25, 2], [22, 18, 4, 5],
    [11, 12, 1, 16],
]  # fmt: skip


def tables_of(strategy: str, devices: int) -> list[set[int]]:
    placed = by_strategy(strategy, THRESHOLD_15, [128] * 26, devices)
    placements.checked(placed, THRESHOLD_15, 128, devices)
    assert {table.sharding for table in placed.tables} == {"table_wise"}
    return [{table.table for table, _ in placed.on(device)} for device in range(devices)]


@pytest.mark.parametrize("devices", GREEDY)
def test_greedy(devices: int) -> None:
    assert tables_of("greedy", devices) == [set(tables) for tables in GREEDY[devices]]


def test_memory_balanced() -> None:
    assert tables_of("memory_balanced", 8) == [set(tables) for tables in MEMORY_BALANCED_8]


def test_round_robin() -> None:
    assert tables_of("round_robin", 8) == [set(range(device, 26, 8)) for device in range(8)]


def test_memory_optimized() -> None:
    """Largest first onto the lightest: checked step by step against the definition."""
    found = tables_of("memory_optimized", 8)
    held = [0] * 8
    for table in sorted(range(26), key=lambda t: -THRESHOLD_15[t]):
        device = next(d for d in range(8) if table in found[d])
        assert held[device] == min(held)
        held[device] += THRESHOLD_15[table]


@pytest.mark.parametrize(
    ("threshold", "devices", "widths"), [(1e10, 8, [32] * 4), (5e9, 16, [16] * 8)]
)
def test_column_slices_of_the_largest_table(
    threshold: float, devices: int, widths: list[int]
) -> None:
    found = column_slices(THRESHOLD_0[19], 128, threshold, devices)
    assert [stop - start for start, stop in found] == widths


@pytest.mark.parametrize(
    ("rows", "dim", "threshold", "devices", "widths"),
    [
        (10, 8, 80, 8, [8]),  # exactly the threshold is not above it
        (10, 8, 79, 8, [4, 4]),
        (10, 7, 20, 8, [2, 2, 2, 1]),  # 70 -> 35 -> 17.5: the first slices get the remainder
        (10, 128, 1, 6, [22, 22, 21, 21, 21, 21]),  # never more than devices
        (10**6, 3, 1, 8, [1, 1, 1]),  # nor than columns
    ],
)
def test_column_slices(
    rows: int, dim: int, threshold: float, devices: int, widths: list[int]
) -> None:
    found = column_slices(rows, dim, threshold, devices)
    assert [stop - start for start, stop in found] == widths
    assert found[0][0] == 0
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("devices", [1, 2, 5, 8, 30])
def test_every_strategy_places_slices_copies_and_host_tables(strategy: str, devices: int) -> None:
    placed = by_strategy(
        strategy,
        THRESHOLD_3,
        [128] * 26,
        devices,
        Options(column_slice_threshold=1e9, data_parallel_threshold=128 * 1441, host_tables=(19,)),
    )
    placements.checked(placed, THRESHOLD_3, 128, devices)
    copied = {t.table for t in placed.tables if t.sharding == "data_parallel"}
    small = {t for t, rows in enumerate(THRESHOLD_3) if rows <= 1441}
    assert copied == (small if devices > 1 else set())
    assert [t.table for t in placed.tables if t.memory == "host"] == [19]
    if devices > 1:
        sliced = {t.table for t in placed.tables if len(t.shards) > 1} - copied
        assert sliced <= {0, 9, 19, 20, 21}  # those of more than 1e9 elements
        assert 19 in sliced
