"""Where a DLRM run's tables lie: from its configuration to a checked placement."""

import math
from pathlib import Path

from trainmark.embeddings import placement as placements
from trainmark.embeddings.placement import Placement
from trainmark.embeddings.strategies import by_strategy
from trainmark.workloads.dlrm.runs import DlrmRun


def place(cfg: DlrmRun, devices: int) -> Placement:
    """The placement of a resolved run's tables over `devices`, the same on every rank."""
    rows, dim, sharding = cfg.model.table_rows, cfg.model.embedding_dim, cfg.sharding
    if sharding.placement.endswith(".json"):
        return placements.read(Path(sharding.placement), rows, dim, devices)
    placed = by_strategy(
        sharding.placement,
        rows,
        dim,
        devices,
        column_slice_threshold=sharding.column_slice_threshold or math.inf,
        data_parallel_threshold=sharding.data_parallel_threshold or 0,
        host_tables=sharding.host_tables,
    )
    return placements.checked(placed, rows, dim, devices)
