"""How large a DLRM is: layers and widths of its dense part, rows and bytes of its tables."""

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from trainmark.config import filled
from trainmark.embeddings.placement.access import StoredRow
from trainmark.hardware.devices import Cluster
from trainmark.hardware.known import CPU
from trainmark.workloads.dlrm.runs import DlrmRun, Model

WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1}
SCALE_BYTES = {"int8": 4, "fp8": 4}  # per row
CROSS_ROWS = 65_521
"""Rows of a cross's table: a prime, for its hash (crosses.py)."""


# --- the dense part


@dataclass(frozen=True)
class Layer:
    """A linear layer."""

    fan_in: int
    fan_out: int
    has_bias: bool = True


def dense_layers(model: Model) -> list[Layer]:
    """The layers of both MLPs and of the interaction."""
    bottom = [model.numerical_features, *model.bottom_mlp]
    top = [interaction_width(model), *model.top_mlp]
    return [*_mlp_layers(bottom), *_interaction_layers(model), *_mlp_layers(top)]


def _mlp_layers(widths: Sequence[int]) -> list[Layer]:
    return [Layer(fan_in, fan_out) for fan_in, fan_out in itertools.pairwise(widths)]


def _interaction_layers(model: Model) -> list[Layer]:
    width = joined_width(model)
    if model.interaction == "projection":
        return [layer for own in branches(model) for layer in _mlp_layers([width, *own])]
    if model.interaction != "dcn":
        return []
    rank = cross_rank(model)
    low_rank = [] if rank == "full" else [Layer(width, rank, has_bias=False)]
    one = [*low_rank, Layer(width if rank == "full" else rank, width)]
    return one * cross_layers(model)


def dense_parameters(model: Model) -> int:
    """Weights and biases of everything but tables."""
    return sum((layer.fan_in + layer.has_bias) * layer.fan_out for layer in dense_layers(model))


def dense_tensors(model: Model) -> int:
    return sum(1 + layer.has_bias for layer in dense_layers(model))


# --- the interaction


def interaction_width(model: Model) -> int:
    """How many numbers the top MLP reads. Dot products are padded with zeros to a multiple of 8, as
    NVIDIA's are."""
    width = width_without_zeros(model)
    return -(-width // 8) * 8 if model.interaction in ("dot", "dot_and_inputs") else width


def width_without_zeros(model: Model) -> int:
    """How many numbers the top MLP reads, without that padding."""
    if model.interaction in ("dot", "projection"):  # behind the bottom MLP's output
        return model.embedding_dim + dot_products(model)
    if model.interaction == "dot_and_inputs":
        return joined_width(model) + dot_products(model) + model.numerical_features
    return joined_width(model)


def dot_products(model: Model) -> int:
    """How many of a sample's products of two vectors the interaction computes."""
    if model.interaction in ("dot", "dot_and_inputs"):
        vectors = len(model.table_rows) + 1
        return vectors * (vectors - 1) // 2
    if model.interaction == "projection":
        return math.prod(own[-1] // model.embedding_dim for own in branches(model))
    return 0


def joined_width(model: Model) -> int:
    """The width of all vectors of a sample side by side."""
    return (len(model.table_rows) + 1) * model.embedding_dim


def cross_layers(model: Model) -> int:
    return model.cross_layers or 3


def cross_rank(model: Model) -> int | Literal["full"]:
    """TorchRec's advice is a quarter of the width, to keep the quality of full rank."""
    return model.cross_rank or min(512, max(joined_width(model) // 4, 1))


def branches(model: Model) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The widths of both MLPs of a projection."""
    usual = (2048, 16 * model.embedding_dim)
    return model.branch1_mlp or usual, model.branch2_mlp or usual


def interaction_activations(model: Model) -> int:
    """Elements of a sample between what the interaction reads and what it gives."""
    outputs = sum(layer.fan_out for layer in _interaction_layers(model))
    # Every cross layer also adds the product of its output and the first input to its own.
    sums = (cross_layers(model) - 1) * joined_width(model) if model.interaction == "dcn" else 0
    return outputs + sums


# --- devices


def cluster(cfg: DlrmRun, devices: int | None = None) -> Cluster:
    """The cluster that the run was resolved for; one node of it for another number of devices."""
    hardware, nodes, per_node = filled(cfg.sharding.cluster).rsplit("x", 2)
    resolved = Cluster(hardware, int(nodes), int(per_node))
    return resolved if devices in (None, resolved.world) else Cluster(hardware, 1, devices)


def on_one_gpu(cfg: DlrmRun) -> bool:
    """Whether a single GPU holds all tables, and the kernels that gather, interact and update."""
    sharding = cfg.sharding
    exchanges = sharding.host_tables or sharding.force_exchange or has_narrow_tables(cfg.model)
    has_kernels = sharding.engine == "native" and cfg.optimizer.name != "adam"
    if sharding.cluster is None or exchanges or not has_kernels:
        return False
    return cluster(cfg).world == 1 and cluster(cfg).hardware != CPU


def is_plain(cfg: DlrmRun) -> bool:
    """Whether a step is of the kind that was measured: one GPU, one id of each feature, dot
    products, one micro-batch."""
    model = cfg.model
    is_whole = cfg.accumulate == 1 and not cfg.eager and not filled(model.dropout)
    is_simple = model.interaction == "dot" and not has_bags(model)
    return on_one_gpu(cfg) and is_whole and is_simple


# --- tables


def cross_features(cross: str) -> tuple[int, ...]:
    """The numbers of a cross's features."""
    return tuple(map(int, cross.split("x")))


def feature_rows(model: Model) -> tuple[int, ...]:
    """Rows of the tables that are a feature's own; those of crosses lie behind them."""
    return model.table_rows[: len(model.table_rows) - len(model.crosses)]


def hotness(model: Model) -> tuple[int, ...]:
    """Ids that a sample has of each feature, at most."""
    return model.hotness or (1,) * len(model.table_rows)


def has_bags(model: Model) -> bool:
    """Whether a sample may have another number of ids than one of each feature."""
    return model.varies or any(count != 1 for count in hotness(model))


def widths(model: Model) -> tuple[int, ...]:
    """The width of each table."""
    if model.table_widths is None:
        return (model.embedding_dim,) * len(model.table_rows)
    if model.table_widths != "auto":
        return model.table_widths
    # As many numbers as tell so many values apart, and some room; powers of 2 lie well in memory.
    return tuple(
        min(model.embedding_dim, 1 << round(math.log2(6 * rows**0.25))) for rows in model.table_rows
    )


def has_narrow_tables(model: Model) -> bool:
    return any(width < model.embedding_dim for width in widths(model))


def table_parameters(model: Model) -> int:
    return sum(map(operator.mul, model.table_rows, widths(model)))


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
    tables = zip(cfg.model.table_rows, widths(cfg.model), stored_rows(cfg), strict=True)
    return sum(rows * (width * stored.weight + stored.scale) for rows, width, stored in tables)


def in_other_formats(cfg: DlrmRun) -> bool:
    """Whether some table is not fp32."""
    return any(kind != "fp32" for kind in table_formats(cfg))


# --- the model


def sizes(cfg: DlrmRun) -> dict[str, int]:
    """What `list` and `show` print about the model."""
    tables = table_parameters(cfg.model)
    return {
        "table rows": sum(cfg.model.table_rows),
        "parameters": tables + dense_parameters(cfg.model),
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
