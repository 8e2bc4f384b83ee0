"""What a DLRM step costs: floating-point operations, and memory for activations."""

import itertools

from trainmark.config import element_bytes, filled
from trainmark.hardware.memory import LIBRARIES
from trainmark.workloads.dlrm.runs import DlrmRun
from trainmark.workloads.dlrm.sizes import is_plain


def flops(cfg: DlrmRun, samples: int, tokens: int) -> dict[str, float]:
    """Operations to train on `samples`: GEMMs and dot products, forward and backward.

    The backward pass of a GEMM is two GEMMs of the same size; lookups and updates
    move bytes and are not counted.
    """
    return {"model": 6.0 * multiply_adds(cfg) * samples}


def multiply_adds(cfg: DlrmRun) -> int:
    """Multiply-adds of one sample's forward pass."""
    gemms = sum(layer.fan_in * layer.fan_out for layer in cfg.model.dense_layers)
    return gemms + cfg.model.dot_products * cfg.model.embedding_dim


def dense_activation_bytes(cfg: DlrmRun) -> int:
    """Estimated: what one micro-batch keeps for its backward pass, with its gradients."""
    model = cfg.model
    if is_plain(cfg):
        return _in_slots(cfg)
    vectors = len(model.table_rows) + 1
    per_sample = 2 * (sum(model.bottom_mlp) + sum(model.top_mlp) + model.interaction_width)
    # The rows, the joined vectors and their gradients, the dot products of all pairs and theirs;
    # or whatever else is between them and what the top MLP reads.
    per_sample += 4 * vectors * model.embedding_dim
    per_sample += 2 * vectors * vectors * (model.interaction in ("dot", "dot_and_inputs"))
    per_sample += 2 * model.interaction_activations
    # Where numbers are dropped: which, and what is left of them.
    mlps = [model.bottom_mlp, model.top_mlp]
    mlps += model.branches if model.interaction == "projection" else ()
    per_sample += 2 * sum(sum(mlp[:-1]) for mlp in mlps) * (filled(model.dropout) > 0)
    per_sample += 2 * model.interaction_width * (model.interaction_dropout > 0)
    # Several ids per feature: these, sorted, and where each one's gradient is.
    ids = 40 * sum(model.bag_sizes) * (cfg.micro_batch or 0) * model.has_bags
    width = element_bytes(cfg.precision)
    local_batch = (cfg.micro_batch or 0) * (cfg.accumulate or 1)
    rows_of_all_micro_batches = local_batch * (vectors - 1) * model.embedding_dim * 4
    return (cfg.micro_batch or 0) * per_sample * width + rows_of_all_micro_batches + ids


def _in_slots(cfg: DlrmRun) -> int:
    """What a CUDA graph's step holds while the top MLP's widest gradients are computed.

    Two slots each have the ids, in order and sorted, and where each one's gradient goes; there are
    one gradient for every looked-up row, the outputs of all layers and of the interaction, and the
    gradients of a layer's output and input, the latter twice where a ReLU's mask is no part of the
    product that computes it.
    """
    model, wide = cfg.model, cfg.precision in ("fp32", "tf32")
    element, features, numerical = 4 if wide else 2, len(model.table_rows), model.numerical_features
    hidden = [*model.bottom_mlp, *model.top_mlp[:-1]]
    first, *behind = [model.interaction_width, *model.top_mlp[:-1]]
    pairs = [first + sum(behind[:1])]
    pairs += [(1 + wide) * fan_in + fan_out for fan_in, fan_out in itertools.pairwise(behind)]
    elements = features * model.embedding_dim + sum(hidden) + first + max(pairs)
    slots = 2 * (20 * features + 4 * numerical) + (not wide) * element * -(-numerical // 8) * 8
    copies = 0 if wide else model.dense_parameters * element
    return LIBRARIES + copies + filled(cfg.micro_batch) * (elements * element + slots)
