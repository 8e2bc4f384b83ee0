"""What a Llama-3 step costs: floating-point operations, and memory for activations."""

from trainmark.workloads.llama3.runs import (
    LlamaRun,
    Model,
    axes_of,
    parameters,
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
    is_8b = parameters(model) == parameters(Model())
    count = PUBLISHED_PARAMETERS if is_8b else parameters(model)
    matrices = parameters(model) - model.vocab * model.hidden
    attention = 12 * model.layers * model.hidden * cfg.sequence
    return {
        "6N": 6.0 * count * tokens,
        "palm": (6.0 * matrices + attention) * tokens,
        "palm-causal": (6.0 * matrices + attention / 2) * tokens,
    }


def activation_bytes(cfg: LlamaRun) -> int:
    """Estimated: what the micro-batches in flight keep for their backward pass.

    The first pipeline stage is the fullest: it has begun as many micro-batches as there are stages
    before the first one returns.
    """
    model, axes = cfg.model, axes_of(cfg)
    width = 4 if cfg.precision in ("fp32", "tf32") else 2
    tokens = (cfg.micro_batch or 1) * cfg.sequence
    in_flight = min(axes["pp"], cfg.accumulate or 1) * (stages_per_rank(cfg) + 1) / 2
    layers = model.layers / axes["pp"]
    per_token = width * _kept_per_token(cfg) * layers * in_flight / axes["tp"]
    # The head works in chunks, its gradient of the whole weight aside.
    head = 0 if axes["pp"] > 1 else model.vocab * model.hidden * width / axes["tp"]
    return int(tokens * per_token + head + 3 * 2**30 * (model.vocab > 50_000))


def _kept_per_token(cfg: LlamaRun) -> float:
    """Numbers that one block keeps for a token."""
    model = cfg.model
    if cfg.recompute == "full":
        return model.hidden
    keys = 2 * model.kv_heads * model.head_dim
    # Residuals, the norms' outputs, queries, keys and values, attention's output; gate and up.
    products = 4 * model.hidden + keys + 2 * model.ffn
    if cfg.recompute == "selective":
        return products
    inputs = 2 * model.hidden + model.ffn  # the norms' outputs and SwiGLU's
    return products + (inputs / 2 if cfg.precision == "fp8" else inputs)
