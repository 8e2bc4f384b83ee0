"""Llama-3's optimiser step: micro-batches through one device or a pipeline, then AdamW."""

import dataclasses
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainmark.config import element_bytes, filled
from trainmark.contract import Data, DeviceBytes
from trainmark.distributed.mesh import Mesh, local
from trainmark.training.adamw import AdamW
from trainmark.training.batches import BatchCounts
from trainmark.training.checking import (
    Fingerprints,
    computed_twice,
    fingerprints,
    in_fixed_order,
)
from trainmark.training.optimizers import LossScale, norms
from trainmark.training.transfer import Copier, wait_for
from trainmark.workloads.llama3.data import TokenBatch
from trainmark.workloads.llama3.flops import gradients_beside_activations
from trainmark.workloads.llama3.model import named_parameters
from trainmark.workloads.llama3.pipeline import Pipeline
from trainmark.workloads.llama3.runs import LlamaRun

_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True, kw_only=True)
class Prepared(BatchCounts):
    """A batch on the device."""

    tokens_BS: Tensor
    targets_BS: Tensor
    ready: Any


class LlamaTrainer:
    """Trains this rank's parts of the model."""

    def __init__(self, parts: list[nn.Module], mesh: Mesh, cfg: LlamaRun) -> None:
        self.parts, self.mesh, self.cfg = parts, mesh, cfg
        self._copy = Copier(mesh.device)
        self._parameters = dict(named_parameters(parts))
        rule = cfg.optimizer
        self._optimizer = AdamW(
            self._parameters,
            states=cfg.optimizer_states,
            seed=cfg.seed,
            beta1=rule.beta1,
            beta2=rule.beta2,
            eps=rule.eps,
            weight_decay=rule.weight_decay,
        )
        self._loss_scale = LossScale.of_run(cfg, mesh.device)
        copies = [_copies(p) for p in self._parameters.values()]
        self._copies = torch.tensor(copies, device=mesh.device)
        self._sums = _GradientSums(self._parameters) if self._sums_in_fp32 else None
        self._weights_may_have_changed = False
        self._observed: dict[str, Tensor] = {}
        on_device = mesh.device.type != "meta"
        piped = on_device and mesh.axes.get("pp", 1) > 1
        self._pipeline = Pipeline(parts, mesh, cfg) if piped else None

    @property
    def _sums_in_fp32(self) -> bool:
        """Many micro-batches must not be added up in 16 bits; FSDP sees to that by itself."""
        in_16_bits = any(p.dtype != torch.float32 for p in self._parameters.values())
        return in_16_bits and self.mesh.dp_size == 1 and filled(self.cfg.accumulate) > 1

    # --- input

    def prepare(self, batch: TokenBatch) -> Prepared:
        """Copy a batch as narrow as it is stored and widen it on the device."""
        (ids,), ready = self._copy([batch.ids], lambda copied: [copied[0].long()])
        return Prepared(tokens_BS=ids[:, :-1], targets_BS=ids[:, 1:], ready=ready, **batch.counts())

    # --- training

    def step(self, prepared: Prepared, lr: float) -> tuple[Tensor, Tensor]:
        """One optimiser step over the batch, in micro-batches. Returns (mean loss, skipped)."""
        loss = self._compute(prepared)
        gate = self._update(loss, lr)
        return loss, gate == 0

    def checked_step(
        self, prepared: Prepared, lr: float
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """`step`, with loss and gradients computed twice, and by name whether bits differ."""
        self._refresh()

        def described(loss: Tensor) -> Fingerprints:
            named = fingerprints({"the loss": loss})
            return named | fingerprints(self._gradients(), "the gradient of ")

        def weights() -> Fingerprints:
            held = self._optimizer.weights() | self.state_dict()
            return fingerprints(held) | fingerprints(self._parameters, "what computes of ")

        compute = partial(self._compute, prepared)
        with in_fixed_order(self.mesh.device):  # attention and embeddings have others
            loss, differ = computed_twice(compute, described, self._forget, weights)
        gate = self._update(loss, lr)
        return loss, gate == 0, differ

    def _compute(self, prepared: Prepared) -> Tensor:
        """The loss of the batch, and its gradients."""
        self._refresh()
        with self._attention():
            if self._pipeline is not None:
                loss = self._pipeline.step(prepared.tokens_BS, prepared.targets_BS, self._scale())
            else:
                loss = self._accumulate(prepared)
        return self._mean_over_ranks(loss)

    def _accumulate(self, prepared: Prepared) -> Tensor:
        (part,) = self.parts
        micro = filled(self.cfg.micro_batch)
        pieces = list(
            zip(prepared.tokens_BS.split(micro), prepared.targets_BS.split(micro), strict=True)
        )
        total = torch.zeros((), device=self.mesh.device)
        for index, (tokens_BS, targets_BS) in enumerate(pieces):
            self._before_backward(part, is_last=index == len(pieces) - 1)
            loss = part(tokens_BS, targets_BS).sum() * (len(tokens_BS) / prepared.samples)
            (loss * self._scale()).backward()
            total += loss.detach()
        return total

    def _before_backward(self, part: nn.Module, *, is_last: bool) -> None:
        """ZeRO-1 adds up whole gradients and exchanges them once, with the last micro-batch."""
        if isinstance(part, FSDPModule):
            part.set_is_last_backward(is_last)
            if self.cfg.data_parallel == "zero1":
                part.set_requires_gradient_sync(is_last)
                part.set_reshard_after_backward(is_last)

    def _scale(self) -> Tensor | float:
        return 1.0 if self._loss_scale is None else self._loss_scale.scale

    def _mean_over_ranks(self, loss: Tensor) -> Tensor:
        """The mean loss, on all ranks; only the last pipeline stage computes one."""
        if self.mesh.device_mesh is None:
            return loss
        loss = loss / (self.mesh.dp_size * self.mesh.axes.get("tp", 1))
        dist.all_reduce(loss)
        return loss

    # --- the update

    @torch.no_grad()
    def _update(self, loss: Tensor, lr: float) -> Tensor:
        """Unscale, clip and step. Returns the gate: 1 if loss and gradients are finite, else 0."""
        gradients = self._gradients()
        inverse = 1 / self._scale()
        norm = self._norm(gradients) * inverse
        self._observed = {"gradient_norm": norm}
        if self._loss_scale is not None:
            self._observed["loss_scale"] = self._loss_scale.scale.clone()
        gate = torch.isfinite(loss + norm).float()
        clip = self.cfg.optimizer.clip
        factor = torch.ones_like(norm) if clip == 0 else (clip / (norm + 1e-6)).clamp(max=1.0)
        self._optimizer.step(gradients, lr, factor * inverse, gate)
        if self._loss_scale is not None:
            self._loss_scale.update(gate)
        self._forget()
        return gate

    def observed(self) -> dict[str, Tensor]:
        """The last step's gradient norm before clipping, and its loss scale where there is one."""
        return self._observed

    def _forget(self) -> None:
        """Discard the gradients: the next backward passes must not add to them."""
        for parameter in self._parameters.values():
            parameter.grad = None
        if self._sums is not None:
            self._sums.clear()

    def _gradients(self) -> dict[str, Tensor]:
        """Gradients by name, placed as their parameters are."""
        if self._sums is not None:
            return self._sums.totals
        found = {}
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            if gradient is None:
                raise RuntimeError(f"{name} has no gradient.")
            found[name] = _placed(gradient, parameter)
        return found

    def _norm(self, gradients: dict[str, Tensor]) -> Tensor:
        """The norm of the whole gradient, over all ranks, each element once."""
        parts = [local(gradient) for gradient in gradients.values()]
        total = (norms(parts).square() / self._copies).sum()
        if self.mesh.device_mesh is not None:
            dist.all_reduce(total)
        return total.sqrt()

    def _attention(self) -> AbstractContextManager[object]:
        if self.mesh.device.type == "cpu":
            return nullcontext()
        if self.cfg.attention != "auto":
            return sdpa_kernel(_BACKENDS[self.cfg.attention])
        return sdpa_kernel(list(_BACKENDS.values()), set_priority=True)

    # --- evaluation

    @torch.no_grad()
    def loss(self, prepared: Prepared) -> Tensor:
        """The mean loss of a batch, the same on the ranks of a pipeline or tensor group."""
        self._refresh()
        with self._attention():
            if self._pipeline is not None:
                return self._pipeline.loss(prepared.tokens_BS, prepared.targets_BS)
            (part,) = self.parts
            losses: Tensor = part(prepared.tokens_BS, prepared.targets_BS)
            return losses.sum()

    # --- state

    def _refresh(self) -> None:
        if self._weights_may_have_changed:
            self._optimizer.use_weights()
            self._weights_may_have_changed = False

    def weights(self) -> dict[str, Tensor]:
        """Every weight of this rank by its global name, masters where there are any."""
        self._weights_may_have_changed = True
        return self._optimizer.weights()

    def state_dict(self) -> dict[str, Tensor]:
        """Optimiser and loss scale."""
        scale = self._loss_scale.tensors() if self._loss_scale else {}
        return self._optimizer.tensors() | scale

    def device_bytes(self) -> DeviceBytes:
        """Bytes at a step's fullest moment: weights that compute, gradients, masters, moments."""
        computing = element_bytes(self.cfg.precision)
        modules = self._gathered_modules()
        gathered = sum(modules)
        shards = sum(_bytes(p) for p in self._parameters.values())
        weights = gathered * computing if self.mesh.dp_size > 1 else shards
        if self._reshards:
            weights = sum(modules[:2]) * computing  # the next is fetched while one computes
            gradients = shards + modules[0] * 4  # and one is being reduced, in fp32
        elif filled(self.cfg.accumulate) > 1:
            gradients = gathered * 4
        else:
            gradients = gradients_beside_activations(self.cfg, gathered * computing)
        states = [*self._optimizer.masters.values(), *self._optimizer.tensors().values()]
        return DeviceBytes(
            weights=weights,
            gradients=gradients,
            optimizer=sum(map(_bytes, states)) + (shards if self.mesh.dp_size > 1 else 0),
        )

    @property
    def _reshards(self) -> bool:
        """Whether a micro-batch leaves only shards behind. PyTorch's pipelines keep weights and
        gradients whole until the last one."""
        shared_out = self.mesh.dp_size > 1 and self.cfg.data_parallel == "fsdp"
        return shared_out and self.mesh.axes.get("pp", 1) == 1

    def _gathered_modules(self) -> list[int]:
        """Elements of what FSDP gathers at a time (a block, the head), the largest first."""
        sizes: Counter[str] = Counter()
        for name, parameter in self._parameters.items():
            sizes[".".join(name.split(".")[:2])] += _gathered_numel(parameter, self.mesh)
        return sorted(sizes.values(), reverse=True)


class _GradientSums:
    """Gradients of all micro-batches in fp32; each is freed as soon as it has been added."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self.totals = {
            name: torch.zeros_like(p, dtype=torch.float32) for name, p in parameters.items()
        }
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(self._add_to(name))

    def _add_to(self, name: str) -> Any:
        def add(parameter: Tensor) -> None:
            if parameter.grad is not None:
                local(self.totals[name]).add_(local(_placed(parameter.grad, parameter)))
                parameter.grad = None

        return add

    def clear(self) -> None:
        for total in self.totals.values():
            local(total).zero_()


def _placed(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient that is a sum over ranks still to be made (of a norm, say) is made here."""
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        return gradient.redistribute(placements=parameter.placements)
    return gradient


def _copies(tensor: Tensor) -> int:
    """How many ranks have the same values."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    sizes = [mesh.size(axis) for axis, p in enumerate(tensor.placements) if p.is_replicate()]
    return int(torch.Size(sizes).numel())


def _gathered_numel(parameter: Tensor, mesh: Mesh) -> int:
    """Elements of a parameter once FSDP has gathered it: this tensor-parallel rank's part."""
    split = isinstance(parameter, DTensor) and any(p.is_shard() for p in parameter.placements[-1:])
    return parameter.numel() // (mesh.axes.get("tp", 1) if split else 1)


def _bytes(tensor: Tensor) -> int:
    part = local(tensor)
    return part.numel() * part.element_size()


def evaluate(trainer: LlamaTrainer, data: Data[TokenBatch]) -> dict[str, float | None]:
    """The mean loss per token over a split."""
    loss, samples = 0.0, 0
    for batch in data:
        prepared = trainer.prepare(batch)
        wait_for(prepared.ready)
        loss += trainer.loss(_never_empty(prepared)).item() * prepared.samples
        samples += prepared.samples
    sums = torch.tensor([loss, samples], dtype=torch.float64, device=trainer.mesh.device)
    trainer.mesh.add_over_dp(sums)
    loss, samples = sums.tolist()
    return {"loss": loss / samples if samples else None}


def _never_empty(prepared: Prepared) -> Prepared:
    """A rank without a sample of the last batch computes a stand-in: the others wait for it."""
    if prepared.samples:
        return prepared
    stand_in = prepared.tokens_BS.new_zeros(1, prepared.tokens_BS.shape[1])
    return dataclasses.replace(prepared, tokens_BS=stand_in, targets_BS=stand_in)
