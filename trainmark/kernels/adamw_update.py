"""One AdamW update of a flat parameter: moments, weight decay, and rounding in one pass.

A bf16 weight without a master has a remainder: the eight bits that follow it, signed, so that the
weight itself is the nearest bf16 number. Stochastic rounding treats both as one number of 24 bits.
Of bf16 alone it is right on average too, but every step then moves every weight by up to 1/128 of
itself.

The random bits are a hash of (key, element), the same in both versions below, so that they cost no
memory and a run that is continued rounds as if it had never stopped.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainmark.kernels.rounding import SPREAD, mix, round_stochastically, signed
from trainmark.kernels.triton_here import tl, triton

Constants = tuple[float, float, float, float]
"""beta1, beta2, eps, weight decay."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """What is stepped of a parameter, [N] each."""

    param: Tensor
    """The weights that compute."""
    master: Tensor | None
    """fp32."""
    remainder: Tensor | None
    """int8, of bf16 weights without a master."""
    exp_avg: Tensor
    exp_avg_sq: Tensor
    """In bf16 it is rounded stochastically."""


def update(own: Held, grad: Tensor, key: Tensor, scalars: Tensor, constants: Constants) -> None:
    """Step everything in place.

    Args:
        grad: [N] in any type.
        key: int32 scalar, different for every parameter and step.
        scalars: learning rate, factor of the gradient, gate (0: change nothing), and the two bias
            corrections, on the device: the host never waits for them.
    """
    step = launch if own.param.is_cuda else reference
    step(own, grad, key, scalars, constants)


# --- plain torch


def reference(own: Held, grad: Tensor, key: Tensor, scalars: Tensor, constants: Constants) -> None:
    param, master, remainder = own.param, own.master, own.remainder
    lr, factor, gate, correction1, correction2 = scalars.unbind()
    beta1, beta2, eps, weight_decay = constants
    g = grad.float() * factor
    if remainder is not None:
        old = _joined(param, remainder)
    else:
        old = (param if master is None else master).float()
    old_avg, old_sq = own.exp_avg.float(), own.exp_avg_sq.float()
    avg = beta1 * old_avg + (1 - beta1) * g
    sq = beta2 * old_sq + (1 - beta2) * g * g
    direction = (avg / correction1) / ((sq / correction2).sqrt() + eps)
    new = old * (1 - lr * weight_decay) - lr * direction

    applied = gate > 0  # what is rounded already stays as it is when it is rounded again
    new, avg = torch.where(applied, new, old), torch.where(applied, avg, old_avg)
    sq = torch.where(applied, sq, old_sq)
    bits = _hash(param.numel(), key)
    if master is not None:
        master.copy_(new)
    if remainder is not None:
        new, rest = _divided(new, bits)
        remainder.copy_(rest)
    param.copy_(new)
    # The first moment forgets a tenth a step and needs no care; the second one a twentieth.
    own.exp_avg.copy_(avg)
    if own.exp_avg_sq.dtype == torch.bfloat16:
        sq = round_stochastically(sq, bits >> 16, torch.bfloat16)
    own.exp_avg_sq.copy_(sq)


def _joined(param: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 numbers that bf16 weights and their remainders stand for."""
    return (param.float().view(torch.int32) + (remainder.int() << 8)).view(torch.float32)


def _divided(values: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 as the nearest bf16, still in fp32, and stochastically rounded remainders."""
    kept = (values.view(torch.int32) + (bits & 0xFF)) & -0x100
    nearest = (kept + 0x8000) & -0x10000
    return nearest.view(torch.float32), (kept - nearest) >> 8


def _hash(count: int, key: Tensor) -> Tensor:
    """32 random bits for each of `count` elements: a counter through an integer mixer."""
    return mix(torch.arange(count, dtype=torch.int32, device=key.device) * signed(SPREAD) + key)


# --- Triton

BLOCK = 1024


def launch(own: Held, grad: Tensor, key: Tensor, scalars: Tensor, constants: Constants) -> None:
    count = own.param.numel()
    if count == 0:
        return
    _adamw_kernel[(-(-count // BLOCK),)](
        own.param,
        own.param if own.master is None else own.master,
        own.param if own.remainder is None else own.remainder,
        own.exp_avg,
        own.exp_avg_sq,
        grad,
        key,
        scalars,
        count,
        *constants,
        HAS_MASTER=own.master is not None,
        HAS_REMAINDER=own.remainder is not None,
        ROUND_SQ=own.exp_avg_sq.dtype == torch.bfloat16,
        BLOCK=BLOCK,
    )


if triton is not None:
    from trainmark.kernels.rounding import mixed, rounded_stochastically, shortened

    @triton.jit
    def _adamw_kernel(
        param, master, remainder, exp_avg, exp_avg_sq, grad, key, scalars, count,
        beta1, beta2, eps, weight_decay,
        HAS_MASTER: tl.constexpr, HAS_REMAINDER: tl.constexpr, ROUND_SQ: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = place < count
        lr, factor, gate = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2)
        correction1, correction2 = tl.load(scalars + 3), tl.load(scalars + 4)
        g = tl.load(grad + place, inside, 0.0).to(tl.float32) * factor
        old = tl.load(master + place, inside, 0.0).to(tl.float32)
        if HAS_REMAINDER:
            rest = tl.load(remainder + place, inside, 0).to(tl.int32) << 8
            old = (old.to(tl.int32, bitcast=True) + rest).to(tl.float32, bitcast=True)
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
        if HAS_REMAINDER:
            kept = shortened(new, x, 8).to(tl.int32, bitcast=True)
            nearest = (kept + 0x8000) & -0x10000
            tl.store(remainder + place, ((kept - nearest) >> 8).to(tl.int8), inside)
            new = nearest.to(tl.float32, bitcast=True)
        if ROUND_SQ:
            sq = rounded_stochastically(sq, x >> 16, tl.bfloat16)
        tl.store(param + place, new.to(param.dtype.element_ty), inside)
        tl.store(exp_avg + place, avg.to(exp_avg.dtype.element_ty), inside)
        tl.store(exp_avg_sq + place, sq.to(exp_avg_sq.dtype.element_ty), inside)
