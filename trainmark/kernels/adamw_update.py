"""One AdamW update of a flat parameter: moments, weight decay, and rounding in one pass.

The random bits of stochastic rounding are a hash of (key, element), the same in both versions
below, so that they cost no memory and a run that is continued rounds as if it had never stopped.
"""

import torch
from torch import Tensor

from trainmark.kernels.rounding import SPREAD, mix, round_by_chance, signed

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without a GPU
    triton = None


def update(
    param: Tensor,
    master: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    key: Tensor,
    scalars: Tensor,
    constants: tuple[float, float, float, float],
) -> None:
    """Step everything in place.

    Args:
        param: [N] weights; bf16 ones without a master are rounded stochastically.
        master: [N] fp32, or None.
        exp_avg, exp_avg_sq: [N] moments; a bf16 second moment is rounded stochastically.
        grad: [N] in any type.
        key: int32 scalar, different for every parameter and step.
        scalars: learning rate, factor of the gradient, gate (0: change nothing), and the two bias
            corrections, on the device: the host never waits for them.
        constants: beta1, beta2, eps, weight decay.
    """
    step = _launch if param.is_cuda else reference
    step(param, master, exp_avg, exp_avg_sq, grad, key, scalars, constants)


# --- plain torch


def reference(
    param: Tensor,
    master: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    key: Tensor,
    scalars: Tensor,
    constants: tuple[float, float, float, float],
) -> None:
    lr, factor, gate, correction1, correction2 = scalars.unbind()
    beta1, beta2, eps, weight_decay = constants
    g = grad.float() * factor
    old = (param if master is None else master).float()
    old_avg, old_sq = exp_avg.float(), exp_avg_sq.float()
    avg = beta1 * old_avg + (1 - beta1) * g
    sq = beta2 * old_sq + (1 - beta2) * g * g
    direction = (avg / correction1) / ((sq / correction2).sqrt() + eps)
    new = old * (1 - lr * weight_decay) - lr * direction

    applied = gate > 0  # what is rounded already stays as it is when it is rounded again
    new, avg = torch.where(applied, new, old), torch.where(applied, avg, old_avg)
    sq = torch.where(applied, sq, old_sq)
    bits = _hash(param.numel(), key)
    if master is None:
        param.copy_(_round(new, bits, param.dtype))
    else:
        master.copy_(new)
        param.copy_(new)
    # The first moment forgets a tenth a step and needs no care; the second one a twentieth.
    exp_avg.copy_(avg)
    exp_avg_sq.copy_(_round(sq, bits >> 16, exp_avg_sq.dtype))


def _round(values: Tensor, bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Only bf16 is rounded by chance: fp32 masters and moments, and the rest, are copied."""
    return round_by_chance(values, bits, dtype) if dtype == torch.bfloat16 else values


def _hash(count: int, key: Tensor) -> Tensor:
    """32 random bits for each of `count` elements: a counter through an integer mixer."""
    return mix(torch.arange(count, dtype=torch.int32, device=key.device) * signed(SPREAD) + key)


# --- Triton

BLOCK = 1024


def _launch(
    param: Tensor,
    master: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    key: Tensor,
    scalars: Tensor,
    constants: tuple[float, float, float, float],
) -> None:
    count = param.numel()
    if count == 0:
        return
    _kernel[(-(-count // BLOCK),)](
        param,
        param if master is None else master,
        exp_avg,
        exp_avg_sq,
        grad,
        key,
        scalars,
        count,
        *constants,
        HAS_MASTER=master is not None,
        ROUND_PARAM=master is None and param.dtype == torch.bfloat16,
        ROUND_SQ=exp_avg_sq.dtype == torch.bfloat16,
        BLOCK=BLOCK,
    )


if triton is not None:
    from trainmark.kernels.rounding import mixed, rounded_by_chance

    @triton.jit
    def _kernel(
        param, master, exp_avg, exp_avg_sq, grad, key, scalars, count,
        beta1, beta2, eps, weight_decay,
        HAS_MASTER: tl.constexpr, ROUND_PARAM: tl.constexpr, ROUND_SQ: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = place < count
        lr, factor, gate = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2)
        correction1, correction2 = tl.load(scalars + 3), tl.load(scalars + 4)
        g = tl.load(grad + place, inside, 0.0).to(tl.float32) * factor
        old = tl.load(master + place, inside, 0.0).to(tl.float32)
        old_avg = tl.load(exp_avg + place, inside, 0.0).to(tl.float32)
        old_sq = tl.load(exp_avg_sq + place, inside, 0.0).to(tl.float32)
        avg = beta1 * old_avg + (1 - beta1) * g
        sq = beta2 * old_sq + (1 - beta2) * g * g
        direction = (avg / correction1) / (tl.sqrt(sq / correction2) + eps)
        new = old * (1 - lr * weight_decay) - lr * direction
        new = tl.where(gate > 0, new, old)
        avg = tl.where(gate > 0, avg, old_avg)
        sq = tl.where(gate > 0, sq, old_sq)

        x = mixed(place.to(tl.uint32) * 0x9E3779B1 + tl.load(key).to(tl.uint32))
        if HAS_MASTER:
            tl.store(master + place, new, inside)
        if ROUND_PARAM:
            new = rounded_by_chance(new, x, tl.bfloat16)
        if ROUND_SQ:
            sq = rounded_by_chance(sq, x >> 16, tl.bfloat16)
        tl.store(param + place, new.to(param.dtype.element_ty), inside)
        tl.store(exp_avg + place, avg.to(exp_avg.dtype.element_ty), inside)
        tl.store(exp_avg_sq + place, sq.to(exp_avg_sq.dtype.element_ty), inside)
