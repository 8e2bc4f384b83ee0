"""What `trainmark plan` tells of a DLRM: memory, predicted time, and where each table lies."""

import dataclasses
from collections.abc import Mapping

from trainmark.contract import Plan
from trainmark.embeddings.placement.placement import TablePlacement, to_json
from trainmark.formatting import gib_cell, human, ranges, readable_size
from trainmark.hardware.devices import Cluster
from trainmark.hardware.machine import Machine, Used, machine, sources, used_links
from trainmark.hardware.memory import card_bytes
from trainmark.workloads.dlrm import sharding
from trainmark.workloads.dlrm.runs import DlrmRun, has_power_law
from trainmark.workloads.dlrm.sizes import on_one_gpu, widths
from trainmark.workloads.dlrm.step_time import Prediction, constants, predict

BOUND_BY = {
    "gather": "memory bandwidth (reading rows)",
    "exchange": "the link (exchange between devices)",
    "update": "memory bandwidth (updating rows)",
    "dense": "the dense part (compute and memory)",
}


def plan(cfg: DlrmRun, cluster: Cluster) -> Plan:
    """Of a resolved run, on the cluster that it was resolved for."""
    prediction = predict(cfg)
    parts, found = _slowest(prediction), machine(cluster, cfg.sharding.network_gb_s)
    said = sources(cluster, cfg.precision, _used(cfg, cluster, found, prediction))
    return Plan(
        memory=prediction.memory,
        host_bytes=prediction.host_bytes,
        seconds=[_seconds(prediction, device) for device in range(cluster.world)],
        no_time=prediction.unknown or None,
        parts=parts,
        interval_s=prediction.interval_s,
        bound_by=BOUND_BY[max(parts, key=lambda part: parts[part])] if parts else None,
        constants=constants(cfg, found),
        sources=said,
        tables=[
            _table(cfg, placed)
            for placed in sorted(prediction.placement.tables, key=lambda t: t.table)
        ],
        sentences=_sentences(cfg, prediction, said),
        too_large=_too_large(cfg, cluster, prediction),
        placement=to_json(prediction.placement),
    )


def _seconds(prediction: Prediction, device: int) -> Mapping[str, float | None]:
    known, tables = prediction.dense_s is not None, prediction.tables[device]
    return {
        "gather": tables.gather if known else None,
        "exchange": tables.exchange if known else None,
        "dense": prediction.dense_s,
        "update": tables.update if known else None,
        "step": prediction.device_s(device),
    }


def _used(cfg: DlrmRun, cluster: Cluster, found: Machine, prediction: Prediction) -> list[Used]:
    figures: list[Used] = ["GEMMs" if cfg.precision in found.measured.gemm else "peak"]
    figures += ["memory bandwidth", *used_links(cluster)]
    if not on_one_gpu(cfg):  # whose kernels have constants of their own
        figures += ["reading rows", "updating rows"]
    return [*figures, "link to the host"] if any(prediction.host_bytes) else figures


def _slowest(prediction: Prediction) -> Mapping[str, float]:
    """The parts of a step on the device that takes longest; none where times are not known."""
    if prediction.dense_s is None:
        return {}
    slowest = max(prediction.tables, key=lambda device: device.total)
    return {**dataclasses.asdict(slowest), "dense": prediction.dense_s}


def _table(cfg: DlrmRun, placed: TablePlacement) -> Mapping[str, str]:
    rows, width = cfg.model.table_rows[placed.table], widths(cfg.model)[placed.table]
    host = ", host" if placed.memory == "host" else ""
    return {
        "table": str(placed.table),
        "rows": f"{rows:,}",
        "GiB, fp32": gib_cell(rows * width * 4),
        "sharding": placed.sharding + host,
        "devices": ranges(sorted({shard.device for shard in placed.shards})),
        "why": placed.reason,
    }


def _sentences(cfg: DlrmRun, prediction: Prediction, said: list[str]) -> list[str]:
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
    if prediction.step_s is None or prediction.interval_s is None:
        return [*lines, f"No time is predicted: {prediction.unknown}."]
    low, high = (1e3 * bound for bound in prediction.interval_s)
    return [
        *lines,
        f"Predicted, not measured: {1e3 * prediction.step_s:.2f} ms ({low:.2f} to {high:.2f}) for "
        f"{prediction.batch:,} samples, {human(prediction.samples_per_s)} samples/s (the formulas: "
        "docs/planning.md).",
        f"Taken from: {'; '.join(said)}.",
    ]


def _too_large(cfg: DlrmRun, cluster: Cluster, prediction: Prediction) -> str | None:
    card = card_bytes(cluster)
    fullest = max(range(cluster.world), key=lambda d: prediction.memory[d].total)
    needed = prediction.memory[fullest].total
    if card is None or needed <= card:
        return None
    costs = sharding.table_costs(cfg, cluster.world)
    return (
        f"Device {fullest} needs {readable_size(needed)} of {readable_size(card)}. "
        + sharding.what_would_fit(cfg, costs)
    )
