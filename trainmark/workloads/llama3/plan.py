"""What `trainmark plan` tells of a Llama-3: memory, predicted time, and other splits to try."""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import get_args

from trainmark.config import filled
from trainmark.hardware.devices import Cluster
from trainmark.hardware.links import LINK_EFFICIENCY
from trainmark.hardware.machine import ELSEWHERE, Used, sources, used_links
from trainmark.hardware.memory import MemoryPlan, misfit, what_fits
from trainmark.hardware.plans import Plan, Work
from trainmark.hardware.products import MEASURED
from trainmark.workloads.llama3.flops import flops
from trainmark.workloads.llama3.memory import plan_devices
from trainmark.workloads.llama3.runs import LlamaRun, Model, Recompute, smaller
from trainmark.workloads.llama3.step_time import (
    RATES,
    UPDATE_EFFICIENCY,
    Prediction,
    predict,
)

MICRO_BATCHES = (1, 2, 4, 8)
WITHIN = (0.92, 1.08)
"""Error to expect of a predicted time, where the rates were fitted to this package's own runs."""
RESOURCES = {
    "compute": "compute",
    "tensor": "the link",
    "data": "the link",
    "update": "memory bandwidth",
    "pipeline": "waiting",
}


def plan(cfg: LlamaRun, cluster: Cluster) -> Plan:
    """The plan of a resolved run, for the cluster that it was resolved for."""
    prediction, memory = predict(cfg, cluster), plan_devices(cfg)
    each = cluster.world // len(memory)  # pipeline ranks are the outermost: devices in a row
    fullest = max(memory, key=lambda rank: rank.total)
    return Plan(
        memory=[rank for rank in memory for _ in range(each)],
        seconds=[
            {**dataclasses.asdict(rank), "step": rank.step}
            for rank in prediction.ranks
            for _ in range(each)
        ],
        no_time=prediction.unknown or None,
        parts=dataclasses.asdict(prediction.slowest) if prediction.ranks else {},
        off=WITHIN if _is_like_measured(cfg, cluster) else ELSEWHERE,
        resources=RESOURCES,
        work=Work(
            amount=prediction.tokens,
            unit="tokens",
            flops=flops(cfg, 0, prediction.tokens)["6N"],
            convention="6N",
        ),
        constants=_constants(prediction),
        sources=[
            f"shares: {_rates(cluster, prediction)}",
            *_sources(cfg, cluster, prediction),
        ],
        too_large=misfit(cfg.name, fullest, cluster, partial(_advice, cfg, cluster)),
    )


def _is_like_measured(cfg: LlamaRun, cluster: Cluster) -> bool:
    """Whether it has what all fitted rows have; of several devices, those are of another system."""
    is_shaped = cfg.model.block_parameters == Model().block_parameters and cfg.sequence == 8192
    is_usual = cfg.precision in ("bf16", "fp8") and cfg.recompute == "none" and not cfg.eager
    return cluster == MEASURED and is_shaped and is_usual and filled(cfg.micro_batch) <= 2


def _sources(cfg: LlamaRun, cluster: Cluster, found: Prediction) -> list[str]:
    rate: Used = "GEMMs" if found.rates.of_gemms else "peak"
    return sources(cluster, cfg.precision, [rate, "memory bandwidth", *used_links(cluster)])


def _rates(cluster: Cluster, found: Prediction) -> str:
    if cluster.hardware in RATES or found.rates.of_gemms:
        return found.rates.source
    return (
        f"{found.rates.source}; of {cluster.hardware} nothing was measured, and the same shares "
        "are assumed"
    )


def _constants(found: Prediction) -> dict[str, float]:
    of = "GEMMs" if found.rates.of_gemms else "peak"
    return {
        f"matmul of {of}": found.rates.matmul,
        f"fp8 matmul of {of}": found.rates.fp8,
        "tensor-parallel collective of link": found.rates.link,
        "other collective of link": LINK_EFFICIENCY,
        "update of bandwidth": UPDATE_EFFICIENCY,
    }


def _advice(cfg: LlamaRun, cluster: Cluster, available: float) -> str:
    def needed(run: LlamaRun) -> MemoryPlan:
        return max(plan_devices(run), key=lambda rank: rank.total)

    return what_fits(smaller(cfg), needed, available)


# --- other splits


def alternatives(cfg: LlamaRun, cluster: Cluster) -> Iterator[tuple[str, LlamaRun]]:
    """Every split, micro-batch and recomputation, each with its flags; some of them cannot run.

    How data-parallel ranks share weights, the schedule, and all that changes what is learned stay
    as they are.
    """
    for parallel in _splits(cluster):
        for micro_batch in MICRO_BATCHES:
            for recompute in get_args(Recompute):
                run = dataclasses.replace(
                    cfg,
                    parallel=parallel,
                    micro_batch=micro_batch,
                    accumulate=None,
                    recompute=recompute,
                )
                flags = f"--parallel {parallel} --micro-batch {micro_batch}"
                yield f"{flags} --recompute {recompute}", run


def _splits(cluster: Cluster) -> Iterator[str]:
    """Tensor-parallel ranks, which talk all the time, within a node."""
    devices = cluster.world
    for pp in _divisors(devices):
        for tp in _divisors(devices // pp):
            if tp <= cluster.devices:
                yield f"PP{pp}DP{devices // pp // tp}TP{tp}"


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
