"""Which parts of DLRM a rank owns: the MLPs whole, and the parts of tables that the placement says.

One rank with all tables in its device's memory has nothing to exchange: on a GPU it looks up and
interacts in one kernel. Tables of several widths take the engine of many ranks, which puts rows
together from pieces anyway.
"""

import torch
from torch import nn

from trainmark.config import filled
from trainmark.distributed.mesh import Mesh
from trainmark.embeddings.bag_engines import FusedBagEngine, LocalBagEngine
from trainmark.embeddings.engine import EmbeddingEngine
from trainmark.embeddings.fused import FusedEngine
from trainmark.embeddings.mean import MeanEngine
from trainmark.embeddings.placement.placement import Placement
from trainmark.embeddings.sharded import ShardedEngine
from trainmark.embeddings.tables.formats import Formats
from trainmark.embeddings.torchrec_tables import TableSpecs
from trainmark.kernels.compiled import is_compiled_for
from trainmark.kernels.table_formats import FORMATS
from trainmark.training.precision import compute_dtype
from trainmark.workloads.dlrm.interactions import CrossNetwork
from trainmark.workloads.dlrm.model import Dlrm, table_rule
from trainmark.workloads.dlrm.runs import DlrmRun
from trainmark.workloads.dlrm.sharding import place
from trainmark.workloads.dlrm.sizes import cluster, in_other_formats, table_formats


def parallelize(model: Dlrm, mesh: Mesh, cfg: DlrmRun) -> list[nn.Module]:
    """The model with the engine for its ranks."""
    on_gpu, is_native = mesh.device.type == "cuda", cfg.sharding.engine == "native"
    dtype = compute_dtype(cfg.precision)
    if (on_gpu and is_native) or is_compiled_for(mesh.device, dtype):
        model.bottom.fused_dtype = model.top.fused_dtype = dtype
    if cfg.precision == "fp8":
        model.top.fused_dtype, model.top.fp8 = dtype, True
        if isinstance(model.interaction, CrossNetwork):
            model.interaction.fp8 = True
    if not is_native:
        model.tables = _torchrec_engine(mesh, cfg)
        return [_with_means(model, cfg)]
    placement = _place(mesh, cfg)
    if _needs_exchange(placement, cfg) or cfg.model.has_narrow_tables:
        model.tables = ShardedEngine(
            placement,
            cfg.model.table_rows,
            cfg.model.embedding_dim,
            table_rule(cfg),
            mesh,
            dtype,
            hotness=cfg.model.bag_sizes if cfg.model.has_bags else None,
            formats=_formats(cfg),
            force_exchange=cfg.sharding.force_exchange,
        )
    elif in_other_formats(cfg) or (on_gpu and _has_kernels(cfg)):
        model.tables = _fused_engine(cfg, dtype)
    elif cfg.model.has_bags:
        model.tables = LocalBagEngine(
            cfg.model.table_rows, cfg.model.embedding_dim, table_rule(cfg), cfg.model.bag_sizes
        )
    return [_with_means(model, cfg)]


def _with_means(model: Dlrm, cfg: DlrmRun) -> Dlrm:
    if cfg.model.pooling == "mean" and cfg.model.has_bags:
        model.tables = MeanEngine(model.tables, len(cfg.model.table_rows))
    return model


def _has_kernels(cfg: DlrmRun) -> bool:
    """Whether there are tables, and the kernels know how to update them."""
    return len(cfg.model.table_rows) > 0 and cfg.optimizer.name != "adam"


def _fused_engine(cfg: DlrmRun, dtype: torch.dtype) -> EmbeddingEngine:
    model = cfg.model
    tables = (model.table_rows, model.embedding_dim, table_rule(cfg), _formats(cfg), dtype)
    if not model.has_bags:
        return FusedEngine(*tables)
    return FusedBagEngine(*tables, hotness=model.bag_sizes, varies=model.varies)


def _formats(cfg: DlrmRun) -> Formats:
    chosen = cfg.table_format
    return Formats(
        of_tables=table_formats(cfg),
        state_dtype=FORMATS[chosen.state_precision],
        seed=cfg.seed if chosen.table_rounding == "stochastic" else None,
    )


def _place(mesh: Mesh, cfg: DlrmRun) -> Placement:
    """Rank 0's placement, on all ranks. On another kind of CPU the last bit of a predicted time may
    differ, and with it the placement; and a file need not be the same on all machines."""
    return mesh.from_main(place(cfg))


def _needs_exchange(placement: Placement, cfg: DlrmRun) -> bool:
    on_host = any(table.memory == "host" for table in placement.tables)
    return placement.devices > 1 or on_host or cfg.sharding.force_exchange


def _torchrec_engine(mesh: Mesh, cfg: DlrmRun) -> EmbeddingEngine:
    from trainmark.embeddings.torchrec_engine import TorchRecEngine

    by_its_planner = cfg.sharding.placement == "auto"
    placement = None if by_its_planner else _place(mesh, cfg)
    return TorchRecEngine(torchrec_specs(cfg), mesh, placement, cluster(cfg))


def torchrec_specs(cfg: DlrmRun) -> TableSpecs:
    """The run's tables, as the TorchRec engine needs to know them."""
    return TableSpecs(
        rows=cfg.model.table_rows,
        dim=cfg.model.embedding_dim,
        optimizer=cfg.optimizer.name,
        eps=filled(cfg.optimizer.eps),
        micro_batch=filled(cfg.micro_batch),
        accumulate=filled(cfg.accumulate),
        hotness=cfg.model.bag_sizes if cfg.model.has_bags else None,
    )
