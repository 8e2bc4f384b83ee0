"""What a DLRM step costs: floating-point operations, and memory for activations."""

import itertools

from trainmark.workloads.dlrm.runs import DlrmRun, interaction_width
from trainmark.workloads.dlrm.sharding import host_bytes as host_bytes
from trainmark.workloads.dlrm.sharding import plan_devices as plan_devices


def flops(cfg: DlrmRun, samples: int, tokens: int) -> dict[str, float]:
    """Operations to train on `samples`: matrix products and dot interaction, forward and backward.

    The backward pass of a matrix product is two products of the same size; lookups and updates
    move bytes and are not counted.
    """
    return {"model": 6.0 * multiply_adds(cfg) * samples}


def multiply_adds(cfg: DlrmRun) -> int:
    """Multiply-adds of one sample's forward pass."""
    model = cfg.model
    vectors = len(model.table_rows) + 1
    dots = vectors * (vectors - 1) // 2 * model.embedding_dim
    return dots + sum(
        fan_in * fan_out
        for widths in (
            [model.numerical_features, *model.bottom_mlp],
            [interaction_width(model), *model.top_mlp],
        )
        for fan_in, fan_out in itertools.pairwise(widths)
    )


def activation_bytes(cfg: DlrmRun) -> int:
    """Estimated: what a device keeps for the backward pass, and the rows that it sends."""
    return max(plan.activations for plan in plan_devices(cfg))
