"""The last layer of a click model, its loss and their gradients in one pass over the samples.

The layer has one output, so it is no GEMM, but bound by memory: what comes in is read
once, and its gradient written once. The gradients do not wait for the backward pass, because the
loss is the end of the model.

Shapes: B samples, M inputs of the layer.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import binary_cross_entropy_with_logits

from trainmark.kernels.compiled import has_compiled
from trainmark.kernels.relu_mlp import column_sums
from trainmark.kernels.table_formats import next_power_of_2
from trainmark.kernels.triton_here import tl, triton


@dataclass(frozen=True)
class LossGradients:
    """The loss, and the gradients of `scale` x loss."""

    loss: Tensor
    """Scalar: binary cross entropy, weighted and added up over the samples."""
    inputs_BM: Tensor
    """Masked where the input, which came out of a ReLU, is 0."""
    weight_1M: Tensor
    bias_1: Tensor


# --- plain torch


def click_loss_reference(
    x_BM: Tensor,
    weight_1M: Tensor,
    bias_1: Tensor,
    labels_B: Tensor,
    scale: Tensor,
    positive_weight: float = 1.0,
) -> LossGradients:
    """See `click_loss`."""
    x_BM, wide_BM = x_BM.detach(), x_BM.detach().float()
    logits_B = wide_BM @ weight_1M[0] + bias_1
    loss, grad_B = _of_logits(logits_B, labels_B, scale, positive_weight)
    grad_BM = torch.where(x_BM > 0, grad_B[:, None] * weight_1M, 0.0)
    return LossGradients(
        loss=loss,
        inputs_BM=grad_BM.to(x_BM.dtype),
        weight_1M=(grad_B @ wide_BM)[None],
        bias_1=grad_B.sum(0, keepdim=True),
    )


def click_loss_of_logits(logits_B: Tensor, labels_B: Tensor, positive_weight: float) -> Tensor:
    """Binary cross entropy, added up over the samples; clicks count `positive_weight` times."""
    weights_B = None if positive_weight == 1 else _weights(labels_B, positive_weight)
    return binary_cross_entropy_with_logits(logits_B, labels_B, weights_B, reduction="sum")


def _weights(labels_B: Tensor, positive_weight: float) -> Tensor:
    return 1 + (positive_weight - 1) * labels_B


def _of_logits(
    logits_B: Tensor, labels_B: Tensor, scale: Tensor, positive_weight: float
) -> tuple[Tensor, Tensor]:
    """The loss, and the gradient of `scale` x loss."""
    loss = click_loss_of_logits(logits_B, labels_B, positive_weight)
    grad_B = (logits_B.sigmoid() - labels_B) * scale
    return loss, grad_B if positive_weight == 1 else grad_B * _weights(labels_B, positive_weight)


# --- compiled, for CPUs


def click_loss_compiled(
    x_BM: Tensor,
    weight_1M: Tensor,
    bias_1: Tensor,
    labels_B: Tensor,
    scale: Tensor,
    positive_weight: float = 1.0,
) -> LossGradients:
    """See `click_loss`."""
    from trainmark.kernels import cpu_mlp

    logits_B = x_BM @ weight_1M[0] + bias_1
    loss, grad_B = _of_logits(logits_B, labels_B, scale, positive_weight)
    grad_BM, weight_M = cpu_mlp.last_layer(grad_B, weight_1M[0], x_BM)
    return LossGradients(loss, grad_BM, weight_M[None], grad_B.sum(0, keepdim=True))


# --- Triton
#
# Each program takes every n-th tile of samples and keeps its sums in registers. The programs' sums
# are added up afterwards, always in the same order.

PROGRAMS = 1024
TILE = 4096  # numbers


def click_loss_triton(
    x_BM: Tensor,
    weight_1M: Tensor,
    bias_1: Tensor,
    labels_B: Tensor,
    scale: Tensor,
    positive_weight: float = 1.0,
) -> LossGradients:
    """See `click_loss`."""
    (B, M), x_BM = x_BM.shape, x_BM.contiguous()
    columns = next_power_of_2(M)
    rows = max(1, TILE // columns)
    programs = max(1, min(PROGRAMS, -(-B // rows)))
    grad_BM = torch.empty_like(x_BM)
    # By program: sums of the gradients of the weight and of the bias, and of the loss.
    sums = torch.empty(programs, M + 2, device=x_BM.device)
    _click_loss_kernel[(programs,)](
        x_BM, weight_1M, bias_1, labels_B, scale, grad_BM, sums, B, M, positive_weight,
        WEIGHTED=positive_weight != 1, ROWS=rows, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    weight_M, bias_1, loss = column_sums(sums).split([M, 1, 1])
    return LossGradients(loss[0], grad_BM, weight_M[None], bias_1)


if triton is not None:

    @triton.jit
    def _click_loss_kernel(
        x, weight, bias, labels, scale, grad, sums, B, M, positive_weight,
        WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        column = tl.arange(0, COLUMNS)
        in_row = column < M
        w = tl.load(weight + column, in_row, 0.0)
        b, factor = tl.load(bias), tl.load(scale)
        # Summed over the rows only at the end: that takes all warps.
        weight_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
        bias_sum = tl.zeros([ROWS], tl.float32)
        loss_sum = tl.zeros([ROWS], tl.float32)
        for tile in range(tl.program_id(0), tl.cdiv(B, ROWS), tl.num_programs(0)):
            row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
            exists = row < B
            place = row[:, None] * M + column[None, :]
            inside = exists[:, None] & in_row[None, :]
            value = tl.load(x + place, inside, 0.0).to(tl.float32)
            label = tl.load(labels + row, exists, 0.0)
            logit = tl.sum(value * w[None, :], 1) + b
            small = tl.exp(-tl.abs(logit))
            loss = tl.maximum(logit, 0.0) - logit * label + tl.log(1.0 + small)
            # Of -|logit|, so that nothing overflows.
            probability = tl.where(logit > 0, 1.0, small) / (1.0 + small)
            d = tl.where(exists, (probability - label) * factor, 0.0)
            if WEIGHTED:
                counts = 1.0 + (positive_weight - 1.0) * label
                d *= counts
                loss *= counts
            masked = tl.where(value > 0, d[:, None] * w[None, :], 0.0)
            tl.store(grad + place, masked.to(grad.dtype.element_ty), inside)
            weight_sum += d[:, None] * value
            bias_sum += d
            loss_sum += tl.where(exists, loss, 0.0)
        mine = sums + tl.program_id(0) * (M + 2)
        tl.store(mine + column, tl.sum(weight_sum, 0), in_row)
        tl.store(mine + M, tl.sum(bias_sum, 0))
        tl.store(mine + M + 1, tl.sum(loss_sum, 0))


# --- autograd and dispatch


class _ClickLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BM: Tensor,
        weight_1M: Tensor,
        bias_1: Tensor,
        labels_B: Tensor,
        scale: Tensor,
        positive_weight: float,
    ) -> Tensor:
        compute = click_loss_reference
        if x_BM.is_cuda and triton is not None:
            compute = click_loss_triton
        elif has_compiled(x_BM, weight_1M):
            compute = click_loss_compiled
        found = compute(x_BM, weight_1M, bias_1, labels_B, scale, positive_weight)
        ctx.save_for_backward(found.inputs_BM, found.weight_1M, found.bias_1)
        return found.loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.saved_tensors, None, None, None)


def click_loss(
    x_BM: Tensor,
    weight_1M: Tensor,
    bias_1: Tensor,
    labels_B: Tensor,
    scale: Tensor,
    positive_weight: float = 1.0,
) -> Tensor:
    """Binary cross entropy of the logits `x @ weight + bias`, added up over the samples.

    Call its `backward` itself, with nothing in between: that gives the gradients of `scale` x loss,
    and of x only where x, which came out of a ReLU, is positive.

    Args:
        x_BM: in any float type.
        weight_1M, bias_1, labels_B: fp32.
        scale: fp32 scalar on the device.
        positive_weight: how many times a click counts.
    """
    loss: Tensor = _ClickLoss.apply(x_BM, weight_1M, bias_1, labels_B, scale, positive_weight)
    return loss
