"""PyTorch's optimisers for dense weights, which skip a step whose gradients are not finite.

`gated_step` never makes the host wait for a GPU: the flag that skips a step stays on the device.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.optim import SGD, Adagrad, Adam, Optimizer

from trainmark.config import Run
from trainmark.kernels import adagrad_update


def make_optimizer(
    name: str, parameters: Iterable[nn.Parameter], *, eps: float, beta1: float, beta2: float
) -> Optimizer:
    """The dense counterpart of a run's optimiser; the learning rate comes with each step."""
    parameters = list(parameters)
    fused = not any(p.is_meta for p in parameters)  # PyTorch refuses to fuse what only has a shape
    if name == "sgd":
        return SGD(parameters, lr=0.0, fused=fused)
    if name == "adam":
        optimizer = Adam(parameters, lr=0.0, betas=(beta1, beta2), eps=eps, fused=fused)
        create_moments(optimizer)
        return optimizer
    if parameters and all(map(adagrad_update.has_kernel, parameters)):
        return adagrad_update.FusedAdagrad(parameters, lr=0.0, eps=eps)
    return Adagrad(parameters, lr=0.0, eps=eps, foreach=True)


def create_moments(optimizer: Optimizer) -> None:
    """Adam's state, which PyTorch would create in the first step: a checkpoint needs it earlier."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def gated_step(optimizer: Optimizer, lr: float, gate: Tensor) -> None:
    """One optimiser step with rate `lr` if `gate` is 1; exactly nothing if it is 0."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    if gate.device.type == "cpu":  # here asking costs nothing
        if gate:
            optimizer.step()
    elif getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.found_inf = 1 - gate  # type: ignore[attr-defined]  # as torch.amp.GradScaler does
        optimizer.step()
    else:
        # Adagrad without a kernel: a step with zero gradients changes nothing.
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        is_closed = gate == 0
        for gradient in (p.grad for p in parameters if p.grad is not None):
            gradient.masked_fill_(is_closed, 0.0)
        optimizer.step()


def decay_weights(weights: Sequence[Tensor], share: float, lr: float, gate: Tensor) -> None:
    """Decoupled weight decay, ahead of a step: w *= 1 - lr share; nothing if `gate` is 0."""
    if share:
        torch._foreach_mul_(list(weights), 1 - lr * share * gate)


def optimizer_tensors(optimizer: Optimizer, names: Mapping[Any, str]) -> dict[str, Tensor]:
    """The optimiser's state by parameter name, for checkpoints."""
    return {
        f"{names[parameter]}.{kind}": tensor
        for parameter, state in optimizer.state.items()
        for kind, tensor in state.items()
        if isinstance(tensor, Tensor)
    }


_ADDED_AT_ONCE = 2**20
"""A CPU adds squares one after another; over 66 million numbers, rounding would lose 0.5 %."""


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """[N] The Euclidean norm of each tensor, in fp32 and on their device."""
    if tensors[0].device.type == "cpu":
        tensors = [t if t.numel() <= _ADDED_AT_ONCE else _norms_of_pieces(t) for t in tensors]
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float32))  # one launch


def _norms_of_pieces(tensor: Tensor) -> Tensor:
    """Norms of pieces of the tensor; their norm is the tensor's."""
    return norms(tensor.reshape(-1).split(_ADDED_AT_ONCE))


def gradient_norm(gradients: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The norm of all gradients as one vector, and the gate: 1 if every element of them and of
    `others` is finite, else 0. Both are scalars on the device.

    A norm beyond the square root of fp32's largest number, 1.8e19, counts as not finite.
    """
    each = norms([*gradients, *others])
    gate = (each.sum() < torch.inf).float()  # false for NaN, and one kernel where isfinite has four
    return vector_norm(each[: len(gradients)]), gate


class LossScale:
    """Loss scaling for fp16: fixed, or halved on overflow and doubled after 2000 good steps."""

    INITIAL = 65536.0
    GROWTH_INTERVAL = 2000
    BOUNDS = (2.0**-16, 2.0**24)  # the inverse must stay finite, whatever a run does

    def __init__(self, setting: float | str, device: torch.device) -> None:
        self.dynamic = setting == "dynamic"
        initial = self.INITIAL if self.dynamic else float(setting)
        self.scale = torch.tensor(initial, device=device)
        self.good_steps = torch.zeros((), device=device)

    @classmethod
    def of_run(cls, cfg: Run, device: torch.device) -> Self | None:
        """The loss scale of a run; None unless it computes in fp16."""
        return cls(cfg.loss_scale, device) if cfg.precision == "fp16" else None

    def update(self, gate: Tensor) -> None:
        """After a step that was applied (gate 1) or skipped (0)."""
        if not self.dynamic:
            return
        good = (self.good_steps + 1) * gate
        grow = good >= self.GROWTH_INTERVAL
        factor = torch.where(gate > 0, torch.where(grow, 2.0, 1.0), 0.5)
        self.scale.mul_(factor).clamp_(*self.BOUNDS)
        self.good_steps.copy_(torch.where(grow, torch.zeros_like(good), good))

    def observed(self, scaled_norm: Tensor) -> dict[str, Tensor]:
        """Before the update: the norm that a gradient has without its scale, and the scale."""
        return {"gradient_norm": scaled_norm / self.scale, "loss_scale": self.scale.clone()}

    def tensors(self) -> dict[str, Tensor]:
        return {"loss_scale": self.scale, "loss_scale.good_steps": self.good_steps}
