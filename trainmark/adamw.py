"""AdamW for weights in any type and on any share of them, with fp32 masters or without.

PyTorch's own keeps its states in the weights' type and rounds to nearest: in bf16, updates smaller
than 1/256 of a weight are lost. Here either an fp32 master takes them up, or weights and moments
are rounded stochastically, so that a lost update is made up for on average.

The random bits are a hash of (seed, parameter, step, element): a run that is continued rounds as
if it had never stopped.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainmark.seeding import stream_seed


class AdamW:
    """Steps the weights in place, by gradients that the caller hands over.

    Args:
        parameters: by global name; DTensors are stepped shard by shard.
        states: `fp32` (masters and moments) or `bf16` (moments, and no masters).
        seed: of stochastic rounding.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        *,
        states: str,
        seed: int,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
    ) -> None:
        kind = torch.float32 if states == "fp32" else torch.bfloat16
        self.parameters = dict(parameters)
        self.beta1, self.beta2, self.eps, self.weight_decay = beta1, beta2, eps, weight_decay
        self._seed = seed
        first = next(iter(self.parameters.values()))
        self.steps = torch.zeros((), dtype=torch.int32, device=first.device)
        self.moments = {
            name: (torch.zeros_like(p, dtype=kind), torch.zeros_like(p, dtype=kind))
            for name, p in self.parameters.items()
        }
        self.masters = {
            name: p.detach().float()
            for name, p in self.parameters.items()
            if states == "fp32" and p.dtype != torch.float32
        }
        self._lr = torch.zeros((), device=first.device)

    def weights(self) -> dict[str, Tensor]:
        """The most precise form of every weight. After changing them, call `use_weights`."""
        return {name: self.masters.get(name, p.detach()) for name, p in self.parameters.items()}

    @torch.no_grad()
    def use_weights(self) -> None:
        """Round the masters to the weights that compute."""
        for name, master in self.masters.items():
            self.parameters[name].copy_(master)

    def tensors(self) -> dict[str, Tensor]:
        """The state besides the weights, for checkpoints."""
        found: dict[str, Tensor] = {"optimizer.steps": self.steps}
        for name, (first, second) in self.moments.items():
            found |= {f"{name}.exp_avg": first, f"{name}.exp_avg_sq": second}
        return found

    @torch.no_grad()
    def step(
        self, gradients: Mapping[str, Tensor], lr: float, factor: Tensor, gate: Tensor
    ) -> None:
        """One step with `factor` x gradients if `gate` is 1; exactly nothing if it is 0."""
        self.steps += gate.int()
        self._lr.fill_(lr)
        # In float64: beta2 is so near 1 that its powers lose the first steps' digits in fp32.
        count = self.steps.double().clamp(min=1)
        scalars = torch.stack(
            [
                self._lr,
                factor,
                gate,
                (1 - self.beta1**count).float(),
                (1 - self.beta2**count).float(),
            ]
        )
        update: Callable[..., None] = _compiled_update if scalars.is_cuda else _update
        for name, parameter in self.parameters.items():
            master = self.masters.get(name)
            update(
                _flat(parameter),
                None if master is None else _flat(master),
                *map(_flat, self.moments[name]),
                _flat(gradients[name]),
                self._noise_key(name),
                scalars,
                (self.beta1, self.beta2, self.eps),
                self.weight_decay if parameter.dim() > 1 else 0.0,
            )

    def _noise_key(self, name: str) -> Tensor:
        """Different for every parameter and step."""
        return self.steps + stream_seed(self._seed, "rounding", name) % 2**31


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _flat(tensor: Tensor) -> Tensor:
    """One dimension, so that one compiled kernel serves all shapes."""
    return local(tensor.detach()).view(-1)


def _update(
    param: Tensor,
    master: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    key: Tensor,
    scalars: Tensor,
    constants: tuple[float, float, float],
    weight_decay: float,
) -> None:
    lr, factor, gate, correction1, correction2 = scalars.unbind()
    beta1, beta2, eps = constants
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
    """fp32 to bf16: up with the chance that the lost part of the number says."""
    if dtype != torch.bfloat16:
        return values
    raised = values.view(torch.int32) + (bits & 0xFFFF)
    return (raised & -0x10000).view(torch.float32).to(dtype)


def _hash(count: int, key: Tensor) -> Tensor:
    """32 random bits for each of `count` elements: a counter through an integer mixer."""
    x = torch.arange(count, dtype=torch.int32, device=key.device) * _signed(0x9E3779B1) + key.int()
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return x ^ _shifted(x, 16)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift right, filling with zeros: torch's shift repeats the sign."""
    return (x >> by) & ((1 << (32 - by)) - 1)


def _signed(bits: int) -> int:
    """32 bits as torch's int32 reads them."""
    return bits - 2**32 if bits >= 2**31 else bits


_compiled_update: Callable[..., Any] = torch.compile(_update, dynamic=True)
