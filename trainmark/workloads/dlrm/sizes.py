"""What a DLRM run takes: on which devices, in which formats, and how many bytes of tables."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from trainmark.config import filled
from trainmark.embeddings.placement.access import StoredRow
from trainmark.hardware.devices import Cluster
from trainmark.hardware.known import CPU
from trainmark.workloads.dlrm.runs import DlrmRun

WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1}
SCALE_BYTES = {"int8": 4, "fp8": 4}  # per row


# --- devices


def cluster(cfg: DlrmRun) -> Cluster:
    """The cluster that the run was resolved for."""
    hardware, nodes, per_node = filled(cfg.sharding.cluster).rsplit("x", 2)
    return Cluster(hardware, int(nodes), int(per_node))


def on_one_gpu(cfg: DlrmRun) -> bool:
    """Whether a single GPU holds all tables, and the kernels that gather, interact and update."""
    sharding = cfg.sharding
    exchanges = sharding.host_tables or sharding.force_exchange or cfg.model.has_narrow_tables
    has_kernels = sharding.engine == "native" and cfg.optimizer.name != "adam"
    if sharding.cluster is None or exchanges or not has_kernels:
        return False
    return cluster(cfg).world == 1 and cluster(cfg).hardware != CPU


def is_plain(cfg: DlrmRun) -> bool:
    """Whether a step is of the kind that was measured: one GPU, one id of each feature, dot
    products, one micro-batch."""
    model = cfg.model
    is_whole = cfg.accumulate == 1 and not cfg.eager and not filled(model.dropout)
    is_simple = model.interaction == "dot" and not model.has_bags
    return on_one_gpu(cfg) and is_whole and is_simple


# --- tables


def table_formats(cfg: DlrmRun) -> list[str]:
    """How each table is stored."""
    chosen = cfg.table_format
    return [
        "fp32"
        if rows <= chosen.fp32_up_to_rows or table in chosen.fp32_tables
        else chosen.table_precision
        for table, rows in enumerate(cfg.model.table_rows)
    ]


def stored_rows(cfg: DlrmRun) -> list[StoredRow]:
    """Bytes of each table's rows."""
    state = WEIGHT_BYTES[cfg.table_format.state_precision]
    return [
        StoredRow()
        if kind == "fp32"
        else StoredRow(weight=WEIGHT_BYTES[kind], scale=SCALE_BYTES.get(kind, 0), state=state)
        for kind in table_formats(cfg)
    ]


def table_bytes(cfg: DlrmRun) -> int:
    """Bytes of all tables as they are stored, without the optimiser's state."""
    tables = zip(cfg.model.table_rows, cfg.model.widths, stored_rows(cfg), strict=True)
    return sum(rows * (width * stored.weight + stored.scale) for rows, width, stored in tables)


def in_other_formats(cfg: DlrmRun) -> bool:
    """Whether some table is not fp32."""
    return any(kind != "fp32" for kind in table_formats(cfg))


# --- the model


def sizes(cfg: DlrmRun) -> dict[str, int]:
    """What `list` and `show` print about the model."""
    return {
        "table rows": sum(cfg.model.table_rows),
        "parameters": cfg.model.table_parameters + cfg.model.dense_parameters,
        "tables bytes": table_bytes(cfg),
    }


def smaller(cfg: DlrmRun) -> Iterator[tuple[str, DlrmRun]]:
    """The same tables in fewer bits, the widest first.

    fp16 takes what bf16 does, with a smaller range; fp8 what int8 does, at five times the loss of
    AUC (docs/performance.md).
    """
    state = cfg.table_format.state_precision
    kinds: tuple[tuple[Literal["bf16", "int8"], Literal["fp32", "bf16"]], ...] = (
        ("bf16", state), ("bf16", "bf16"), ("int8", state), ("int8", "bf16"),
    )  # fmt: skip
    for kind, of_state in kinds:
        if of_state != state and cfg.optimizer.name != "adagrad":
            continue
        chosen = dataclasses.replace(
            cfg.table_format, table_precision=kind, state_precision=of_state
        )
        run = dataclasses.replace(cfg, table_format=chosen)
        if (table_formats(run), of_state) != (table_formats(cfg), state):
            further = f" --state-precision {of_state}" if of_state != state else ""
            yield f"--table-precision {kind}{further}", run
