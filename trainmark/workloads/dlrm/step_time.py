"""How long a DLRM step takes, predicted before it runs.

    step = slowest device of (gather + exchange + products + passes + starts + update)

On one GPU these are its kernels (`gpu_time.py`). Where tables lie on several, gather, exchange and
update are those of `embeddings/placement/costs.py`, and the dense part is a GPU's; the host starts
every operation by itself there, and a device waits for it. On CPUs

    products = operations / layers and dot products as measured, forward and backward
    passes = ids x what each takes besides
    starts = a step and its layers with hardly a sample, as measured

The MLPs' all-reduce runs during the backward pass, two thirds of the dense part; only what is
longer counts. Reading data is taken to be hidden.
"""

import dataclasses
import math
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
from trainmark.hardware.known import CPU, between
from trainmark.hardware.links import LINK_EFFICIENCY
from trainmark.hardware.machine import ELSEWHERE, Machine, NotKnownError, machine, needed_peak
from trainmark.hardware.memory import MemoryPlan
from trainmark.hardware.products import COPY_OF_BANDWIDTH, MEASURED, rates_of, shares_of
from trainmark.workloads.dlrm import sharding
from trainmark.workloads.dlrm.flops import flops
from trainmark.workloads.dlrm.gpu_time import HOST_S, StepTime, forward_s, gpu_time
from trainmark.workloads.dlrm.network import Layer
from trainmark.workloads.dlrm.runs import DlrmRun
from trainmark.workloads.dlrm.sizes import cluster, is_plain, on_one_gpu

# Intervals. On one H200: what 40 configurations were off by, rounded up; a short step
# depends on small kernels, and on the host.
WITHIN, WITHIN_SMALL = (0.92, 1.06), (0.89, 1.15)
SMALL_STEP_S = 1e-3

# Assumptions, for CPUs of which only peak and bandwidth are known.
MATMUL_EFFICIENCY, TRAFFIC_EFFICIENCY = 0.5, 0.5
LAST_LAYER = 16
"""Bytes of a number that the last layer of a CPU reads, which has one output: it is read forward
and backward, and its gradient written and read."""
# PyTorch's operations of a step, as its profiler counts them on a CPU: those of a step, of each
# layer, of an optimiser with a state for each layer, of an exchange.
OPERATIONS, OF_A_LAYER, OPTIMIZER_OPERATIONS, EXCHANGE_OPERATIONS = 246, 45, 32, 48
ID_BYTES = 4
REQUEST_S = 0.06e-3
"""Of a request's start and end on the host: as those of one sample have it on an H200."""
LAUNCH_S = 4e-6
"""Of starting one on a GPU, where it was not measured. An assumption."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Seconds of a step, and bytes, for every device."""

    placement: Placement
    memory: list[MemoryPlan]
    host_bytes: list[int]
    seconds: list[dict[str, float]]
    """Of the parts of a step; none where `unknown` says why."""
    unknown: str
    batch: int
    off: tuple[float, float]
    """Of the predicted time: the least and the most that is expected."""

    @property
    def slowest(self) -> dict[str, float]:
        """The parts of a step on the device that the others wait for."""
        return max(self.seconds, key=lambda parts: sum(parts.values()), default={})

    @property
    def step_s(self) -> float | None:
        """The slowest device's."""
        return sum(self.slowest.values()) if self.seconds else None


def predict(cfg: DlrmRun) -> Prediction:
    """Memory and time of a resolved run on the cluster that it was resolved for."""
    costs, placed = sharding.table_costs(cfg), sharding.place(cfg)
    loads = costs.loads(placed, sharding.profiles(cfg))
    received = costs.received(exchanged_tables(placed))
    seconds: list[dict[str, float]] = []
    unknown, off = "", ELSEWHERE
    try:
        if any(load.host for load in loads) and costs.machine.unknown_host:
            raise NotKnownError(costs.machine.unknown_host)
        dense = _on_cpus(cfg, costs) if cluster(cfg).hardware == CPU else _on_gpus(cfg, costs)
        seconds = [_parts(cfg, costs, costs.time(load, received), dense) for load in loads]
        if _is_like_measured(cfg):
            off = WITHIN if dense.total >= SMALL_STEP_S else WITHIN_SMALL
    except NotKnownError as error:
        unknown = str(error)
    return Prediction(
        placement=placed,
        memory=sharding.plan_devices(cfg),
        host_bytes=[load.host for load in loads],
        seconds=seconds,
        unknown=unknown,
        batch=filled(cfg.global_batch),
        off=off,
    )


def _parts(
    cfg: DlrmRun, costs: TableCosts, tables: DeviceTime, dense: StepTime
) -> dict[str, float]:
    """Seconds of a device."""
    if on_one_gpu(cfg):
        tables = DeviceTime(gather=dense.forward, exchange=0.0, update=dense.update)
    else:
        dense = dataclasses.replace(dense, passes=dense.passes + dense.forward)
        exchange = tables.exchange + _shown_reduction_s(cfg, costs, dense)
        tables = dataclasses.replace(tables, exchange=exchange)
    starts = dense.starts + _waiting_s(cfg, costs, tables.total + dense.dense)
    link = max(0.0, tables.host - tables.total - dense.products - dense.passes - starts)
    parts = {"gather": tables.gather, "host link": link, "exchange": tables.exchange}
    parts |= {"products": dense.products, "passes": dense.passes, "starts": starts}
    return parts | {"update": tables.update}


def _is_like_measured(cfg: DlrmRun) -> bool:
    """Whether it lies within what the 40 configurations varied."""
    model = cfg.model
    is_within = (
        4096 <= filled(cfg.global_batch) <= 262_144
        and 32 <= model.embedding_dim <= 256
        and 8 <= len(model.table_rows) <= 40
    )
    has_measured_layers = model.bottom_output == "relu" and not model.interaction_dropout
    return cluster(cfg) == MEASURED and is_plain(cfg) and is_within and has_measured_layers


def constants(cfg: DlrmRun, machine: Machine) -> dict[str, float]:
    """The shares of peaks and bandwidths that stand where nothing was measured."""
    measured, on_cpu = machine.measured, cluster(cfg).hardware == CPU
    matmul = MATMUL_EFFICIENCY if on_cpu else shares_of(cfg.precision)["forward"]
    is_known = cfg.precision in measured.gemm or (on_cpu and cfg.precision in measured.layer)
    shares = {
        "matmul of peak": None if is_known else matmul,
        "copy of bandwidth": None if on_cpu or measured.copy else COPY_OF_BANDWIDTH,
    }
    if not on_one_gpu(cfg):
        shares["gather of bandwidth"] = None if measured.gather else GATHER_EFFICIENCY
        shares["update of bandwidth"] = None if measured.update else UPDATE_EFFICIENCY
    if machine.devices > 1:
        shares["collective of link"] = None if measured.node else LINK_EFFICIENCY
    return {name: share for name, share in shares.items() if share is not None}


def _on_gpus(cfg: DlrmRun, costs: TableCosts) -> StepTime:
    rates = rates_of(cluster(cfg), costs.machine, cfg.precision)
    return gpu_time(cfg, rates, filled(cfg.micro_batch), sharding.profiles(cfg))


def _shown_reduction_s(cfg: DlrmRun, costs: TableCosts, dense: StepTime) -> float:
    """What the backward pass does not hide of the sum of the MLPs' gradients."""
    if costs.machine.devices == 1:
        return 0.0
    size = cfg.model.dense_parameters * 4
    if cluster(cfg).hardware == CPU:  # ranks have no cores to spare: two of them, and the ids
        ids = ID_BYTES * costs.received(len(cfg.model.table_rows)) / costs.step.row_bytes
        return 2 * costs.all_reduce_s(size / 2) + costs.all_to_all_s(ids)
    return max(costs.all_reduce_s(size) - dense.dense * 2 / 3, 0.0)


def _waiting_s(cfg: DlrmRun, costs: TableCosts, device_s: float) -> float:
    """Of a GPU for its host, which starts each operation by itself where there are no CUDA graphs:
    on several devices, for rows in host memory, and for what has no kernels of ours."""
    sharding, alone = cfg.sharding, costs.machine.devices == 1
    has_kernels = sharding.engine == "native" and cfg.optimizer.name != "adam"
    has_graphs = not cfg.eager and alone and has_kernels and not sharding.host_tables
    if cluster(cfg).hardware == CPU or has_graphs:
        return 0.0
    launch_s = costs.machine.measured.launch_s or LAUNCH_S
    return max(0.0, _operations(cfg) * launch_s - device_s)


def _operations(cfg: DlrmRun) -> int:
    """That PyTorch starts in a step."""
    layers = len(cfg.model.dense_layers)
    has_state = cfg.optimizer.name != "sgd"
    exchanges = EXCHANGE_OPERATIONS * (cluster(cfg).world > 1 or cfg.sharding.force_exchange)
    once = OPTIMIZER_OPERATIONS * layers * has_state
    return once + filled(cfg.accumulate) * (OPERATIONS + OF_A_LAYER * layers + exchanges)


# --- without learning


def evaluation_s(cfg: DlrmRun) -> float | None:
    """Seconds of a batch of `evaluate` on one GPU; None where they are not known."""
    found = _forward_s(cfg, filled(cfg.eval_batch))
    return found and max(found, HOST_S)


def request_s(cfg: DlrmRun, samples: int) -> float | None:
    """Likewise of a request of `infer`, from host memory to host memory."""
    found, model = _forward_s(cfg, samples), cfg.model
    ids = zip(model.table_rows, model.bag_sizes, strict=True)
    moved = 2 * model.numerical_features + sum(_id_bytes(rows) * count for rows, count in ids)
    devices = machine(cluster(cfg))
    if found is None or devices.unknown_host:
        return None
    return REQUEST_S + found + samples * moved / devices.host_link


def _id_bytes(rows: int) -> int:
    """Of an id in a dataset's types."""
    return 1 if rows < 127 else 2 if rows < 32767 else 4


def _forward_s(cfg: DlrmRun, samples: int) -> float | None:
    where = cluster(cfg)
    if not on_one_gpu(cfg):
        return None
    try:
        rates = rates_of(where, machine(where), cfg.precision)
    except NotKnownError:
        return None
    return forward_s(cfg, rates, samples, sharding.profiles(cfg))


# --- CPUs


def _on_cpus(cfg: DlrmRun, costs: TableCosts) -> StepTime:
    """Seconds of MLPs and interaction of one rank."""
    machine = costs.machine
    machine.check_known()
    measured = machine.measured
    local = filled(cfg.global_batch) // machine.devices
    of_layers = measured.layer_s.get(cfg.precision, {})
    layers = sum(between(of_layers, _width(layer)) or 0.0 for layer in cfg.model.dense_layers)
    return StepTime(
        forward=0.0,
        products=_products_s(cfg, machine, local),
        passes=local * sum(cfg.model.bag_sizes) * (measured.id_s or 0.0),
        starts=filled(cfg.accumulate) * ((measured.step_s or 0.0) + layers),
        update=0.0,
    )


def _products_s(cfg: DlrmRun, machine: Machine, samples: int) -> float:
    """Seconds of products; of each layer at the rate of its width, where that was measured."""
    model, measured = cfg.model, machine.measured
    rates = measured.layer.get(cfg.precision) or measured.gemm.get(cfg.precision)
    if rates:
        # Below the least width that was measured, bytes take the time: the rate falls with it.
        def rate_of(width: float) -> float:
            return filled(between(rates, width)) * min(1.0, width / min(rates))

        *hidden, last = model.dense_layers
        layers = sum(
            6.0 * layer.fan_in * layer.fan_out / rate_of(_width(layer)) for layer in hidden
        )
        layers += LAST_LAYER * last.fan_in / machine.streaming(TRAFFIC_EFFICIENCY)
        dots = 6.0 * model.dot_products * model.embedding_dim
        width = math.sqrt((len(model.table_rows) + 1) * model.embedding_dim)
        dots /= between(measured.interaction, model.embedding_dim) or rate_of(width)
        return samples * (layers + dots)
    peak = needed_peak(cluster(cfg), measured, cfg.precision)
    return flops(cfg, samples, 0)["model"] / (peak * MATMUL_EFFICIENCY)


def _width(layer: Layer) -> float:
    """Of the square matrix that has as many operations for each number read and written."""
    return 2 * layer.fan_in * layer.fan_out / (layer.fan_in + layer.fan_out)
