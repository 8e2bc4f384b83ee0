"""What a DLRM step costs: floating-point operations, and memory for activations."""

import itertools

from trainmark.workloads.dlrm.runs import DlrmRun
from trainmark.workloads.dlrm.sizes import interaction_width


def flops(cfg: DlrmRun, samples: int, tokens: int) -> dict[str, float]:
    """Operations to train on `samples`: GEMMs and dot interaction, forward and backward.

    The backward pass of a GEMM is two GEMMs of the same size; lookups and updates
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


def dense_activation_bytes(cfg: DlrmRun) -> int:
    """Estimated: what one micro-batch keeps for its backward pass, with its gradients."""
    model = cfg.model
    vectors = len(model.table_rows) + 1
    per_sample = 2 * (sum(model.bottom_mlp) + sum(model.top_mlp) + interaction_width(model))
    # The rows, the joined vectors and their gradients, the dot products and theirs.
    per_sample += 4 * vectors * model.embedding_dim + 2 * vectors * vectors
    # Where numbers are dropped: which, and what is left of them.
    per_sample += 2 * (sum(model.bottom_mlp[:-1]) + sum(model.top_mlp[:-1])) * (model.dropout > 0)
    per_sample += 2 * interaction_width(model) * (model.interaction_dropout > 0)
    width = 4 if cfg.precision in ("fp32", "tf32") else 2
    local_batch = (cfg.micro_batch or 0) * (cfg.accumulate or 1)
    rows_of_all_micro_batches = local_batch * (vectors - 1) * model.embedding_dim * 4
    return (cfg.micro_batch or 0) * per_sample * width + rows_of_all_micro_batches
