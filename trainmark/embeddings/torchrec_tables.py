"""TorchRec's own things, made from ours: collection, plan, shards; and what it cannot do.

TorchRec is an extra, and imported only where it is used.
"""

import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from trainmark.distributed.mesh import Mesh
from trainmark.embeddings.exchange.connection import group_of_one
from trainmark.embeddings.placement.placement import Placement, TablePlacement
from trainmark.embeddings.tables.store import TablePart, table_names
from trainmark.hardware.devices import Cluster
from trainmark.hardware.machine import machine

OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")
"""What FBGEMM updates by the same formulas as ours; its Adam adds eps elsewhere."""


@dataclass(frozen=True, kw_only=True)
class TableSpecs:
    """The tables of a run, and how a step uses them."""

    rows: Sequence[int]
    dim: int
    optimizer: str
    eps: float
    micro_batch: int
    """Samples of one lookup on one device."""
    accumulate: int
    """Lookups of one step."""
    hotness: Sequence[int] | None = None
    """Ids of each feature, at most; None: one of each."""

    @property
    def has_bags(self) -> bool:
        return self.hotness is not None


def problems(specs: TableSpecs, placement: Placement | None) -> list[str]:
    """Why TorchRec cannot train these tables as the native engine would, a sentence each."""
    found = []
    if find_spec("torchrec") is None or find_spec("fbgemm_gpu") is None:
        found.append(
            "--engine torchrec needs TorchRec, which is not installed: pip install "
            "'trainmark[torchrec]' on a CUDA machine; docs/parallelism.md has the line for CPUs."
        )
    if specs.optimizer not in OPTIMIZERS:
        found.append(
            f"--engine torchrec has no {specs.optimizer} that equals ours; it has "
            f"{', '.join(OPTIMIZERS)}."
        )
    if specs.dim % 4:
        found.append(f"--engine torchrec: embedding_dim must divide by 4. Received: {specs.dim}.")
    if specs.accumulate > 1 and specs.optimizer != "sgd":
        found.append(
            "--engine torchrec updates rows once per micro-batch, which is the same for SGD alone. "
            f"Received: accumulate {specs.accumulate} with {specs.optimizer}. Use a larger "
            "micro_batch, or --engine native."
        )
    for table in placement.tables if placement else ():
        found += _table_problems(table, specs)
    return found


def _table_problems(table: TablePlacement, specs: TableSpecs) -> Iterator[str]:
    name = f"--engine torchrec: table {table.table}"
    if table.sharding == "data_parallel" or table.memory == "host":
        where = table.sharding if table.sharding == "data_parallel" else "in host memory"
        yield f"{name} is {where}, which only the native engine has. Change the placement."
    if table.sharding == "column_wise" and specs.optimizer == "rowwise_adagrad":
        yield (
            f"{name} is column_wise, and TorchRec's rowwise_adagrad keeps a sum for each slice of "
            "a row instead of one for the row. Use adagrad or sgd, or --engine native."
        )
    if any(shard.num_columns % 4 for shard in table.shards):
        yield f"{name}: TorchRec needs slices whose number of columns divides by 4."


def device_type(cluster: Cluster) -> str:
    """Of its devices, in PyTorch's words."""
    return "cpu" if cluster.hardware == "cpu" else "cuda"


def feature_names(tables: int) -> list[str]:
    return [f"feature_{i}" for i in range(tables)]


def _its_names(tables: int) -> list[str]:
    """Names of tables, in which TorchRec allows no full stop."""
    return [f"table_{i}" for i in range(tables)]


def make_collection(specs: TableSpecs) -> Any:
    """The tables on the meta device, with their optimiser."""
    import torchrec

    _silence()
    tables = len(specs.rows)
    collection = torchrec.EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            torchrec.EmbeddingBagConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=specs.dim,
                feature_names=[feature],
                init_fn=lambda weight: weight,  # we fill it ourselves
            )
            for name, rows, feature in zip(
                _its_names(tables), specs.rows, feature_names(tables), strict=True
            )
        ],
    )
    optimizers = {
        "sgd": torchrec.optim.SGD,
        "adagrad": torchrec.optim.Adagrad,
        "rowwise_adagrad": torchrec.optim.RowWiseAdagrad,
    }
    settings = {"lr": 0.0} | ({} if specs.optimizer == "sgd" else {"eps": specs.eps})
    torchrec.optim.apply_optimizer_in_backward(
        optimizers[specs.optimizer], collection.parameters(), settings
    )
    return collection


def make_plan(
    collection: Any, specs: TableSpecs, placement: Placement | None, cluster: Cluster
) -> Any:
    """TorchRec's plan of the collection, the same on every rank: by its planner, or ours."""
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan

    sharder = EmbeddingBagCollectionSharder()
    if placement is None:
        return _its_plan(collection, sharder, specs, cluster)
    names = _its_names(len(specs.rows))
    return construct_module_sharding_plan(
        collection,
        {names[table.table]: _as_torchrec(table) for table in placement.tables},
        sharder=sharder,
        local_size=cluster.devices,
        world_size=cluster.world,
        device_type=device_type(cluster),
    )


def _as_torchrec(table: TablePlacement) -> Any:
    """A table's placement in TorchRec's words. It cuts row-wise tables itself, over all ranks."""
    from torchrec.distributed import sharding_plan

    if table.sharding == "row_wise":
        return sharding_plan.row_wise()
    if table.sharding == "table_wise":
        return sharding_plan.table_wise(rank=table.shards[0].device)
    by_column = sorted(table.shards, key=lambda shard: shard.columns)
    return sharding_plan.column_wise(ranks=[shard.device for shard in by_column])


def _its_plan(collection: Any, sharder: Any, specs: TableSpecs, cluster: Cluster) -> Any:
    from torchrec.distributed.planner import (
        EmbeddingShardingPlanner,
        ParameterConstraints,
        Topology,
    )
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

    # Not data-parallel, which it would update by another optimiser than the fused one.
    kinds = ["table_wise", "row_wise"]
    if specs.optimizer != "rowwise_adagrad":
        kinds.append("column_wise")
    names = _its_names(len(specs.rows))
    allowed = {
        name: ParameterConstraints(
            sharding_types=kinds, compute_kernels=["fused"], pooling_factors=[float(hotness)]
        )
        for name, hotness in zip(names, specs.hotness or [1] * len(names), strict=True)
    }
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=cluster.world,
            compute_device=device_type(cluster),
            local_world_size=cluster.devices,
            hbm_cap=machine(cluster).memory,
        ),
        batch_size=specs.micro_batch,
        # `machine` has left out what drivers and collectives need already.
        storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
        constraints=allowed,
    )
    return planner.plan(collection, [sharder]).plan[""]


def parts_of(plan: Any, specs: TableSpecs, rank: int) -> Iterator[TablePart]:
    """What one rank holds, in the order of the tables."""
    tables = len(specs.rows)
    for name, its_name, rows in zip(
        table_names(tables), _its_names(tables), specs.rows, strict=True
    ):
        for shard in plan[its_name].sharding_spec.shards:
            (row, column), (num_rows, width) = shard.shard_offsets, shard.shard_sizes
            if shard.placement.rank() == rank and num_rows:
                yield TablePart(
                    name=name,
                    shape=(rows, specs.dim),
                    rows=(row, row + num_rows),
                    columns=(column, column + width),
                )


def shard(collection: Any, plan: Any, mesh: Mesh) -> Any:
    """Allocate this rank's parts."""
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.comm_ops import set_gradient_division
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.types import ShardingEnv, ShardingPlan

    # It needs a group of a single process too.
    group = mesh.group("dp") or group_of_one(mesh.device)
    set_gradient_division(False)  # our losses are divided by the samples of all ranks already
    sharded = DistributedModelParallel(
        collection,
        env=ShardingEnv.from_process_group(group),
        device=mesh.device,
        plan=ShardingPlan({"": plan}),
        sharders=[EmbeddingBagCollectionSharder()],
        init_data_parallel=False,
    )
    return sharded.module


def _silence() -> None:
    """Of its warnings, which no user can act on, every rank would show its own."""
    for name in ("torchrec", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")


def local_tensors(tensors: dict[str, Any], name: str, parts: Sequence[TablePart]) -> list[Tensor]:
    """Which of TorchRec's local shards are these parts'."""
    found = []
    for part in parts:
        its_name = part.name.replace("tables.", "table_")
        shards = tensors[name.format(its_name)].local_shards()
        corner = [part.rows[0], part.columns[0]]
        (tensor,) = [
            shard.tensor
            for shard in shards
            if shard.metadata.shard_offsets == corner[: shard.tensor.dim()]
        ]
        found.append(tensor)
    return found
