"""What a DistilBERT step costs: floating-point operations, and memory for activations."""

from trainmark.workloads.distilbert.runs import DistilbertRun, encoder_weights


def flops(cfg: DistilbertRun, samples: int, tokens: int) -> dict[str, float]:
    """Matrix products of the blocks, forward and backward (twice the forward).

    Padded: the dense layers at sequence_length tokens for every sentence. Packed: at the sentences'
    own tokens, less what the last block leaves out. In both, attention is that of real tokens, at
    their mean length (a lower bound): what padding computes there, nobody reads.
    """
    model = cfg.model
    if cfg.mode == "padded":
        dense = 2.0 * encoder_weights(model) * samples * cfg.sequence_length
    else:
        last_block = model.hidden**2 + 2 * model.hidden * model.feed_forward
        dense = 2.0 * (encoder_weights(model) * tokens - last_block * (tokens - samples))
    length = tokens / samples if samples else 0.0
    attention = 4.0 * model.layers * model.hidden * samples * length**2
    return {"model": 3.0 * (dense + attention)}


def activation_bytes(cfg: DistilbertRun) -> int:
    """Estimated: what one micro-batch keeps for its backward pass, with its gradients."""
    model = cfg.model
    full_width = cfg.precision in ("fp32", "tf32")
    micro = cfg.micro_batch or 0
    tokens = micro * cfg.sequence_length if cfg.mode == "padded" else cfg.token_budget or 0
    # Per block: input, QKV, attention, two sums with their norms, both sides of GELU.
    per_token = model.layers * (9 * model.hidden + 2 * model.feed_forward)
    per_token += 4 * model.hidden + 2 * model.feed_forward  # gradients of one block at a time
    # Plain attention keeps its weights, before and after dropout; FlashAttention does not.
    rows = 2 * model.layers * model.heads * cfg.sequence_length if full_width else 0
    return int(tokens * (per_token + rows) * (4 if full_width else 2))
