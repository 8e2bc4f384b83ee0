"""What a plan is made of: machines, costs of shards by hand, how often rows are read."""

import numpy as np
import pytest

from trainmark.embeddings.placement import access
from trainmark.embeddings.placement import costs as formulas
from trainmark.embeddings.placement.costs import Load, TableCosts, TableStep
from trainmark.embeddings.placement.placement import Shard
from trainmark.errors import InputError
from trainmark.hardware import devices, links
from trainmark.hardware.devices import Cluster
from trainmark.hardware.machine import Machine, machine

# --- machines


def test_every_accelerator_has_links() -> None:
    assert links.LINKS.keys() == devices.ACCELERATORS.keys()
    for key, found in links.LINKS.items():
        assert found.source, key
        # A device's memory is faster than its links, and those are faster than the network.
        assert devices.ACCELERATORS[key].bandwidth > found.node >= found.host / 1.01, key
        assert found.network is None or found.network < found.node, key


def test_a_network_that_is_not_known_must_be_given() -> None:
    with pytest.raises(InputError, match="--network-gb-s"):
        machine(Cluster.parse("mi300xx2x8"))
    assert machine(Cluster.parse("mi300xx2x8"), 50).network == 50e9
    assert machine(Cluster.parse("mi300xx1x8")).nodes == 1


# --- costs


def test_a_shards_load_by_hand() -> None:
    """Half of the rows of a table with 1000 rows, width 32: 512 of 1024 lookups."""
    there = Machine(
        devices=4, devices_per_node=2, memory=None, bandwidth=1e12, node_link=1e11, network=1e10,
        host_link=1e10,
    )  # fmt: skip
    step = TableStep(batch=1024, dim=32, element_bytes=2, optimizer="rowwise_adagrad")
    priced = TableCosts(there, step)
    load = priced.shard(access.uniform(1000), Shard(device=0, rows=(0, 500), columns=(0, 32)))
    distinct = 500 * (1 - (1 - 1 / 1000) ** 1024)
    assert load.weights == 500 * 32 * 4
    assert load.state == 500 * 4
    assert load.buffers == 2 * 512 * 32 * 2
    assert load.gather_s == pytest.approx(512 * (128 + 64) / 1e12 / formulas.GATHER_EFFICIENCY)
    moved = 512 * (64 + 64) + distinct * (2 * 128 + 2 * 4)
    assert load.update_s == pytest.approx(moved / 1e12 / formulas.UPDATE_EFFICIENCY)
    assert load.sent == 512 * 64 * 3 / 4
    # Of three others one is near and two are far; the network is slower.
    time = priced.time(load, received=priced.received(1))
    far = load.sent * 2 / 3 / 1e10 / formulas.LINK_EFFICIENCY
    latency = formulas.LATENCY_S + 3 * formulas.MESSAGE_S
    assert time.exchange == pytest.approx(2 * (latency + far))


def test_a_device_that_holds_nothing_waits_for_its_rows() -> None:
    """Its samples need rows of all tables, and their gradients go back."""
    there = machine(Cluster.parse("a100-80gx1x8"))
    step = TableStep(batch=8 * 1000, dim=128, element_bytes=2, optimizer="sgd")
    priced = TableCosts(there, step)
    received = 1000 * 26 * 256 * 7 / 8
    assert priced.received(26) == received
    latency = formulas.LATENCY_S + 7 * formulas.MESSAGE_S
    found = priced.time(Load(), received)
    assert found.exchange == pytest.approx(2 * (latency + received / (0.75 * 300e9)))
    assert found.gather == found.update == 0


def test_rows_of_a_host_table_travel_there_and_back() -> None:
    there = machine(Cluster.parse("h100x1x4"))
    step = TableStep(batch=4096, dim=64, element_bytes=2, optimizer="adagrad")
    priced, table = TableCosts(there, step), access.uniform(10**6)
    shard = Shard(device=0, rows=(0, 10**6), columns=(0, 64))
    near, far = priced.shard(table, shard), priced.shard(table, shard, "host")
    prefetched = table.distinct((0, 10**6), 4096) * 64 * 4
    assert (far.gather_s, far.update_s, near.host_s) == (near.gather_s, near.update_s, 0)
    assert far.host_s == pytest.approx(2 * prefetched / (63e9 * formulas.HOST_ROWS))
    assert far.buffers - near.buffers == pytest.approx(prefetched, abs=1)
    assert (far.weights, far.state, far.host) == (0, 0, near.weights + near.state)


def test_narrow_slices_pay_for_whole_accesses() -> None:
    priced = TableCosts(
        machine(Cluster.parse("a100-80gx1x8")),
        TableStep(batch=4096, dim=128, element_bytes=2, optimizer="sgd"),
    )
    table = access.uniform(10**6)
    whole = priced.shard(table, Shard(device=0, rows=(0, 10**6), columns=(0, 128)))
    slices = [
        priced.shard(table, Shard(device=0, rows=(0, 10**6), columns=(c, c + 4)))
        for c in range(0, 128, 4)
    ]
    assert sum(load.gather_s for load in slices) > 2 * whole.gather_s
    assert sum(load.sent for load in slices) == pytest.approx(whole.sent)
    assert sum(load.weights for load in slices) == whole.weights


# --- access counts


def test_counts_of_a_vocabulary() -> None:
    rows, rng = 20_000, np.random.default_rng(0)
    ids = rng.permutation(np.arange(1, rows))
    counts = rng.integers(1, 1000, len(ids))
    profile = access.from_counts(
        [(ids[:9000], counts[:9000]), (ids[9000:], counts[9000:])], rows, 0.25
    )
    assert profile.share((0, rows)) == pytest.approx(1)
    assert profile.share((0, 1)) == pytest.approx(0.25)
    for start, stop in ((1, 2), (5, 100), (4000, 4096), (1, rows)):  # the head is exact
        inside = (ids >= start) & (ids < stop)
        expected = 0.75 * counts[inside].sum() / counts.sum()
        assert profile.share((start, stop)) == pytest.approx(expected), (start, stop)
    inside = (ids >= 6000) & (ids < 12_000)
    assert profile.share((6000, 12_000)) == pytest.approx(
        0.75 * counts[inside].sum() / counts.sum(), rel=0.02
    )


def test_distinct_rows_beside_a_draw() -> None:
    rows, lookups = 3000, 2000
    profile = access.power_law(rows)
    rng = np.random.default_rng(0)
    draws = rng.choice(rows, size=(200, lookups), p=profile.shares)
    found = np.mean([len(np.unique(draw[draw >= 10])) for draw in draws])
    assert profile.distinct((10, rows), lookups) == pytest.approx(found, rel=0.01)


def test_rows_are_cut_by_rows_or_by_lookups() -> None:
    profile = access.power_law(10**5)
    by_rows, by_lookups = profile.cut(4, 0.0), profile.cut(4, 1.0)
    assert [b - a for a, b in by_rows] == [25_000] * 4
    assert [profile.share(part) for part in by_lookups] == pytest.approx([0.25] * 4, rel=0.05)
    for rows in (4, 5, 7):
        assert all(b > a for a, b in access.power_law(rows).cut(4, 1.0))
