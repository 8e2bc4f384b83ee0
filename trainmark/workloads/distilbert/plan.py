"""What `trainmark plan` tells of a DistilBERT: memory, and predicted time.

    step = micro-batches x (products + attention + passes) + update + exchange

Products are those of `hardware/products.py`, whose constants come from other models. The others
were fitted to padded batches in 16 bits on one H200; packed ones test them (docs/predictions.md).
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from trainmark.config import element_bytes, filled
from trainmark.hardware.devices import Cluster
from trainmark.hardware.known import CPU
from trainmark.hardware.links import LINK_EFFICIENCY
from trainmark.hardware.machine import (
    ELSEWHERE,
    Machine,
    NotKnownError,
    Used,
    machine,
    sources,
    used_links,
)
from trainmark.hardware.memory import LIBRARIES, MemoryPlan, misfit
from trainmark.hardware.plans import Plan, Work
from trainmark.hardware.products import (
    COPY_OF_BANDWIDTH,
    MEASURED,
    Kind,
    Rates,
    product_s,
    rates_of,
    shares_of,
)
from trainmark.workloads.distilbert.flops import TILE, activation_bytes, flops, tokens_computed
from trainmark.workloads.distilbert.runs import DistilbertRun, Model

TILE_SHARE, PLAIN_TILE_SHARE = 0.11, 0.245
"""Of the peak, by a tile forward and backward, 14 x 128 x 128 operations for each column: in 16
bits, and in 4 bytes, where attention is plain."""
# Bytes over the rate of a copy, for each byte of a token that a block keeps: GELU, dropout, sums
# and norms, forward and backward; and where attention is plain, for each of its weights, and for
# each number of the rows that packed sentences are copied to (counted, not fitted).
PASSES, WEIGHTS, ROWS = 4.6, 28.0, 34 * 4
# Bytes for each parameter: of a micro-batch (casts, gradients added up), and of a step (AdamW and
# the norm of the gradient; in fp16 they are scaled back).
MICRO_BATCH, UPDATE, UNSCALED = 57.0, 41.0, 12.0
STRETCH = 1.025
"""Products bring a GPU to its power limit."""
WITHIN = (0.92, 1.08)
"""Error to expect of a predicted time, on one H200, for a model as large as the published one."""

RESOURCES = {
    "products": "compute",
    "attention": "compute",
    "passes": "memory bandwidth",
    "update": "memory bandwidth",
    "exchange": "the link",
}


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step on every device."""

    products: float
    attention: float
    passes: float
    update: float
    exchange: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


def plan(cfg: DistilbertRun, cluster: Cluster) -> Plan:
    """The plan of a resolved run, for the cluster that it was resolved for."""
    devices = machine(cluster)
    memory = _memory(cfg, cluster)
    too_large = misfit(cfg.name, memory, cluster, lambda _: "")
    try:
        if cluster.hardware == CPU:
            raise NotKnownError("distilbert has no prediction of times on CPUs")
        rates = rates_of(cluster, devices, cfg.precision)
    except NotKnownError as error:
        return Plan(memory=[memory], no_time=str(error), too_large=too_large)
    time = _time(cfg, rates, devices)
    rate: Used = "GEMMs" if rates.of_gemms else "peak"
    link = used_links(cluster)[-1:]  # the slowest hop of the ring
    said = sources(cluster, cfg.precision, [rate, "memory bandwidth", *link])
    parts = asdict(time)
    batch = filled(cfg.global_batch)
    return Plan(
        memory=[memory],
        seconds=[{**parts, "step": time.total}],
        parts=parts,
        off=WITHIN if _is_like_measured(cfg, cluster) else ELSEWHERE,
        resources=RESOURCES,
        work=Work(
            amount=batch,
            unit="sentences",
            flops=flops(cfg, batch, _tokens(cfg, batch))["model"],
            convention="model",
        ),
        constants=_constants(cfg, rates, devices),
        sources=said,
        too_large=too_large,
    )


def _tokens(cfg: DistilbertRun, sentences: int) -> int:
    """Tokens of a step, as far as the plan knows: only packed ones are counted."""
    if cfg.mode == "packed":
        return tokens_computed(cfg) * sentences // filled(cfg.micro_batch)
    return sentences * cfg.synthetic_tokens


def _is_like_measured(cfg: DistilbertRun, cluster: Cluster) -> bool:
    """Whether it has the precisions and blocks of the nine runs."""

    def blocks(model: Model) -> tuple[object, ...]:
        return model.layout, model.layers, model.hidden, model.heads, model.feed_forward

    is_alike = cfg.precision in ("bf16", "fp16", "tf32") and blocks(cfg.model) == blocks(Model())
    return cluster == MEASURED and is_alike and not cfg.eager


def _constants(cfg: DistilbertRun, rates: Rates, devices: Machine) -> dict[str, float]:
    """The shares of peaks and bandwidths that stand where nothing was measured."""
    shares, measured = {}, devices.measured
    if not rates.of_gemms:
        shares["matmul of peak"] = shares_of(cfg.precision)["forward"]
    if not measured.copy:
        shares["copy of bandwidth"] = COPY_OF_BANDWIDTH
    if devices.devices > 1 and not (measured.network if devices.nodes > 1 else measured.node):
        shares["collective of link"] = LINK_EFFICIENCY
    return shares


def _time(cfg: DistilbertRun, rates: Rates, devices: Machine) -> StepTime:
    micro, count, model = filled(cfg.micro_batch), filled(cfg.accumulate), cfg.model
    tokens, weights = tokens_computed(cfg), model.parameters
    element = element_bytes(cfg.precision)
    blocks = model.layers - 0.85 * (cfg.mode == "packed")  # all of the last but its attention
    kept = (9 * model.hidden + 2 * model.feed_forward) * element
    passes = PASSES * tokens * blocks * kept + MICRO_BATCH * weights
    unscaled = UNSCALED * (cfg.precision == "fp16")
    scale = STRETCH * count
    size, links = 4 * weights, devices.devices
    link = (devices.network if devices.nodes > 1 else devices.node_link) * LINK_EFFICIENCY
    return StepTime(
        products=scale * _products_s(cfg, rates, tokens, micro),
        attention=scale * _attention_s(cfg, rates, micro),
        passes=scale * passes / rates.copy,
        update=(UPDATE + unscaled) * weights / rates.copy,
        exchange=2 * size * (links - 1) / links / link,
    )


def _products_s(cfg: DistilbertRun, rates: Rates, tokens: int, sentences: int) -> float:
    """Seconds of all blocks' products; a packed run's last block computes what the head reads."""
    hidden, wide = cfg.model.hidden, cfg.model.feed_forward
    behind = [(hidden, hidden), (hidden, wide), (wide, hidden)]
    kinds: tuple[Kind, ...] = ("forward", "input", "weight")

    def of(samples: int, shapes: list[tuple[int, int]]) -> float:
        return sum(
            product_s(rates, cfg.precision, kind, samples, *shape)
            for shape in shapes
            for kind in kinds
        )

    read_last = sentences if cfg.mode == "packed" else tokens
    return (
        cfg.model.layers * of(tokens, [(hidden, 3 * hidden)])
        + (cfg.model.layers - 1) * of(tokens, behind)
        + of(read_last, behind)
    )


def _attention_s(cfg: DistilbertRun, rates: Rates, sentences: int) -> float:
    """FlashAttention's tiles of a sentence's rows by itself; plain attention is square."""
    model, plain = cfg.model, cfg.precision in ("fp32", "tf32")
    length = cfg.sequence_length if cfg.mode == "padded" else cfg.longest or cfg.sequence_length
    rows = -(-length // TILE)
    tiles = sentences * model.heads * rows * (rows if plain else 1)
    operations = 14 * TILE * TILE * (model.hidden // model.heads)
    share = PLAIN_TILE_SHARE if plain else TILE_SHARE
    moved = WEIGHTS * model.heads * length**2
    moved += ROWS * length * model.hidden * (cfg.mode == "packed")
    seconds = tiles * operations / (rates.peaks[cfg.precision] * share)
    return model.layers * (seconds + plain * sentences * moved / rates.copy)


# --- other layouts


def alternatives(cfg: DistilbertRun, cluster: Cluster) -> Iterator[tuple[str, DistilbertRun]]:
    """Other micro-batches of the same batch, the smallest first."""
    most = max(1, filled(cfg.global_batch) // cluster.world)
    for micro_batch in (count for count in range(1, most + 1) if most % count == 0):
        run = dataclasses.replace(cfg, micro_batch=micro_batch, accumulate=None)
        yield f"--micro-batch {micro_batch}", run


# --- memory


def _memory(cfg: DistilbertRun, cluster: Cluster) -> MemoryPlan:
    weights, model = cfg.model.parameters, cfg.model
    tensors = 8 + 12 * model.layers  # each counts its own steps
    on_gpu = cluster.hardware != CPU
    return MemoryPlan(
        weights=4 * weights,
        gradients=4 * weights,
        optimizer=8 * weights + 4 * tensors + 8 * (cfg.precision == "fp16"),
        activations=activation_bytes(cfg) + on_gpu * (LIBRARIES + 4 * weights),
    )
