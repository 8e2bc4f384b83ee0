"""What a DistilBERT step costs: floating-point operations, and memory for activations."""

from trainmark.workloads.distilbert.runs import DistilbertRun

TILE = 128
"""Tokens that FlashAttention takes at a time; sentences are rounded up to it."""


def flops(cfg: DistilbertRun, samples: int, tokens: int) -> dict[str, float]:
    """Matrix products of the blocks, forward and backward (twice the forward).

    Padded: the dense layers at sequence_length tokens for every sentence. Packed: at the sentences'
    own tokens, less what the last block leaves out. In both, attention is that of real tokens, at
    their mean length (a lower bound): what padding computes there, nobody reads.
    """
    model = cfg.model
    if cfg.mode == "padded":
        dense = 2.0 * model.encoder_weights * samples * cfg.sequence_length
    else:
        last_block = model.hidden**2 + 2 * model.hidden * model.feed_forward
        dense = 2.0 * (model.encoder_weights * tokens - last_block * (tokens - samples))
    length = tokens / samples if samples else 0.0
    attention = 4.0 * model.layers * model.hidden * samples * length**2
    return {"model": 3.0 * (dense + attention)}


def activation_bytes(cfg: DistilbertRun) -> int:
    """Estimated: what one micro-batch keeps for its backward pass, with its gradients."""
    model, layers = cfg.model, cfg.model.layers
    full_width = cfg.precision in ("fp32", "tf32")
    padded = cfg.mode == "padded"
    length = cfg.sequence_length if padded else cfg.longest or cfg.sequence_length
    # Per block: input, QKV, attention, two sums with their norms, both sides of GELU.
    per_token = layers * (9 * model.hidden + 2 * model.feed_forward) + model.hidden // 2
    elements, micro = tokens_computed(cfg) * per_token, cfg.micro_batch or 0
    if not full_width:  # FlashAttention adds up the gradient of queries in fp32, by whole tiles
        return 2 * elements + 4 * micro * -(-length // TILE) * TILE * model.hidden
    # Plain attention keeps its weights, before and after dropout, and has their gradient of one
    # block; packed sentences are given rows of equal length for it.
    elements += (2 * layers + 1) * micro * model.heads * length**2
    elements += 0 if padded else 3 * layers * micro * length * model.hidden
    return 4 * elements


def tokens_computed(cfg: DistilbertRun) -> int:
    """Tokens that a micro-batch computes, padding included."""
    if cfg.mode == "packed":
        return cfg.token_budget or 0
    return (cfg.micro_batch or 0) * cfg.sequence_length
