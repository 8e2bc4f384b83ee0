"""Cross entropy of a linear layer's outputs, without ever holding all of them.

128,256 logits for each of 16,384 tokens take 4 GiB in bf16 and as much again for their gradient.
Here a chunk of tokens is projected, its loss and gradient are computed at once, and its logits are
forgotten: the backward pass only scales what the forward pass left.

Shapes: T tokens, D width, V vocabulary (the part of it that this rank has).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

CHUNK_BYTES = 2**30
"""Logits of a chunk in the computing type; a chunk must be large enough to fill the device."""


def linear_cross_entropy(
    x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, group: Any = None
) -> Tensor:
    """The mean loss, in fp32.

    Args:
        x_TD: the layer's input.
        weight_VD: its weight; with `group`, this rank's rows of it.
        targets_T: the right rows, numbered globally.
        group: process group whose ranks share out the vocabulary, in rank order. Every rank's
            gradient of `x_TD` is then its own part, to be added up.
    """
    if not torch.is_grad_enabled():
        return _mean_loss(x_TD, weight_VD, targets_T, group)
    library = getattr(functional, "linear_cross_entropy", None)  # torch 2.13
    # In 16 bits it returns a loss of 16 bits, too coarse to compare curves by.
    if library is not None and group is None and x_TD.dtype == torch.float32:
        options = torch.nn.LinearCrossEntropyOptions()
        found: Tensor = library(x_TD, weight_VD, targets_T, options=options)
        return found
    loss: Tensor = _LinearCrossEntropy.apply(x_TD, weight_VD, targets_T, group)
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, group: Any) -> Tensor:
        grad_x_TD, grad_weight_VD = torch.empty_like(x_TD), torch.zeros_like(weight_VD)
        loss = torch.zeros((), device=x_TD.device)
        for chunk in _chunks(x_TD, weight_VD):
            x_CD = x_TD[chunk]
            logits_CV = x_CD @ weight_VD.t()
            losses_C, grad_CV = _losses_and_gradient(logits_CV, targets_T[chunk], group)
            loss += losses_C.sum()
            torch.mm(grad_CV, weight_VD, out=grad_x_TD[chunk])
            grad_weight_VD.addmm_(grad_CV.t(), x_CD)
        ctx.save_for_backward(grad_x_TD, grad_weight_VD)
        return loss / len(targets_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_TD, grad_weight_VD = ctx.saved_tensors
        # The mean's 1 / T comes last, and any loss scale with it, so that nothing underflows.
        scale = grads[0] / len(grad_x_TD)
        return grad_x_TD * scale.to(grad_x_TD.dtype), grad_weight_VD.mul_(scale), None, None


def _mean_loss(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, group: Any) -> Tensor:
    losses = [
        _losses(x_TD[chunk] @ weight_VD.t(), targets_T[chunk], group)[0]
        for chunk in _chunks(x_TD, weight_VD)
    ]
    return torch.cat(losses).mean()


def _chunks(x_TD: Tensor, weight_VD: Tensor) -> list[slice]:
    """Slices of equal length, so that one compiled kernel serves all of them."""
    tokens = len(x_TD)
    row_bytes = weight_VD.shape[0] * x_TD.element_size()
    count = min(tokens, -(-tokens * row_bytes // CHUNK_BYTES))
    length = -(-tokens // max(count, 1))
    return [slice(start, min(start + length, tokens)) for start in range(0, tokens, length)]


def _losses(logits_CV: Tensor, targets_C: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """[C] losses, and what their gradient needs: log-sum-exp and each target's local column."""
    vocab = logits_CV.shape[1]
    logits_CV = logits_CV.float()
    columns_C = targets_C - (vocab * dist.get_rank(group) if group is not None else 0)
    highest_C = logits_CV.amax(1)
    if group is not None:
        dist.all_reduce(highest_C, dist.ReduceOp.MAX, group)
    sum_C = (logits_CV - highest_C[:, None]).exp().sum(1)
    here_C = (columns_C >= 0) & (columns_C < vocab)
    picked_C = logits_CV.gather(1, columns_C.clamp(0, vocab - 1)[:, None]).squeeze(1)
    picked_C = torch.where(here_C, picked_C, 0.0)
    if group is not None:
        both = torch.stack([sum_C, picked_C])
        dist.all_reduce(both, group=group)
        sum_C, picked_C = both.unbind()
    log_sum_C = highest_C + sum_C.log()
    return log_sum_C - picked_C, log_sum_C, columns_C


def _gradient(logits_CV: Tensor, log_sum_C: Tensor, columns_C: Tensor) -> Tensor:
    """softmax - one-hot, in the type of the logits."""
    numbers_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    chances_CV = (logits_CV.float() - log_sum_C[:, None]).exp()
    is_target_CV = numbers_V == columns_C[:, None]
    return torch.where(is_target_CV, chances_CV - 1, chances_CV).to(logits_CV.dtype)


def _losses_and_gradient(logits_CV: Tensor, targets_C: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    losses = _compiled(_losses) if logits_CV.is_cuda and group is None else _losses
    gradient = _compiled(_gradient) if logits_CV.is_cuda else _gradient
    losses_C, log_sum_C, columns_C = losses(logits_CV, targets_C, group)
    return losses_C, gradient(logits_CV, log_sum_C, columns_C)


_COMPILED: dict[Callable[..., Any], Callable[..., Any]] = {}


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled once: eager, every line here would read and write the chunk's logits."""
    if function not in _COMPILED:
        _COMPILED[function] = torch.compile(function, dynamic=False)
    return _COMPILED[function]
