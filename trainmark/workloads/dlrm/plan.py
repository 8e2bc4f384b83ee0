"""What `trainmark plan` tells of a DLRM: memory, predicted time, and where each table lies."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from trainmark.embeddings.placement.placement import TablePlacement, to_json
from trainmark.embeddings.placement.strategies import STRATEGIES
from trainmark.formatting import gib_cell, ranges, readable_size
from trainmark.hardware.devices import Cluster
from trainmark.hardware.known import CPU
from trainmark.hardware.machine import Machine, Used, machine, sources, used_links
from trainmark.hardware.memory import card_bytes
from trainmark.hardware.plans import Plan, Work
from trainmark.workloads.dlrm import sharding
from trainmark.workloads.dlrm.flops import flops
from trainmark.workloads.dlrm.resolve import resolve
from trainmark.workloads.dlrm.runs import DlrmRun, has_power_law
from trainmark.workloads.dlrm.sizes import on_one_gpu, smaller
from trainmark.workloads.dlrm.step_time import (
    Prediction,
    constants,
    evaluation_s,
    predict,
    request_s,
)

HOST_TABLES = 5
"""That `--search` tries in host memory, at most."""
RESOURCES = {
    "gather": "memory bandwidth",
    "host link": "the link to the host",
    "exchange": "the link",
    "products": "compute",
    "passes": "memory bandwidth",
    "starts": "the host",
    "update": "memory bandwidth",
}


def plan(cfg: DlrmRun, cluster: Cluster) -> Plan:
    """Of a resolved run, on the cluster that it was resolved for."""
    prediction, found = predict(cfg), machine(cluster, cfg.sharding.network_gb_s)
    said = sources(cluster, cfg.precision, _used(cfg, cluster, found, prediction))
    return Plan(
        memory=prediction.memory,
        host_bytes=prediction.host_bytes,
        seconds=_seconds(prediction),
        no_time=prediction.unknown or None,
        parts=prediction.slowest,
        off=prediction.off,
        resources=RESOURCES,
        work=Work(
            amount=prediction.batch,
            unit="samples",
            flops=flops(cfg, prediction.batch, 0)["model"],
            convention="model",
        ),
        constants=constants(cfg, found),
        sources=said,
        tables=[
            _table(cfg, placed)
            for placed in sorted(prediction.placement.tables, key=lambda t: t.table)
        ],
        sentences=_sentences(cfg) + _answers(cfg),
        too_large=_too_large(cfg, cluster, prediction),
        placement=to_json(prediction.placement),
    )


def _seconds(prediction: Prediction) -> list[Mapping[str, float]]:
    """Of each device; parts that none has are not shown."""
    shown = [name for name in RESOURCES if any(parts[name] for parts in prediction.seconds)]
    return [
        {name: parts[name] for name in shown} | {"step": sum(parts.values())}
        for parts in prediction.seconds
    ]


def _used(cfg: DlrmRun, cluster: Cluster, found: Machine, prediction: Prediction) -> list[Used]:
    measured, on_cpu = found.measured, cluster.hardware == CPU
    products: Used = "GEMMs" if cfg.precision in measured.gemm else "peak"
    if on_cpu and cfg.precision in measured.layer:
        products = "layers"
    figures: list[Used] = [products, *used_links(cluster)]
    if not on_cpu:
        figures.append("memory bandwidth")
    if not on_one_gpu(cfg):  # whose kernels have constants of their own
        figures += ["reading rows", "updating rows"]
    return [*figures, "link to the host"] if any(prediction.host_bytes) else figures


def _table(cfg: DlrmRun, placed: TablePlacement) -> Mapping[str, str]:
    rows, width = cfg.model.table_rows[placed.table], cfg.model.widths[placed.table]
    host = ", host" if placed.memory == "host" else ""
    return {
        "table": str(placed.table),
        "rows": f"{rows:,}",
        "GiB, fp32": gib_cell(rows * width * 4),
        "sharding": placed.sharding + host,
        "devices": ranges(sorted({shard.device for shard in placed.shards})),
        "why": placed.reason,
    }


def _sentences(cfg: DlrmRun) -> list[str]:
    lookups = (
        "as often as preparation counted them"
        if sharding.counted(cfg)
        else "by a power law"
        if has_power_law(cfg)
        else "all equally often, because no counts are known (give --data)"
    )
    lines = [
        f"Placement: {cfg.sharding.placement}. Rows of a table are taken to be used {lookups}."
    ]
    if cfg.sharding.engine == "torchrec" and cfg.sharding.placement == "auto":
        lines.append("TorchRec's own planner will place the tables; this is what ours would do.")
    return lines


def _answers(cfg: DlrmRun) -> list[str]:
    """How long answers take, where that is known."""
    evaluation, request = evaluation_s(cfg), request_s(cfg, 1)
    if evaluation is None or request is None:
        return []
    return [
        f"Predicted without training: {1e3 * evaluation:.2f} ms for the {cfg.eval_batch:,} samples "
        f"of an evaluated batch, {1e3 * request:.2f} ms for a request of one sample."
    ]


def _too_large(cfg: DlrmRun, cluster: Cluster, prediction: Prediction) -> str | None:
    card = card_bytes(cluster)
    fullest = max(range(cluster.world), key=lambda d: prediction.memory[d].total)
    needed = prediction.memory[fullest].total
    if card is None or needed <= card:
        return None
    return (
        f"Device {fullest} needs {readable_size(needed)} of {readable_size(card)}. "
        + sharding.what_would_fit(cfg)
    )


# --- other layouts


def alternatives(cfg: DlrmRun, cluster: Cluster) -> Iterator[tuple[str, DlrmRun]]:
    """Formats and placements of the tables, and in their own format: the largest ones in host
    memory, or a batch in pieces; each with its flags. Some cannot run.

    What changes least comes first: of equally fast ones it is to be preferred.
    """
    resolved, _ = resolve(cfg, cluster)  # a dataset's tables are known only then
    placements = ["auto", *STRATEGIES] if cluster.world > 1 else ["auto"]
    for placement in placements:
        yield f"--placement {placement}", _placed(cfg, placement=placement)
    for pieces in (2, 4):
        yield (
            f"--accumulate {pieces}",
            dataclasses.replace(cfg, micro_batch=None, accumulate=pieces),
        )
    table_rows = resolved.model.table_rows
    largest = sorted(range(len(table_rows)), key=lambda table: -table_rows[table])
    for count in range(1, 1 + min(HOST_TABLES, len(largest))):
        on_host = tuple(sorted(largest[:count]))
        flags = f"--host-tables {' '.join(map(str, on_host))}"
        yield flags, _placed(cfg, placement="auto", host_tables=on_host)
    for flags, run in smaller(resolved):
        for placement in placements:
            smaller_one = dataclasses.replace(cfg, table_format=run.table_format)
            yield f"{flags} --placement {placement}", _placed(smaller_one, placement=placement)


def _placed(cfg: DlrmRun, **changes: Any) -> DlrmRun:
    return dataclasses.replace(cfg, sharding=dataclasses.replace(cfg.sharding, **changes))
