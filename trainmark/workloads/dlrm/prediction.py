"""How long a DLRM step takes, predicted before it runs.

    step = slowest device of (gather + exchange + dense + update)

Gather, exchange and update are those of `embeddings/placement/costs.py`. The dense part is the
same everywhere:

    dense = operations / (0.5 peak) + bytes of activations / (0.5 memory bandwidth)

Where `trainmark calibrate` has measured GEMMs and copies, their rates stand for these halves. The
MLPs' all-reduce runs during the backward pass, two thirds of the dense part; only what is
longer counts. Launching kernels and reading data are taken to be hidden, which small batches do not
allow.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from trainmark.config import filled
from trainmark.embeddings.placement.costs import (
    GATHER_EFFICIENCY,
    UPDATE_EFFICIENCY,
    DeviceTime,
    TableCosts,
    exchanged_tables,
)
from trainmark.embeddings.placement.placement import Placement
from trainmark.hardware.devices import Unknown
from trainmark.hardware.links import LINK_EFFICIENCY
from trainmark.hardware.machine import Machine, peak_of
from trainmark.hardware.memory import MemoryPlan
from trainmark.workloads.dlrm import sharding
from trainmark.workloads.dlrm.flops import flops
from trainmark.workloads.dlrm.runs import DlrmRun
from trainmark.workloads.dlrm.sizes import (
    dense_layers,
    dense_parameters,
    dot_products,
    interaction_activations,
    interaction_width,
)

# Where nothing was measured. GEMMs of dlrm-small, batch 65536, on one H200: 0.48 of the bf16 peak.
MATMUL_EFFICIENCY = 0.5
# An assumption: elementwise operations and the interaction, partly fused.
TRAFFIC_EFFICIENCY = 0.5


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Seconds of a step, and bytes, for every device."""

    placement: Placement
    memory: list[MemoryPlan]
    host_bytes: list[int]
    tables: list[DeviceTime]
    dense_s: float | None
    """None where `unknown` says why there are no times."""
    unknown: str
    batch: int

    def device_s(self, device: int) -> float | None:
        return None if self.dense_s is None else self.tables[device].total + self.dense_s

    @property
    def step_s(self) -> float | None:
        """The slowest device's."""
        if self.dense_s is None:
            return None
        return self.dense_s + max(table.total for table in self.tables)

    @property
    def samples_per_s(self) -> float | None:
        return None if self.step_s is None else self.batch / self.step_s


def predict(cfg: DlrmRun) -> Prediction:
    """Memory and time of a resolved run on the cluster that it was resolved for."""
    devices = sharding.cluster(cfg).world
    costs = sharding.table_costs(cfg, devices)
    placed = sharding.place(cfg, devices)
    loads = costs.loads(placed, sharding.profiles(cfg))
    received = costs.received(exchanged_tables(placed))
    dense = _dense_s(cfg, costs)
    return Prediction(
        placement=placed,
        memory=sharding.plan_devices(cfg),
        host_bytes=[load.host for load in loads],
        tables=[costs.time(load, received) for load in loads],
        dense_s=None if isinstance(dense, str) else dense,
        unknown=dense if isinstance(dense, str) else "",
        batch=filled(cfg.global_batch),
    )


def constants(machine: Machine, precision: str) -> dict[str, float]:
    """The shares of peaks and bandwidths that stand where nothing was measured."""
    measured = machine.measured
    shares = {
        "matmul of peak": None if precision in measured.gemm else MATMUL_EFFICIENCY,
        "traffic of bandwidth": None if measured.copy else TRAFFIC_EFFICIENCY,
        "gather of bandwidth": None if measured.gather else GATHER_EFFICIENCY,
        "update of bandwidth": None if measured.update else UPDATE_EFFICIENCY,
        "collective of link": None if measured.node or machine.devices == 1 else LINK_EFFICIENCY,
    }
    return {name: share for name, share in shares.items() if share is not None}


def _dense_s(cfg: DlrmRun, costs: TableCosts) -> float | str:
    """Seconds of MLPs and interaction on one device; or why they are not known."""
    machine = costs.machine
    local = filled(cfg.global_batch) // machine.devices
    compute = _compute_s(cfg, machine, local)
    if machine.unknown or isinstance(compute, str):
        return machine.unknown or str(compute)
    moved = local * _elements_moved(cfg) * costs.step.element_bytes
    dense = compute + moved / machine.streaming(TRAFFIC_EFFICIENCY)
    if machine.devices == 1:
        return dense
    reduce = costs.all_reduce_s(dense_parameters(cfg.model) * 4)
    return dense + max(reduce - dense * 2 / 3, 0.0)


def _compute_s(cfg: DlrmRun, machine: Machine, samples: int) -> float | str:
    """Seconds of products; of each layer at the rate of its width, where that was measured."""
    if cfg.precision in machine.measured.gemm:
        return sum(
            6.0 * products * samples / (machine.measured.matmul(cfg.precision, width) or 1)
            for products, width in _products(cfg)
        )
    peak = peak_of(sharding.cluster(cfg), cfg.precision)
    if isinstance(peak, Unknown) and machine.measured.gemm:
        return f"GEMMs were measured in {', '.join(machine.measured.gemm)}, not in {cfg.precision}"
    if isinstance(peak, Unknown):
        return peak.reason
    return flops(cfg, samples, 0)["model"] / (peak.flops * MATMUL_EFFICIENCY)


def _products(cfg: DlrmRun) -> Iterator[tuple[int, float]]:
    """Multiply-adds of a sample's forward pass, with the width of the matrix: `multiply_adds`."""
    model = cfg.model
    for layer in dense_layers(model):
        yield layer.fan_in * layer.fan_out, math.sqrt(layer.fan_in * layer.fan_out)
    vectors = len(model.table_rows) + 1
    yield dot_products(model) * model.embedding_dim, math.sqrt(vectors * model.embedding_dim)


def _elements_moved(cfg: DlrmRun) -> int:
    """By one sample, outside of GEMMs.

    An MLP's activation is written, then read, its gradient written, and read. The interaction reads
    its vectors forward and backward and writes their gradients; so do its dot products. Layers
    between them are as those of an MLP.
    """
    model = cfg.model
    vectors = len(model.table_rows) + 1
    mlps = sum(model.bottom_mlp) + sum(model.top_mlp)
    layers = mlps + interaction_activations(model)
    return 4 * layers + 3 * (vectors * model.embedding_dim + interaction_width(model))
