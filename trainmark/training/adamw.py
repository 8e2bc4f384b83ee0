"""AdamW for weights in any type and on any share of them, with fp32 masters or without.

PyTorch's AdamW keeps its states in the weights' type and rounds to nearest: in bf16, updates below
1/256 of a weight are lost. Here each weight has either an fp32 master, or eight more bits with
stochastic rounding, which is right on average.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from trainmark.distributed.mesh import local
from trainmark.kernels.adamw_update import Held, update
from trainmark.training.seeding import stream_seed


class AdamW:
    """Steps the weights in place, by gradients that the caller hands over.

    Args:
        parameters: by global name; DTensors are stepped shard by shard.
        states: `fp32` (masters and moments) or `bf16` (moments, and eight bits beside each weight).
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
        device = next(iter(self.parameters.values())).device
        self.steps = torch.zeros((), dtype=torch.int32, device=device)
        self.moments = {
            name: (torch.zeros_like(p, dtype=kind), torch.zeros_like(p, dtype=kind))
            for name, p in self.parameters.items()
        }
        self.masters = {
            name: p.detach().float()
            for name, p in self.parameters.items()
            if states == "fp32" and p.dtype != torch.float32
        }
        self.remainders = {
            name: torch.zeros_like(p, dtype=torch.int8)
            for name, p in self.parameters.items()
            if states == "bf16" and p.dtype == torch.bfloat16
        }
        seeds = [stream_seed(seed, "rounding", name) % 2**31 for name in self.parameters]
        self._seeds = torch.tensor(seeds, dtype=torch.int32, device=device)
        self._lr = torch.zeros((), device=device)

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
        return found | {f"{name}.remainder": rest for name, rest in self.remainders.items()}

    @torch.no_grad()
    def step(
        self, gradients: Mapping[str, Tensor], lr: float, factor: Tensor, gate: Tensor
    ) -> None:
        """One step with `factor` x gradients if `gate` is 1; exactly nothing if it is 0."""
        self.steps += gate.int()
        self._lr.fill_(lr)
        # In float64: beta2 is so near 1 that its powers lose the first steps' digits in fp32.
        count = self.steps.double().clamp(min=1)
        corrections = [(1 - beta**count).float() for beta in (self.beta1, self.beta2)]
        scalars = torch.stack([self._lr, factor, gate, *corrections])
        keys = (self._seeds + self.steps).unbind()  # different for every parameter and step
        for key, (name, parameter) in zip(keys, self.parameters.items(), strict=True):
            master, remainder = self.masters.get(name), self.remainders.get(name)
            first, second = self.moments[name]
            held = Held(
                param=_flat(parameter),
                master=None if master is None else _flat(master),
                remainder=None if remainder is None else _flat(remainder),
                exp_avg=_flat(first),
                exp_avg_sq=_flat(second),
            )
            decay = self.weight_decay if parameter.dim() > 1 else 0.0
            constants = (self.beta1, self.beta2, self.eps, decay)
            update(held, _flat(gradients[name]), key, scalars, constants)


def _flat(tensor: Tensor) -> Tensor:
    return local(tensor.detach()).view(-1)
