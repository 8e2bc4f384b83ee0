"""What `trainmark plan` tells of a Llama-3: memory, predicted time, and other splits to try."""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from typing import get_args

from trainmark.contract import Plan
from trainmark.formatting import human
from trainmark.hardware.devices import Cluster
from trainmark.hardware.memory import MemoryPlan, misfit, what_fits
from trainmark.workloads.llama3.memory import plan_devices
from trainmark.workloads.llama3.prediction import RATES, Prediction, RankTime, predict
from trainmark.workloads.llama3.runs import LlamaRun, Recompute, smaller

MICRO_BATCHES = (1, 2, 4, 8)
BOUND_BY = {
    "compute": "compute",
    "tensor": "the link (tensor-parallel exchange)",
    "data": "the link (data-parallel exchange)",
    "update": "memory bandwidth (the optimiser)",
    "pipeline": "the pipeline (ranks that wait)",
}


def plan(cfg: LlamaRun, cluster: Cluster) -> Plan:
    """Of a resolved run, on the cluster that it was resolved for."""
    prediction, memory = predict(cfg, cluster), plan_devices(cfg)
    each = cluster.world // len(memory)  # pipeline ranks are the outermost: devices in a row
    fullest = max(memory, key=lambda rank: rank.total)
    return Plan(
        memory=[rank for rank in memory for _ in range(each)],
        seconds=[_seconds(rank) for rank in prediction.ranks for _ in range(each)],
        sentences=_sentences(cfg, cluster, prediction),
        too_large=misfit(cfg.name, fullest, cluster, partial(_advice, cfg, cluster)),
    )


def _seconds(rank: RankTime) -> Mapping[str, float | None]:
    return {**dataclasses.asdict(rank), "step": rank.step}


def _sentences(cfg: LlamaRun, cluster: Cluster, found: Prediction) -> list[str]:
    if found.step_s is None:
        return [f"No time is predicted: {found.unknown}."]
    slowest = dataclasses.asdict(found.slowest)
    bound = BOUND_BY[max(slowest, key=lambda part: slowest[part])]
    mfu = "–".join(f"{100 * share:.1f}" for share in found.mfu)
    rates = f"Rates: {found.rates.source}"
    if cluster.hardware not in RATES:
        rates += f"; of {cluster.hardware} nothing was measured, and the same shares are assumed"
    return [
        f"Predicted, not measured: {found.step_s:.3g} s for {found.tokens:,} tokens, "
        f"{human(found.tokens_per_device_s)} tokens/s and device, MFU {mfu} % (6N). Bound by "
        f"{bound}.",
        f"{rates} (the formulas: docs/planning.md).",
    ]


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
