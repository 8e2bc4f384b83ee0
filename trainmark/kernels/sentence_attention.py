"""Attention within sentences that lie one after another in one tensor.

Tokens [bounds[i], bounds[i+1]) are segment i.

- Packed: a segment is a sentence, or filler, which only makes up a shape and is cut into segments
  of at most `FILLER_LENGTH` tokens. Every token attends to the tokens of its own segment.
- Padded: a sentence has a row of `row_length` tokens, in two segments: itself, and its padding.
  Every token of a row, padding too, attends to the sentence: the mask of the published model.

Shapes: N tokens, H heads, D width of a head, R rows, L tokens per row.
"""

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention

FILLER_LENGTH = 128  # a block of FlashAttention: longer would only cost more
_HALVES = (torch.bfloat16, torch.float16)


def attend(
    qkv_N3HD: Tensor,
    bounds: Tensor,
    *,
    longest: int,
    row_length: int | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """[N, 3, H, D] -> [N, H, D].

    Args:
        bounds: [segments + 1] int32, where each segment begins; the last one is N.
        longest: no segment has more tokens.
        row_length: tokens per row of a padded batch; None for a packed one.
        dropout: probability of dropping an attention weight.
    """
    if qkv_N3HD.is_cuda and qkv_N3HD.dtype in _HALVES:
        queries = bounds if row_length is None else row_bounds(bounds, row_length)
        return _flash(qkv_N3HD, queries, bounds, longest, dropout)
    if row_length is not None:
        return _attend_in_rows(qkv_N3HD, bounds, row_length, dropout)
    return _attend_by_padding(qkv_N3HD, bounds, longest, dropout)


# --- plain torch


def _attend_in_rows(qkv_N3HD: Tensor, bounds: Tensor, row_length: int, dropout: float) -> Tensor:
    """Padded batches: rows as they are, with the padding masked."""
    lengths_R = bounds[1::2] - bounds[:-1:2]
    real_RL = torch.arange(row_length, device=bounds.device) < lengths_R[:, None]
    q, k, v = qkv_N3HD.unflatten(0, (-1, row_length)).permute(2, 0, 3, 1, 4).unbind(0)
    return _masked(q, k, v, real_RL, dropout).transpose(1, 2).flatten(0, 1)


def _attend_by_padding(qkv_N3HD: Tensor, bounds: Tensor, longest: int, dropout: float) -> Tensor:
    """Packed batches: give every segment a row, and take the rows apart again."""
    tokens = torch.arange(qkv_N3HD.shape[0], device=bounds.device, dtype=bounds.dtype)
    # Not bounds[1:]: on a GPU the compiler of torch 2.11 searches the whole tensor for a view.
    row_N = torch.searchsorted(bounds, tokens, right=True) - 1
    column_N = tokens - bounds[row_N]
    lengths_R = bounds.diff()
    rows = qkv_N3HD.new_zeros(lengths_R.numel(), longest, *qkv_N3HD.shape[1:])
    rows = rows.index_put((row_N, column_N), qkv_N3HD)
    q, k, v = rows.permute(2, 0, 3, 1, 4).unbind(0)
    real_RL = torch.arange(longest, device=bounds.device) < lengths_R[:, None]
    return _masked(q, k, v, real_RL, dropout).transpose(1, 2)[row_N, column_N]


def _masked(
    q_RHLD: Tensor, k_RHLD: Tensor, v_RHLD: Tensor, real_RL: Tensor, dropout: float
) -> Tensor:
    """Attention to the real tokens of a row only."""
    # A large number instead of infinity: a softmax over an empty row must be a number too.
    hidden = torch.finfo(q_RHLD.dtype).min / 2
    mask_R11L = torch.where(real_RL, 0.0, hidden).to(q_RHLD.dtype)[:, None, None, :]
    if not q_RHLD.is_cuda:
        return scaled_dot_product_attention(q_RHLD, k_RHLD, v_RHLD, mask_R11L, dropout)
    # fp32 on a GPU: the fused kernels leave TF32 tensor cores nearly idle, plain GEMMs do not.
    scores_RHLL = (q_RHLD * q_RHLD.shape[-1] ** -0.5) @ k_RHLD.transpose(-1, -2)
    weights_RHLL = (scores_RHLL + mask_R11L).softmax(-1)
    return drop(weights_RHLL, dropout, training=dropout > 0) @ v_RHLD


# --- FlashAttention


def row_bounds(bounds: Tensor, row_length: int) -> Tensor:
    """Where the queries of each segment begin in a padded batch: a whole row's with its sentence,
    and none with its padding, whose keys nobody reads."""
    places = torch.arange(bounds.numel(), dtype=bounds.dtype, device=bounds.device)
    return (places + 1) // 2 * row_length


def _flash(qkv_N3HD: Tensor, queries: Tensor, keys: Tensor, longest: int, dropout: float) -> Tensor:
    """FlashAttention, by the operator behind `torch.nn.attention.varlen`, which has no dropout."""
    q, k, v = qkv_N3HD.unbind(1)
    output, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, queries, keys, longest, longest, dropout, False, False
    )
    attended: Tensor = output
    return attended
