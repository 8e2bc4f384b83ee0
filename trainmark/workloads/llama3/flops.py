"""What a Llama-3 step costs: floating-point operations, and memory for activations."""

from trainmark.config import element_bytes
from trainmark.workloads.llama3.runs import (
    LlamaRun,
    Model,
    axes_of,
    stages_per_rank,
)

PUBLISHED_PARAMETERS = 8e9
"""What the published MFU counts for Llama-3-8B, whatever the network really has."""


def flops(cfg: LlamaRun, samples: int, tokens: int) -> dict[str, float]:
    """Operations to train on `tokens`, by the conventions in use.

    - `6N`: 6 per parameter and token; for Llama-3-8B with the published 8e9, without attention.
    - `palm`: 6 per parameter that multiplies (all but the embeddings), and 12 x layers x hidden x
      sequence for attention, which counts the masked half of the square too.
    - `palm-causal`: the same with the half that is computed.
    """
    model = cfg.model
    is_8b = model.parameters == Model().parameters
    count = PUBLISHED_PARAMETERS if is_8b else model.parameters
    matrices = model.parameters - model.vocab * model.hidden
    attention = 12 * model.layers * model.hidden * cfg.sequence
    return {
        "6N": 6.0 * count * tokens,
        "palm": (6.0 * matrices + attention) * tokens,
        "palm-causal": (6.0 * matrices + attention / 2) * tokens,
    }


def activation_bytes(cfg: LlamaRun, pp_rank: int = 0) -> int:
    """Estimated: what the micro-batches in flight keep for their backward pass.

    The first pipeline rank is the fullest: it has begun as many micro-batches as there are ranks
    before the first one returns; each rank after it has begun one fewer.
    """
    model, axes = cfg.model, axes_of(cfg)
    width = element_bytes(cfg.precision)
    tokens = (cfg.micro_batch or 1) * cfg.sequence
    in_flight = min(axes["pp"] - pp_rank, cfg.accumulate or 1) * (stages_per_rank(cfg) + 1) / 2
    layers = model.layers / axes["pp"]
    block = width * tokens * _kept_per_token(cfg)
    if cfg.precision == "fp8" and cfg.recompute == "none":
        block += model.block_parameters  # the weights as they were multiplied, a byte each
    blocks = block * layers * in_flight / axes["tp"]
    # The head works in chunks, its gradient of the whole weight aside.
    is_last = pp_rank == axes["pp"] - 1
    head = is_last * model.vocab * model.hidden * width / axes["tp"]
    return int(blocks + head + 3 * 2**30 * (model.vocab > 50_000))


def gradients_beside_activations(cfg: LlamaRun, gradients: int) -> int:
    """How many of a single micro-batch's `gradients` bytes add to the fullest moment of a step.

    The backward pass frees a block's activations and makes its gradients. So either all activations
    are there and no gradients (the head's is counted with them), or, where a block has more
    gradients than activations, all gradients and the activations of the last block to be freed.
    """
    layers = cfg.model.layers / axes_of(cfg)["pp"]
    freed = activation_bytes(cfg) * (1 - 1 / layers)
    return max(0, int(gradients - freed))


def _kept_per_token(cfg: LlamaRun) -> float:
    """Numbers of the computing type that one block keeps for a token."""
    model = cfg.model
    if cfg.recompute == "full":
        return model.hidden
    keys = 2 * model.kv_heads * model.head_dim
    # Both residuals, queries, attention's output, keys and values; gate and up.
    products = 4 * model.hidden + keys + 2 * model.ffn
    if cfg.recompute == "selective":
        return products
    inputs = 2 * model.hidden + model.ffn  # the norms' outputs and SwiGLU's
    if cfg.precision == "fp8":  # half as wide; attention's output once more, for the next product
        return products + (inputs + model.hidden) / 2
    return products + inputs
