"""What a step's lookups, exchanges and updates cost a device: the formulas, once.

All are bytes moved divided by a bandwidth and an efficiency. With B samples per step over W
devices, a shard of c columns that gets n of a table's B lookups, d of them distinct, w bytes per
weight and e per element in the compute precision:

    gather    n (max(64, c w) + c e) / memory bandwidth
    exchange  2 max(sent, received) / link, where a shard sends n c e (1 - 1/W), and a device
              receives the rows of its B/W samples but for 1/W; gradients go the same way back.
              Of a feature with h ids, n is h times as large; a shard adds them up where that is
              less, and writes and sends B
    update    (n (c e + 64) + 2 d max(64, c w) + 2 d state) / memory bandwidth

64 bytes are the least that a random access moves, and about what sorting one id moves. Of a
data-parallel table every device gathers its own B/W rows; the dense gradient is all-reduced. Rows
of a host table travel over the host link, there and back, during the steps before and after. The
exchange of indices overlaps the step before and is not counted. A step takes as long as its slowest
device.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from trainmark.embeddings.placement.access import AccessProfile
from trainmark.embeddings.placement.placement import Memory, Placement, Shard, TablePlacement
from trainmark.hardware.links import LINK_EFFICIENCY
from trainmark.hardware.machine import Machine

# Parts of the datasheet's bandwidth, where nothing was measured; from FBGEMM on one H200 with the
# tables of dlrm-small, batch 65536: 1.74 GB in 0.87 ms forward, 1.16 GB in 0.80 ms backward.
GATHER_EFFICIENCY = 0.42
UPDATE_EFFICIENCY = 0.30
# Starting a collective, where it was not measured, and a message to each of the others;
# assumptions.
LATENCY_S = 30e-6
MESSAGE_S = 1e-6
MIN_ACCESS = 64
# Of the link to the host, by kernels that read and write single rows there: 21 of 63 GB/s on one
# H200 (`benchmarks/results/dlrm_exchange_h200.json`, links).
HOST_ROWS = 0.33

STATE_BYTES = {  # of an optimiser: per element, and per row
    "sgd": (0, 0),
    "adagrad": (4, 0),
    "rowwise_adagrad": (0, 4),
    "adam": (8, 0),
}


@dataclass(frozen=True, kw_only=True)
class TableStep:
    """What a step does with all tables."""

    batch: int
    """Samples of all devices."""
    dim: int
    element_bytes: int
    """Of a row on its way: the compute precision."""
    optimizer: str

    @property
    def row_bytes(self) -> int:
        """Of a row on its way."""
        return self.dim * self.element_bytes


@dataclass(frozen=True, kw_only=True)
class Load:
    """What shards cost a device; loads add up."""

    weights: int = 0
    """Bytes."""
    state: int = 0
    """Bytes."""
    host: int = 0
    """Bytes in host memory, weights and state."""
    buffers: int = 0
    """Bytes of rows and gradients on their way."""
    gather_s: float = 0.0
    update_s: float = 0.0
    host_s: float = 0.0
    """Of rows that travel to host memory and back."""
    sent: float = 0.0
    """Bytes to other devices in the forward pass."""
    reduced: float = 0.0
    """Bytes of dense gradients to all-reduce."""

    def __add__(self, other: "Load") -> "Load":
        return Load(**{name: getattr(self, name) + getattr(other, name) for name in _LOAD_FIELDS})

    @property
    def memory(self) -> int:
        """Bytes on the device."""
        return self.weights + self.state + self.buffers


_LOAD_FIELDS = tuple(Load.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True)
class DeviceTime:
    """Predicted seconds of one device's part in the tables' work."""

    gather: float
    exchange: float
    update: float
    host: float = 0.0
    """Of rows on the link to the host, while the device does all else."""

    @property
    def total(self) -> float:
        """Of the device itself."""
        return self.gather + self.exchange + self.update


class TableCosts:
    """The costs of a run's tables on a machine."""

    def __init__(self, machine: Machine, step: TableStep) -> None:
        self.machine, self.step = machine, step
        self._local = step.batch / machine.devices
        self._latency_s = machine.measured.collective_s or LATENCY_S

    # --- one shard

    def shard(self, profile: AccessProfile, shard: Shard, memory: Memory = "device") -> Load:
        """A part of a table that serves the lookups of all devices."""
        step, columns = self.step, shard.num_columns
        share = profile.share(shard.rows)
        lookups = share * step.batch * profile.hotness
        distinct = profile.distinct(shard.rows, step.batch * profile.hotness)
        is_whole = shard.num_rows == profile.rows
        rows = step.batch if is_whole else min(lookups, step.batch)
        stored, state = self._stored(profile, shard)
        row = columns * profile.stored.weight
        gather = lookups * max(MIN_ACCESS, row) + rows * columns * step.element_bytes
        state_moved = 2 * distinct * state / max(shard.num_rows, 1)
        update = lookups * (columns * step.element_bytes + MIN_ACCESS)
        update += 2 * distinct * max(MIN_ACCESS, row) + state_moved
        on_host = memory == "host"
        prefetched = distinct * row if on_host else 0.0
        return Load(
            weights=0 if on_host else stored,
            state=0 if on_host else state,
            host=stored + state if on_host else 0,
            buffers=round(self._on_their_way(rows, columns) + prefetched),
            gather_s=self._gather_s(gather, row, stored),
            update_s=self._update_s(update, row, stored),
            host_s=2 * prefetched / (self.machine.host_link * HOST_ROWS),
            sent=rows * columns * step.element_bytes * (1 - 1 / self.machine.devices),
        )

    def replica(self, profile: AccessProfile, shard: Shard) -> Load:
        """A whole table on every device, looked up for the device's own samples."""
        step, columns = self.step, shard.num_columns
        stored, state = self._stored(profile, shard)
        row = columns * profile.stored.weight
        lookups = self._local * profile.hotness
        gather = lookups * max(MIN_ACCESS, row) + self._local * columns * step.element_bytes
        # The dense gradient is filled, reduced and applied: as cheap as the table is small.
        update = lookups * columns * step.element_bytes + 4 * stored + 2 * state
        return Load(
            weights=stored,
            state=state,
            buffers=shard.elements * 4,  # the dense gradient
            gather_s=self._gather_s(gather, row, stored),
            update_s=self._update_s(update, row, stored),
            reduced=shard.elements * 4 * (self.machine.devices > 1),
        )

    def _gather_s(self, size: float, row: int, table: int) -> float:
        return size / self.machine.of_rows("gather", row, table, GATHER_EFFICIENCY)

    def _update_s(self, size: float, row: int, table: int) -> float:
        return size / self.machine.of_rows(self.step.optimizer, row, table, UPDATE_EFFICIENCY)

    def _stored(self, profile: AccessProfile, shard: Shard) -> tuple[int, int]:
        """Bytes of the weights, and of the optimiser's state."""
        stored, (per_element, per_row) = profile.stored, STATE_BYTES[self.step.optimizer]
        if per_element and stored.state is not None:
            per_element = stored.state
        weights = shard.elements * stored.weight + shard.num_rows * stored.scale
        return weights, shard.elements * per_element + shard.num_rows * per_row

    def _on_their_way(self, lookups: float, columns: int) -> float:
        """Bytes of the rows that are sent, and of the gradients that come back."""
        exchanged = self.machine.devices > 1
        return 2 * lookups * columns * self.step.element_bytes * exchanged

    # --- one device

    def received(self, tables: int) -> float:
        """Bytes that a device gets in the forward pass, of so many tables that are exchanged."""
        return self._local * self.step.row_bytes * tables * (1 - 1 / self.machine.devices)

    def time(self, load: Load, received: float) -> DeviceTime:
        """Predicted seconds of a device with this load."""
        exchange = 0.0
        if received:
            exchange += 2 * self.all_to_all_s(max(load.sent, received))
        if load.reduced:
            exchange += self.all_reduce_s(load.reduced)
        return DeviceTime(
            gather=load.gather_s, exchange=exchange, update=load.update_s, host=load.host_s
        )

    def all_to_all_s(self, size: float) -> float:
        """`size` bytes leave a device, the same to each of the others."""
        machine = self.machine
        others = max(machine.devices - 1, 1)
        near = size * (machine.devices_per_node - 1) / others / machine.node_link
        far = size * (machine.devices - machine.devices_per_node) / others / machine.network
        return self._latency_s + others * MESSAGE_S + max(near, far) / LINK_EFFICIENCY

    def all_reduce_s(self, size: float) -> float:
        """`size` bytes, summed over all devices: around each node, and between the nodes by all
        network ports of a node together."""
        machine = self.machine
        per_node, nodes = machine.devices_per_node, machine.nodes
        near = 2 * size * (per_node - 1) / per_node / machine.node_link
        far = 2 * size * (nodes - 1) / nodes / (machine.network * per_node)
        return self._latency_s + max(near, far) / LINK_EFFICIENCY

    # --- a whole placement

    def loads(self, placement: Placement, profiles: list[AccessProfile]) -> list[Load]:
        """The load of every device."""
        return [
            total(self._load(table, shard, profiles) for table, shard in placement.on(device))
            for device in range(placement.devices)
        ]

    def _load(self, table: TablePlacement, shard: Shard, profiles: list[AccessProfile]) -> Load:
        if table.sharding == "data_parallel":
            return self.replica(profiles[table.table], shard)
        return self.shard(profiles[table.table], shard, table.memory)


def total(loads: Iterable[Load]) -> Load:
    return sum(loads, start=Load())


def exchanged_tables(placement: Placement) -> int:
    """Tables whose rows travel between devices."""
    return sum(t.sharding != "data_parallel" for t in placement.tables) * (placement.devices > 1)
