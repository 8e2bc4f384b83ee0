"""DLRM's optimiser step: forward, loss, backward, sparse and dense update, or nothing."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from trainmark.config import filled
from trainmark.distributed.mesh import Mesh
from trainmark.errors import InputError
from trainmark.metrics import binary_metrics
from trainmark.optimizers import (
    LossScale,
    all_finite,
    gated_step,
    make_optimizer,
    optimizer_tensors,
)
from trainmark.precision import autocast
from trainmark.transfer import Copier
from trainmark.workloads.dlrm.data import ClickBatch, ClickData
from trainmark.workloads.dlrm.model import Dlrm, whole
from trainmark.workloads.dlrm.runs import DlrmRun


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A batch on the device, with wide types and global row ids."""

    numerical_BN: Tensor
    ids_BF: Tensor
    labels_B: Tensor
    samples: int
    position: int
    partial: bool
    ready: Any
    tokens: int = 0


class DlrmTrainer:
    """Trains one whole model on one device."""

    def __init__(self, model: Dlrm, mesh: Mesh, cfg: DlrmRun) -> None:
        self.model, self.mesh, self.cfg = model, mesh, cfg
        self._copy = Copier(mesh.device)
        self._table_starts = torch.tensor(
            model.tables.starts[:-1], dtype=torch.int64, device=mesh.device
        )
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        model.tables.create_state()
        optimizer = cfg.optimizer
        self._optimizer = make_optimizer(
            optimizer.name,
            model.parameters(),
            eps=optimizer.eps,
            beta1=optimizer.beta1,
            beta2=optimizer.beta2,
        )
        self._loss_scale = (
            LossScale(cfg.loss_scale, mesh.device) if cfg.precision == "fp16" else None
        )
        if cfg.compile:
            model.compile_dense()

    # --- input

    def prepare(self, batch: ClickBatch) -> Prepared:
        """Copy a batch in its narrow types and widen it on the device."""

        def widen(tensors: list[Tensor]) -> list[Tensor]:
            numerical, labels, *groups = tensors
            return [numerical.float(), labels.float(), self._global_ids(batch, groups)]

        (numerical, labels, ids), ready = self._copy(
            [batch.numerical, batch.labels, *(group.ids for group in batch.groups)], widen
        )
        return Prepared(
            numerical_BN=numerical,
            labels_B=labels,
            ids_BF=ids,
            samples=batch.samples,
            position=batch.position,
            partial=batch.partial,
            ready=ready,
        )

    def _global_ids(self, batch: ClickBatch, groups: list[Tensor]) -> Tensor:
        """[B, F] rows of the joined tables, from one [features, B] tensor per integer type."""
        ids_BF = self._table_starts.new_empty(batch.samples, self._table_starts.numel())
        for group, narrow in zip(batch.groups, groups, strict=True):
            starts = self._table_starts[group.features]
            ids_BF[:, group.features] = (narrow + starts[:, None]).t()
        return ids_BF

    # --- training

    def step(self, prepared: Prepared, lr: float) -> tuple[Tensor, Tensor]:
        """One optimiser step over the batch, in micro-batches. Returns (mean loss, skipped)."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self.mesh.device)
        for micro in self._micro_batches(prepared):
            share = micro.samples / prepared.samples
            micro_loss = self._loss(micro) * share
            self._scaled(micro_loss).backward()
            loss += micro_loss.detach()
        gate = self._finish_gradients(loss)
        self._update(lr, gate)
        return loss, gate == 0

    def _micro_batches(self, prepared: Prepared) -> list[Prepared]:
        size = filled(self.cfg.micro_batch)
        if prepared.samples <= size:
            return [prepared]
        return [
            dataclasses.replace(
                prepared,
                numerical_BN=prepared.numerical_BN[start : start + size],
                ids_BF=prepared.ids_BF[start : start + size],
                labels_B=prepared.labels_B[start : start + size],
                samples=min(size, prepared.samples - start),
            )
            for start in range(0, prepared.samples, size)
        ]

    def _loss(self, batch: Prepared) -> Tensor:
        return binary_cross_entropy_with_logits(self._logits(batch), batch.labels_B)

    def _logits(self, batch: Prepared) -> Tensor:
        with autocast(self.cfg.precision, self.mesh.device):
            logits = self.model(batch.numerical_BN, batch.ids_BF)
        return logits.float()

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self._loss_scale is None else loss * self._loss_scale.scale

    def _finish_gradients(self, loss: Tensor) -> Tensor:
        """Undo the loss scale. Returns the gate: 1 if loss and gradients are finite, else 0."""
        dense = [p.grad for p in self.model.parameters() if p.grad is not None]
        sparse = self.model.tables.gradients()
        gate = all_finite([loss, *dense, *sparse])
        if self._loss_scale is not None:
            inverse = 1 / self._loss_scale.scale
            for gradient in [*dense, *sparse]:
                gradient.mul_(inverse)
            self._loss_scale.update(gate)
        return gate

    @torch.no_grad()
    def _update(self, lr: float, gate: Tensor) -> None:
        self.model.tables.apply_gradients(lr, gate)
        gated_step(self._optimizer, lr, gate)

    # --- prediction

    @torch.inference_mode()
    def predict(self, prepared: Prepared) -> Tensor:
        """[B] click logits."""
        return self._logits(prepared)

    # --- state

    def weights(self) -> dict[str, Tensor]:
        """Every weight by its global name."""
        dense = {name: p.detach() for p, name in self._names.items()}
        return dense | self.model.tables.table_weights(self.model.table_names)

    def state_dict(self) -> dict[str, Tensor]:
        """Optimiser and loss scale."""
        state = optimizer_tensors(self._optimizer, self._names)
        state |= self.model.tables.table_state(self.model.table_names)
        return state | (self._loss_scale.tensors() if self._loss_scale else {})

    def host_state(self) -> dict[str, Any]:
        """Nothing: all of DLRM's state is tensors."""
        return {}

    def load_state_dict(self, host_state: dict[str, Any]) -> None:
        """The checkpoint has filled the tensors already."""


def build_trainer(parts: list[nn.Module], mesh: Mesh, cfg: DlrmRun) -> DlrmTrainer:
    return DlrmTrainer(whole(parts), mesh, cfg)


def evaluate(trainer: DlrmTrainer, data: ClickData) -> dict[str, float | None]:
    """AUC, log loss, accuracy and calibration over all rows of a split."""
    logits, labels = [], []
    for batch in data:
        prepared = trainer.prepare(batch)
        if prepared.ready is not None:
            prepared.ready.wait()
        logits.append(trainer.predict(prepared))
        labels.append(prepared.labels_B > 0)
    joined = torch.cat(logits)
    bad = (~joined.isfinite()).nonzero()
    if len(bad):
        raise InputError(
            f"{len(bad):,} of {len(joined):,} predictions for the {data.split} split are not "
            f"finite, the first for row {int(bad[0])}. Check the values of that row; if all rows "
            "are affected, the weights have grown without bound: lower lr."
        )
    return binary_metrics(joined, torch.cat(labels))
