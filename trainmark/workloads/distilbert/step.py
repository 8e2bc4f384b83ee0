"""DistilBERT's optimiser step: forward, loss, backward, gradients of all ranks, AdamW."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from trainmark.distributed.gradients import FlatGradients
from trainmark.distributed.mesh import Mesh
from trainmark.kernels.graph import Graphed
from trainmark.metrics import classification_metrics
from trainmark.training.batches import BatchCounts
from trainmark.training.checking import Fingerprints, computed_twice, fingerprints
from trainmark.training.optimizers import (
    LossScale,
    create_moments,
    gated_step,
    gradient_norm,
    optimizer_tensors,
)
from trainmark.training.precision import compute_dtype
from trainmark.training.seeding import stream_seed
from trainmark.training.transfer import Copier, wait_for
from trainmark.workloads.distilbert import weights
from trainmark.workloads.distilbert.data import SentenceBatch
from trainmark.workloads.distilbert.model import SentenceClassifier
from trainmark.workloads.distilbert.runs import DistilbertRun


@dataclass(frozen=True, kw_only=True)
class Prepared(BatchCounts):
    """A batch on the device: ids, positions, bounds, first tokens, labels, weights."""

    tensors: list[Tensor]
    ready: Any

    def micro_batches(self) -> Iterable[tuple[Tensor, ...]]:
        return zip(*self.tensors, strict=True)


class SentenceTrainer:
    """Trains one whole model on each rank."""

    def __init__(self, model: SentenceClassifier, mesh: Mesh, cfg: DistilbertRun) -> None:
        self.model, self.mesh, self.cfg = model, mesh, cfg
        self._copy = Copier(mesh.device)
        self.turn = Lock()
        """Held while a batch is predicted: the compiler's stance is one for all threads."""
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._gradients = FlatGradients(model.parameters(), mesh)
        self._optimizer = _make_optimizer(model, cfg)
        self._observed: dict[str, Tensor] = {}
        self._loss_scale = LossScale.of_run(cfg, mesh.device)
        if cfg.compile:
            model.compile_parts()
        on_gpu = mesh.device.type == "cuda"
        self._graphed = (
            Graphed(self._micro_step, [self._gradients.buffer])
            if on_gpu and not cfg.eager
            else None
        )

    # --- input

    def prepare(self, batch: SentenceBatch) -> Prepared:
        """Copy a batch to the device."""
        tensors, ready = self._copy(batch.tensors, lambda copies: copies)
        return Prepared(tensors=tensors, ready=ready, **batch.counts())

    # --- training

    def step(self, prepared: Prepared, lr: float) -> tuple[Tensor, Tensor]:
        """One optimiser step over the batch, in micro-batches. Returns (mean loss, skipped)."""
        self._compute(prepared)
        return self._update(lr)

    def checked_step(
        self, prepared: Prepared, lr: float
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """`step`, with loss and gradients computed twice, and by name whether bits differ."""
        names = {name: parameter for parameter, name in self._names.items()}

        def described(_: None) -> Fingerprints:
            gradients = {name: p.grad for name, p in names.items() if p.grad is not None}
            named = fingerprints({"the loss": self._gradients.loss})
            return named | fingerprints(gradients, "the gradient of ")

        _, differ = computed_twice(
            lambda: self._compute(prepared),
            described,
            lambda: None,  # computing begins with zeros
            lambda: fingerprints(self.weights() | self.state_dict()),
        )
        return *self._update(lr), differ

    def _compute(self, prepared: Prepared) -> None:
        """Loss and gradients of the batch."""
        self.model.train()
        self._gradients.zero()
        micro_batches = list(prepared.micro_batches())
        if self._graphed and micro_batches:
            self._graphed.capture(micro_batches[0])
        self._seed_dropout(prepared.position)
        for micro_batch in micro_batches:
            if self._graphed:
                self._graphed(micro_batch)
            else:
                self._micro_step(*micro_batch)
        self._gradients.reduce()

    def _update(self, lr: float) -> tuple[Tensor, Tensor]:
        loss = self._gradients.loss.clone()
        gate = self._finish_gradients()
        gated_step(self._optimizer, lr, gate)
        return loss, gate == 0

    def observed(self) -> dict[str, Tensor]:
        """The last step's gradient norm, and its loss scale where there is one."""
        return self._observed

    def _seed_dropout(self, position: int) -> None:
        """Dropout is a function of (seed, position, rank): a continued run drops the same."""
        torch.manual_seed(stream_seed(self.cfg.seed, "dropout", position, self.mesh.dp_rank))

    def _micro_step(
        self, ids: Tensor, positions: Tensor, bounds: Tensor, first: Tensor, labels: Tensor,
        weights: Tensor,
    ) -> None:  # fmt: skip
        """Add a micro-batch's gradients and loss to those of the step."""
        logits_SC = self.model(ids, positions, bounds, first)
        loss = cross_entropy(logits_SC, labels, reduction="none") @ weights
        scaled = loss if self._loss_scale is None else loss * self._loss_scale.scale
        scaled.backward()
        self._gradients.loss.add_(loss.detach())

    def _finish_gradients(self) -> Tensor:
        """Undo the loss scale. Returns the gate: 1 if loss and gradients are finite, else 0."""
        norm, gate = gradient_norm([self._gradients.gradients], [self._gradients.extra])
        self._observed = {"gradient_norm": norm}
        if self._loss_scale is not None:
            self._observed = self._loss_scale.observed(norm)
            self._gradients.buffer.mul_(1 / self._loss_scale.scale)
            self._loss_scale.update(gate)
        return gate

    # --- prediction

    @torch.no_grad()
    def predict(self, prepared: Prepared) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
        """Logits, labels and weights of each micro-batch."""
        if self.model.training:  # to tell every module again would take 60 us of each call
            self.model.eval()
        # A few hundred held-out sentences do not repay another compilation.
        with torch.compiler.set_stance("force_eager"):
            for *tokens, labels, weights in prepared.micro_batches():
                yield self.model(*tokens), labels, weights

    # --- state

    def weights(self) -> dict[str, Tensor]:
        """Every weight by its global name."""
        return {name: parameter.detach() for parameter, name in self._names.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Optimiser and loss scale; dropout needs no state."""
        state = optimizer_tensors(self._optimizer, self._names)
        return state | (self._loss_scale.tensors() if self._loss_scale else {})


def _make_optimizer(model: nn.Module, cfg: DistilbertRun) -> AdamW:
    """AdamW that decays matrices and embeddings, but neither biases nor LayerNorm."""
    settings, parameters = cfg.optimizer, list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    fused = not parameters[0].is_meta  # PyTorch refuses to fuse what only has a shape
    betas = (settings.beta1, settings.beta2)
    optimizer = AdamW(groups, lr=0.0, betas=betas, eps=settings.eps, fused=fused)
    create_moments(optimizer)
    return optimizer


def build_predictor(trainer: SentenceTrainer) -> Callable[[SentenceBatch], Tensor]:
    """[S, C] logits, in host memory, of a batch of tokens there."""
    trainer.model.cast_blocks(compute_dtype(trainer.cfg.precision))

    def predict(batch: SentenceBatch) -> Tensor:
        with trainer.turn:
            prepared = trainer.prepare(batch)
            wait_for(prepared.ready)
            logits_SC = torch.cat([logits for logits, _, _ in trainer.predict(prepared)])
            return logits_SC[: batch.samples].cpu()  # without stand-ins

    return predict


def answers(logits_SC: Tensor) -> dict[str, Tensor]:
    """Each sentence's class, and the probabilities of all, by name."""
    return class_columns(logits_SC.float().softmax(1))


def class_columns(probabilities_SC: Tensor) -> dict[str, Tensor]:
    """The likeliest class, and the probabilities of all, by name."""
    named = {f"probability_{i}": column for i, column in enumerate(probabilities_SC.unbind(1))}
    return {"class": probabilities_SC.argmax(1), **named}


def evaluate(trainer: SentenceTrainer, data: Iterable[SentenceBatch]) -> dict[str, float | None]:
    """Accuracy and mean loss over a split, each sentence counted once at any world size."""
    sums = torch.zeros(3, dtype=torch.float64, device=trainer.mesh.device)
    for batch in data:
        prepared = trainer.prepare(batch)
        wait_for(prepared.ready)
        for logits_SC, labels_S, weights_S in trainer.predict(prepared):
            real_S = weights_S > 0  # not a stand-in
            right_S = (logits_SC.argmax(1) == labels_S) & real_S
            losses_S = cross_entropy(logits_SC, labels_S, reduction="none") * real_S
            sums += torch.stack([right_S.sum(), losses_S.double().sum(), real_S.sum()])
    trainer.mesh.add_over_dp(sums)
    return classification_metrics(*sums.tolist())


def save_model(trainer: SentenceTrainer, folder: Path) -> None:
    """The trained weights as a Hugging Face folder, with the tokenizer where it is known."""
    cfg = trainer.cfg
    weights.save(folder, cfg.model, trainer.weights(), weights.tokenizer_folders(cfg))
