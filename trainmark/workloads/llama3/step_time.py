"""How long a Llama-3 step takes, predicted before it runs.

A pipeline rank works on one micro-batch for

    slot = operations / TP / (share of the peak) + bytes between TP ranks / (share of the link)

and the step, with m micro-batches and 1F1B's order, takes

    step = m x slowest slot + the other ranks' slots / stages per rank + data-parallel + update

docs/predictions.md derives the parts and says where this is wrong. Each constant is fitted over
rows of several splits by `benchmarks/plan_errors.py`; none belongs to one row.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from trainmark.config import element_bytes, filled
from trainmark.hardware.devices import Cluster
from trainmark.hardware.known import Known, lookup
from trainmark.hardware.links import LINK_EFFICIENCY
from trainmark.hardware.machine import NotKnownError, machine, needed_peak
from trainmark.workloads.llama3.memory import local_parameters
from trainmark.workloads.llama3.runs import LlamaRun, axes_of, stages_per_rank
from trainmark.workloads.llama3.stages import layers_of, num_stages, stages_of


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a training system gets of a device, as shares of its datasheet, or of its GEMMs."""

    matmul: float
    """Share of the peak in 16 bits, fp32 or tf32: GEMMs, attention, and all between them."""
    fp8: float
    """Share of the fp8 peak that the blocks' GEMMs reach."""
    link: float
    """Share of the link within a node that tensor-parallel collectives reach."""
    of_gemms: bool = False
    """Whether the first two are shares of GEMMs that `trainmark calibrate` measured."""
    source: str


_FLAGPERF = "FlagPerf's Llama-3-8B on Megatron-core 0.6"
_TENSOR_LINK = 0.407
"""Fitted to seven splits of eight A100 (TP 1 to 8), together with their share of the peak."""

MEGATRON_A100 = Rates(matmul=0.648, fp8=0.0, link=_TENSOR_LINK, source=f"{_FLAGPERF}, 8 A100")
MEGATRON_H100 = Rates(matmul=0.478, fp8=0.350, link=_TENSOR_LINK, source=f"{_FLAGPERF}, H100")
OWN_H200 = Rates(
    matmul=0.609, fp8=0.461, link=_TENSOR_LINK, source="Trainmark on one H200; links as A100's"
)

RATES = {
    "a100-40g": MEGATRON_A100,
    "a100-80g": MEGATRON_A100,
    "a800-40g": MEGATRON_A100,
    "a800-80g": MEGATRON_A100,
    "h100": MEGATRON_H100,
    "h200": OWN_H200,
}
"""By hardware; of others nothing is known, and `OWN_H200` is assumed."""
# An assumption: attention and elementwise operations beside GEMMs of the hidden width.
OF_GEMM = 0.8

# AdamW's kernel on one H200: 0.03 s for 8 B weights of 16 bytes read and written.
UPDATE_EFFICIENCY = 0.85
# Elementwise operations are 0.08 of 1.44 s on one H200, a third of that in the forward pass.
SELECTIVE_RECOMPUTE = 0.02
# Of a block: each way, two gathers and two scatters of the sequence; the weights' gradients gather
# their inputs once more. Of the head: one gather, one scatter, one gather.
BLOCK_COLLECTIVES, HEAD_COLLECTIVES = 10, 3


@dataclass(frozen=True, kw_only=True)
class RankTime:
    """Seconds of a step on the devices of one pipeline rank."""

    compute: float
    tensor: float
    """Tensor-parallel exchange: the link."""
    data: float
    """Gradients and weights between data-parallel ranks: the link, or the network."""
    update: float
    """The optimiser: the device's memory."""
    pipeline: float
    """Waiting for other pipeline ranks."""

    @property
    def step(self) -> float:
        return self.compute + self.tensor + self.data + self.update + self.pipeline


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted time of a run; without `ranks`, `unknown` says why there is none."""

    ranks: Sequence[RankTime]
    rates: Rates
    unknown: str
    tokens: int
    """Tokens of a step."""

    @property
    def step_s(self) -> float | None:
        return max((rank.step for rank in self.ranks), default=None)

    @property
    def slowest(self) -> RankTime:
        """The rank that the others wait for."""
        return min(self.ranks, key=lambda rank: rank.pipeline)


def rates_of(cluster: Cluster) -> Rates:
    """Fitted to runs on this hardware; or what GEMMs were measured to reach there; or assumed."""
    fitted, device = RATES.get(cluster.hardware), _device(cluster)
    if fitted or not device.measured.gemm:
        return fitted or OWN_H200
    return dataclasses.replace(
        OWN_H200,
        matmul=OF_GEMM,
        fp8=OF_GEMM,
        of_gemms=True,
        source=f"GEMMs of {device.measured.source}, and {OF_GEMM} of their rate",
    )


def _device(cluster: Cluster) -> Known:
    found = lookup(cluster.hardware) or Known(key=cluster.hardware, name="")
    return found.shared(cluster.devices)


def predict(
    cfg: LlamaRun,
    cluster: Cluster,
    rates: Rates | None = None,
    layers: Sequence[int] | None = None,
) -> Prediction:
    """Predict the step of a resolved run on the cluster that it was resolved for.

    Args:
        rates: by default, the hardware's.
        layers: of each stage; by default, as this package splits them.
    """
    rates = rates or rates_of(cluster)
    times, unknown = [], ""
    try:
        times = _Step(cfg, cluster, rates, layers).of_ranks()
    except NotKnownError as error:
        unknown = str(error).removesuffix(".")
    tokens = filled(cfg.global_batch) * cfg.sequence
    return Prediction(ranks=times, rates=rates, unknown=unknown, tokens=tokens)


def _full_rate(cfg: LlamaRun, cluster: Cluster, rates: Rates, precision: str) -> float:
    """What the shares are shares of: the peak, or the GEMMs that were measured."""
    measured = _device(cluster).measured
    if not rates.of_gemms:
        return needed_peak(cluster, measured, precision)
    rate = measured.matmul(precision, cfg.model.hidden)
    if rate is None:
        raise NotKnownError(f"no {precision} GEMM was measured on {cluster.hardware}")
    return rate


# --- the parts


class _Step:
    """The parts of a step, by pipeline rank; `NotKnownError` where a rate is not known.

    Args:
        layers: of each stage, as in `predict`.
    """

    def __init__(
        self, cfg: LlamaRun, cluster: Cluster, rates: Rates, layers: Sequence[int] | None
    ) -> None:
        self._cfg, self._rates, self._axes = cfg, rates, axes_of(cfg)
        self.devices = machine(cluster)
        in_fp8 = cfg.precision == "fp8"
        narrow = _full_rate(cfg, cluster, rates, "fp8") * rates.fp8 if in_fp8 else None
        # Attention and head of an fp8 run are in bf16.
        precision = "bf16" if in_fp8 else cfg.precision
        self._wide = _full_rate(cfg, cluster, rates, precision) * rates.matmul
        self._narrow = self._wide if narrow is None else narrow
        self.devices.check_known()
        self._layers = layers or list(map(len, layers_of(cfg)))

    def of_ranks(self) -> list[RankTime]:
        ranks, batches = range(self._axes["pp"]), filled(self._cfg.accumulate)
        compute = [self._compute_s(rank) for rank in ranks]
        tensor = [self._tensor_s(rank) for rank in ranks]
        slots = [sum(both) for both in zip(compute, tensor, strict=True)]
        passing = 0.0 if len(ranks) == 1 else self.passing_s()
        filling = (sum(slots) - max(slots)) / stages_per_rank(self._cfg)
        whole = batches * (max(slots) + passing) + filling
        exchanged = max(self._data_s(rank, batches * compute[rank]) for rank in ranks)
        updated = max(self._update_s(rank) for rank in ranks)
        return [
            RankTime(
                compute=batches * compute[rank],
                tensor=batches * tensor[rank],
                data=exchanged,
                update=updated,
                pipeline=whole - batches * slots[rank],
            )
            for rank in ranks
        ]

    def _compute_s(self, pp_rank: int) -> float:
        """Seconds of one micro-batch, without what is exchanged."""
        cfg, model = self._cfg, self._cfg.model
        tokens = filled(cfg.micro_batch) * cfg.sequence
        attention = 12 * model.hidden * cfg.sequence / 2  # causal: half of the square
        block = 6 * model.block_parameters / self._narrow + attention / self._wide
        again = {"none": 1.0, "selective": 1 + SELECTIVE_RECOMPUTE, "full": 4 / 3}[cfg.recompute]
        head = 6 * model.vocab * model.hidden / self._wide
        blocks = self._blocks(pp_rank) * block * again
        return tokens * (blocks + self._has_head(pp_rank) * head) / self._axes["tp"]

    def _blocks(self, pp_rank: int) -> int:
        return sum(self._layers[stage] for stage in stages_of(self._cfg, pp_rank))

    def _has_head(self, pp_rank: int) -> bool:
        return num_stages(self._cfg) - 1 in stages_of(self._cfg, pp_rank)

    def _tensor_s(self, pp_rank: int) -> float:
        """Seconds that one micro-batch waits for tensor-parallel collectives."""
        tp = self._axes["tp"]
        # Recomputing repeats the forward pass's four of ten.
        again = 1.4 if self._cfg.recompute == "full" else 1.0
        collectives = BLOCK_COLLECTIVES * again * self._blocks(pp_rank)
        collectives += self._has_head(pp_rank) * HEAD_COLLECTIVES
        size = self._activation_bytes * (tp - 1) / tp
        return collectives * size / (self._link(ranks=tp) * self._rates.link)

    def _link(self, ranks: int) -> float:
        """Between so many neighbouring ranks: within a node, or the network."""
        devices = self.devices
        return devices.node_link if ranks <= devices.devices_per_node else devices.network

    def passing_s(self) -> float:
        """An activation goes to the next pipeline rank, and its gradient comes back."""
        turns, link = 2 * stages_per_rank(self._cfg), self._link(ranks=self.devices.devices)
        return turns * self._activation_bytes / self._axes["tp"] / (link * LINK_EFFICIENCY)

    @property
    def _activation_bytes(self) -> int:
        """Bytes of one micro-batch between two blocks."""
        cfg = self._cfg
        element = element_bytes(cfg.precision)
        return filled(cfg.micro_batch) * cfg.sequence * cfg.model.hidden * element

    def _data_s(self, pp_rank: int, compute: float) -> float:
        """Gradients are scattered in fp32 and weights gathered, in rings of all data-parallel
        ranks.

        The slowest hop of a ring is one device's link, or its network. Once a step nothing hides
        it; FSDP gathers twice and scatters once for each micro-batch, behind the computation.
        """
        cfg, dp, element = self._cfg, self._axes["dp"], element_bytes(self._cfg.precision)
        weights = local_parameters(cfg, pp_rank) * (dp - 1) / dp
        link = self._link(ranks=dp * self._axes["tp"]) * LINK_EFFICIENCY
        if cfg.data_parallel == "fsdp" and self._axes["pp"] == 1:
            moved = filled(cfg.accumulate) * weights * (4 + 2 * element) / link
            return max(0.0, moved - compute)
        return weights * (4 + element) / link

    def _update_s(self, pp_rank: int) -> float:
        """AdamW reads and writes its states, reads gradients twice (their norm) and writes
        weights."""
        states = 24 if self._cfg.optimizer_states == "fp32" else 14
        shard = local_parameters(self._cfg, pp_rank) / self._axes["dp"]
        return shard * (states + 2 * 4 + 2) / self.devices.streaming(UPDATE_EFFICIENCY)
