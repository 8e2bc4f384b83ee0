"""How large a DLRM is: parameters, widths and bytes of its tables, the MLPs' parameters."""

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterator

from trainmark.workloads.dlrm.runs import DlrmRun, Model

WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1}
SCALE_BYTES = {"int8": 4, "fp8": 4}  # per row


def mlp_parameters(model: Model) -> int:
    """Weights and biases of both MLPs."""
    widths = [model.numerical_features, *model.bottom_mlp]
    top = [interaction_width(model), *model.top_mlp]
    return sum(
        (fan_in + 1) * fan_out
        for mlp in (widths, top)
        for fan_in, fan_out in itertools.pairwise(mlp)
    )


def interaction_width(model: Model) -> int:
    """[bottom MLP, strictly lower triangle of the dot products, zeros to a multiple of 8]."""
    return -(-width_without_zeros(model) // 8) * 8


def width_without_zeros(model: Model) -> int:
    """Of the interaction, up to the zeros that pad it."""
    vectors = len(model.table_rows) + 1
    return model.embedding_dim + vectors * (vectors - 1) // 2


def widths(model: Model) -> tuple[int, ...]:
    """Of each table."""
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


def table_bytes(cfg: DlrmRun) -> int:
    """Bytes of all tables as they are stored, without the optimiser's state."""
    tables = zip(cfg.model.table_rows, widths(cfg.model), table_formats(cfg), strict=True)
    return sum(
        rows * (width * WEIGHT_BYTES[kind] + SCALE_BYTES.get(kind, 0))
        for rows, width, kind in tables
    )


def in_other_formats(cfg: DlrmRun) -> bool:
    """Whether some table is not fp32."""
    return any(kind != "fp32" for kind in table_formats(cfg))


def sizes(cfg: DlrmRun) -> dict[str, int]:
    """What `list` and `show` print about the model."""
    tables = table_parameters(cfg.model)
    return {
        "table rows": sum(cfg.model.table_rows),
        "parameters": tables + mlp_parameters(cfg.model),
        "tables bytes": table_bytes(cfg),
    }


def smaller(cfg: DlrmRun) -> Iterator[tuple[str, DlrmRun]]:
    """The same tables in fewer bits, the widest first.

    fp16 takes what bf16 does, with a smaller range; fp8 what int8 does, at five times the loss of
    AUC (docs/performance.md).
    """
    for kind in ("bf16", "int8"):
        chosen = dataclasses.replace(cfg.table_format, table_precision=kind)
        run = dataclasses.replace(cfg, table_format=chosen)
        if table_formats(run) != table_formats(cfg):
            yield f"--table-precision {kind}", run
