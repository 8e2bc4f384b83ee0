"""DLRM's optimiser step: forward, loss, backward, sparse and dense update, or nothing."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from trainmark.config import filled
from trainmark.contract import Data, DeviceBytes, Predictions
from trainmark.distributed.gradients import FlatGradients
from trainmark.distributed.mesh import Mesh
from trainmark.embeddings.tables.batch import IdGroup
from trainmark.errors import InputError
from trainmark.kernels.click_loss import click_loss_of_logits
from trainmark.training.batches import BatchCounts, rank_shares
from trainmark.training.checking import (
    Fingerprints,
    computed_twice,
    fingerprint,
    fingerprints,
)
from trainmark.training.optimizers import (
    LossScale,
    decay_weights,
    gated_step,
    gradient_norm,
    make_optimizer,
    optimizer_tensors,
)
from trainmark.training.precision import autocast, compute_dtype
from trainmark.training.transfer import Copier, wait_for
from trainmark.workloads.dlrm import fast_prediction, graphed_prediction
from trainmark.workloads.dlrm.crosses import with_crosses
from trainmark.workloads.dlrm.data import ClickBatch
from trainmark.workloads.dlrm.model import Dlrm, whole
from trainmark.workloads.dlrm.multi_hot import MoreIds
from trainmark.workloads.dlrm.runs import DlrmRun, score_offset
from trainmark.workloads.dlrm.slots import Filled, Slots


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Samples that go through the model together, on the device and in wide types."""

    numerical_BN: Tensor
    labels_B: Tensor
    lookup: Any
    """What the embedding engine prepared of the ids."""
    first: int = 0
    """Place of the first sample in the global batch."""


@dataclass(frozen=True, kw_only=True)
class Prepared(BatchCounts):
    """One optimiser step's batch."""

    micro_batches: list[MicroBatch] = field(default_factory=list)
    global_samples: int
    ready: Any
    """The event after which the copies may be read: input ends there."""
    lookups_ready: Any = None
    """The event after which the lookups are prepared: part of the step."""
    slot: Filled | None = None
    """The slot that holds the batch instead, if CUDA graphs work on it."""


class DlrmTrainer:
    """Trains a model whose MLPs are whole on every rank and whose tables are an engine's."""

    def __init__(self, model: Dlrm, mesh: Mesh, cfg: DlrmRun) -> None:
        self.model, self.mesh, self.cfg = model, mesh, cfg
        self._copy = Copier(mesh.device)
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        model.tables.create_state()
        optimizer = cfg.optimizer
        self._optimizer = make_optimizer(
            optimizer.name,
            model.parameters(),
            eps=filled(optimizer.eps),
            beta1=optimizer.beta1,
            beta2=optimizer.beta2,
        )
        self._loss_scale = LossScale.of_run(cfg, mesh.device)
        # Two buffers, because the top MLP's gradients are complete long before the bottom's, whose
        # buffer also takes a sum of all gradients of table rows along, and the loss.
        behind_tables = [*model.interaction.parameters(), *model.top.parameters()]
        self._top = FlatGradients(behind_tables, mesh, extra=0)
        self._bottom = FlatGradients(model.bottom.parameters(), mesh, extra=2)
        # What a CUDA graph is told, and what it tells: the loss, whether the step was skipped, and
        # what is observed.
        self._lr = torch.zeros((), device=mesh.device)
        self._samples_before = torch.zeros((), dtype=torch.int64, device=mesh.device)
        self._observed = ["gradient_norm", *(["loss_scale"] if self._loss_scale else [])]
        self._outcome = torch.zeros(2 + len(self._observed), device=mesh.device)
        self._last_step = self._outcome
        self._compared: list[str] = []
        self._differ: Tensor | None = None
        """In a checked step, whether the bits of each compared item differ."""
        self._in_last_micro_batch = False
        self._more_ids = (
            MoreIds(cfg.model.bag_sizes, cfg.model.table_rows)
            if cfg.multi_hot == "uniform" and cfg.model.has_bags
            else None
        )
        model.top_gradients_done = self._reduce_top
        self._steps = 0
        if cfg.compile:
            model.compile_dense()
        can_graph = model.tables.works_in_graphs and mesh.device.type == "cuda"
        self.uses_graphs = can_graph and not cfg.eager
        self._slots = Slots(self._copy, self._train_in_slot) if self.uses_graphs else None
        self.turn = Lock()
        """Held while a batch is predicted: lookups of several would get into each other's way."""

    # --- input

    def prepare(self, batch: ClickBatch, max_samples: int | None = None) -> Prepared:
        """Copy a batch in its narrow types, widen it on the device, and prepare the lookups.

        At most `max_samples`, by default a micro-batch, go through the model together.
        """
        counts = {"global_samples": batch.global_samples, **batch.counts()}
        tensors = [batch.numerical, batch.labels, *(group.ids for group in batch.groups)]
        features = [group.features for group in batch.groups]
        if self._slots and max_samples is None and batch.samples == self.cfg.micro_batch:
            prepare = partial(self._only_micro_batch, features)
            slot = self._slots.fill(tensors, prepare, batch.make)
            return Prepared(slot=slot, ready=slot.ready, **counts)
        (numerical, labels, *ids), ready = self._copy(tensors, _widened, batch.make)
        parts = self._parts(batch, max_samples or filled(self.cfg.micro_batch))
        lookups, lookups_ready = self._copy.then(
            lambda: self._lookups(_groups(features, ids), parts)
        )
        own_parts = [of_ranks[self.mesh.dp_rank] for of_ranks in parts]
        first = sum(rank_shares(batch.global_samples, self.mesh.dp_size)[: self.mesh.dp_rank])
        micro_batches = [
            MicroBatch(
                numerical_BN=numerical[part],
                labels_B=labels[part],
                lookup=lookup,
                first=first + part.start,
            )
            for part, lookup in zip(own_parts, lookups, strict=True)
        ]
        return Prepared(
            micro_batches=micro_batches, ready=ready, lookups_ready=lookups_ready, **counts
        )

    def _only_micro_batch(self, features: list[list[int]], tensors: list[Tensor]) -> MicroBatch:
        """The only one of the only rank, as a CUDA graph prepares it."""
        numerical, labels, *ids = _widened(tensors)
        (lookup,) = self._lookups(_groups(features, ids), [[slice(0, len(labels))]])
        return MicroBatch(numerical_BN=numerical, labels_B=labels, lookup=lookup)

    def _lookups(self, groups: list[IdGroup], parts: list[list[slice]]) -> list[Any]:
        rank = self.mesh.dp_rank
        if self._more_ids is not None:
            groups = self._more_ids.add(groups)
        groups = with_crosses(groups, self.cfg.model)
        return [
            self.model.tables.prepare(
                [group.part(of_ranks[rank]) for group in groups],
                [part.stop - part.start for part in of_ranks],
            )
            for of_ranks in parts
        ]

    def _parts(self, batch: ClickBatch, max_samples: int) -> list[list[slice]]:
        """Cut a batch into micro-batches of at most `max_samples`, equally many on every rank.

        Returns, for each micro-batch, the part of each rank's samples.
        """
        shares = rank_shares(batch.global_samples, self.mesh.dp_size)
        count = -(-max(shares) // max_samples)
        bounds = [[share * i // count for i in range(count + 1)] for share in shares]
        return [[slice(b[i], b[i + 1]) for b in bounds] for i in range(count)]

    # --- training

    def step(
        self, prepared: Prepared, lr: float, *, checked: bool = False
    ) -> tuple[Tensor, Tensor]:
        """One optimiser step over the batch, in micro-batches. Returns (mean loss, skipped)."""
        self.model.tables.begin_step(lr)
        if self.model.drops_out:
            self._samples_before.fill_(prepared.position - prepared.global_samples)
        if prepared.slot is not None:
            self._lr.fill_(lr)
            prepared.slot.train(checked=checked)
        else:
            wait_for(prepared.lookups_ready)
            self._train(prepared.micro_batches, prepared.global_samples, lr, checked=checked)
        self._steps += 1
        self._last_step = self._outcome.clone()
        return self._last_step[0], self._last_step[1]

    def observed(self) -> dict[str, Tensor]:
        """The last step's norm of the dense gradient, and its loss scale where there is one."""
        return dict(zip(self._observed, self._last_step[2:].unbind(), strict=True))

    def checked_step(
        self, prepared: Prepared, lr: float
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """`step` with loss and gradients computed twice; and by name whether bits differ."""
        loss, skipped = self.step(prepared, lr, checked=True)
        flags = filled(self._differ).clone().unbind()
        return loss, skipped, dict(zip(self._compared, flags, strict=True))

    def _train_in_slot(self, micro: MicroBatch, checked: bool) -> None:
        rate = cast(float, self._lr)  # a tensor, so that every replay reads it anew
        samples = len(micro.labels_B)
        self._train([micro], samples, rate, checked=checked, begin=FlatGradients.leave_where_made)

    def _train(
        self,
        micros: list[MicroBatch],
        global_samples: int,
        lr: float,
        *,
        checked: bool,
        begin: Callable[[FlatGradients], None] = FlatGradients.zero,
    ) -> None:
        """The whole step. Nothing in it makes the host wait for a GPU."""

        def compute() -> tuple[Tensor, Tensor]:
            begin(self._top)
            begin(self._bottom)
            for index, micro in enumerate(micros, 1):
                self._in_last_micro_batch = index == len(micros)
                self.model.tables.begin(micro.lookup)
                self._add_gradients(micro, global_samples)
            return self._finish_gradients()

        norm, gate = self._computed_twice(compute, micros) if checked else compute()
        observed = [norm]
        if self._loss_scale is not None:
            observed = list(self._loss_scale.observed(norm).values())
        self._update(lr, gate)
        torch.stack([self._bottom.loss, 1 - gate, *observed], out=self._outcome)

    def _computed_twice(
        self, compute: Callable[[], tuple[Tensor, Tensor]], micros: list[MicroBatch]
    ) -> tuple[Tensor, Tensor]:
        tables = self.model.tables

        def described(computed: tuple[Tensor, Tensor]) -> Fingerprints:
            _, gate = computed
            named = fingerprints({"the loss": self._bottom.loss, "the gate": gate})
            gradients = {name: p.grad for p, name in self._names.items() if p.grad is not None}
            named |= fingerprints(gradients, "the gradient of ")
            return named | _of_rows("the gradients of table rows", tables.row_gradients())

        def weights() -> Fingerprints:
            rows = [part for micro in micros for part in tables.rows_in_use(micro.lookup)]
            named = fingerprints({name: p for p, name in self._names.items()})
            state = optimizer_tensors(self._optimizer, self._names)
            here = self.mesh.device.type  # PyTorch's Adagrad counts its steps on the host
            named |= fingerprints({k: t for k, t in state.items() if t.device.type == here})
            return named | _of_rows("the table rows", rows)

        computed, differ = computed_twice(compute, described, tables.forget, weights)
        if self._differ is None:
            self._differ = torch.zeros(len(differ), dtype=torch.bool, device=self.mesh.device)
        self._compared = list(differ)
        torch.stack(list(differ.values()), out=self._differ)
        return computed

    def _add_gradients(self, micro: MicroBatch, global_samples: int) -> None:
        """Add a micro-batch's gradients and loss to those of the step."""
        if self.model.drops_out:
            self.model.begin_samples(self._numbers(micro))
        if self.model.top.has_fused_loss:
            loss = self._loss_with_gradients(micro, global_samples)
        else:
            loss = self._loss(micro)
            self._scaled(loss / global_samples).backward()
        self._bottom.loss.add_(loss.detach() / global_samples)

    def _numbers(self, micro: MicroBatch) -> Tensor:
        """[B] how many samples of the run come before each sample."""
        places_B = torch.arange(len(micro.labels_B), device=self.mesh.device)
        return places_B + (self._samples_before + micro.first)

    def _loss_with_gradients(self, micro: MicroBatch, global_samples: int) -> Tensor:
        scale = self._scaled(torch.full((), 1 / global_samples, device=self.mesh.device))
        with autocast(self.cfg.precision, self.mesh.device):
            loss = self.model.loss(micro.numerical_BN, micro.lookup, micro.labels_B, scale)
        loss.backward()
        return loss

    def _loss(self, batch: MicroBatch) -> Tensor:
        logits_B = self._logits(batch.numerical_BN, batch.lookup)
        return click_loss_of_logits(logits_B, batch.labels_B, self.cfg.positive_weight)

    def _logits(self, numerical_BN: Tensor, lookup: Any) -> Tensor:
        with autocast(self.cfg.precision, self.mesh.device):
            logits: Tensor = self.model(numerical_BN, lookup)
        return logits.float()

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self._loss_scale is None else loss * self._loss_scale.scale

    def _reduce_top(self) -> None:
        """Add up the top MLP's gradients over the ranks while the bottom's are computed."""
        if self._in_last_micro_batch:
            self._top.start()

    def _finish_gradients(self) -> tuple[Tensor, Tensor]:
        """Add up over the ranks. Returns the norm of the dense gradient, which is scaled as the
        loss is, and the gate: 1 if loss and gradients are finite, else 0.

        Both are the same on all ranks, because they are computed from sums over all of them.
        """
        of_rows, _ = self._bottom.extra
        for gradient in self.model.tables.gradients():
            of_rows.add_(gradient.sum(dtype=torch.float32))
        self._bottom.reduce()
        self._top.wait()
        return gradient_norm(self._dense_gradients(), [self._bottom.extra])

    def _dense_gradients(self) -> list[Tensor]:
        return self._top.tensors() + self._bottom.tensors()

    @torch.no_grad()
    def _update(self, lr: float, gate: Tensor) -> None:
        unscale = None
        if self._loss_scale is not None:
            unscale = 1 / self._loss_scale.scale
            torch._foreach_mul_(self._dense_gradients(), unscale)
            self._loss_scale.update(gate)
        self.model.tables.apply_gradients(lr, gate, unscale)
        matrices = [parameter for parameter in self._names if parameter.dim() > 1]
        decay_weights(matrices, self.cfg.optimizer.weight_decay, lr, gate)
        gated_step(self._optimizer, lr, gate)

    # --- prediction

    @torch.no_grad()
    def prepare_to_predict(self, batch: ClickBatch, max_samples: int) -> Prepared:
        """`prepare` without what only an update needs."""
        return self.prepare(batch, max_samples)

    @torch.inference_mode()
    def predict(self, prepared: Prepared) -> Tensor:
        """[B] click logits, of the log's own click rate."""
        wait_for(prepared.ready)
        wait_for(prepared.lookups_ready)
        micros = prepared.micro_batches
        return torch.cat([self._scores(micro.numerical_BN, micro.lookup) for micro in micros])

    @torch.inference_mode()
    def predict_at_once(self, numerical_BN: Tensor, groups: list[IdGroup]) -> Tensor:
        """[B] click logits of samples on the device, without `prepare`; fit for a CUDA graph."""
        (lookup,) = self._lookups(groups, [[slice(0, len(numerical_BN))]])
        if self.model.bottom.fused_dtype is None:  # else the kernel takes any type
            numerical_BN = numerical_BN.float()
        return self._scores(numerical_BN, lookup)

    def _scores(self, numerical_BN: Tensor, lookup: Any) -> Tensor:
        self.model.tables.begin(lookup)
        missing = self.model.bottom.inputs - numerical_BN.shape[1]
        if missing:  # of a bottom MLP that was filled up
            numerical_BN = pad(numerical_BN, (0, missing))
        logits_B, offset = self._logits(numerical_BN, lookup), score_offset(self.cfg)
        return logits_B + offset if offset else logits_B

    # --- state

    def weights(self) -> dict[str, Tensor]:
        """Every weight by its global name."""
        dense = {name: p.detach() for p, name in self._names.items()}
        return dense | self.model.tables.table_weights()

    def state_dict(self) -> dict[str, Tensor]:
        """Optimiser and loss scale."""
        state = optimizer_tensors(self._optimizer, self._names)
        state |= self.model.tables.table_state()
        return state | (self._loss_scale.tensors() if self._loss_scale else {})

    def state_loaded(self) -> None:
        """A checkpoint has filled the tensors; the tables may have copies to renew."""
        self.model.tables.state_loaded()

    def device_bytes(self) -> DeviceBytes:
        """Bytes on the fullest device."""
        tables = self.model.tables.device_bytes()
        weights = sum(p.nbytes for p in self._names)
        state = sum(t.nbytes for t in optimizer_tensors(self._optimizer, self._names).values())
        if self._loss_scale is not None:
            state += sum(tensor.nbytes for tensor in self._loss_scale.tensors().values())
        return DeviceBytes(
            weights=weights + tables.weights,
            gradients=self._top.gradients.nbytes + self._bottom.gradients.nbytes,
            optimizer=state + tables.optimizer,
        )

    def sent_bytes_per_step(self) -> dict[str, float]:
        """Bytes that this rank sent to others in training, by what they were, mean over steps."""
        sent = {kind: n / max(self._steps, 1) for kind, n in self.model.tables.sent_bytes.items()}
        return {**sent, "dense": float(self._top.sent_bytes + self._bottom.sent_bytes)}


def _of_rows(name: str, rows: list[Tensor]) -> Fingerprints:
    """One fingerprint for all rows, because their number depends on the micro-batches."""
    return {name: fingerprint(*rows)} if rows else {}


def _widened(tensors: list[Tensor]) -> list[Tensor]:
    """Always new tensors: a slot's own are filled again while the step still reads these."""
    numerical, labels, *ids = tensors
    return [*(tensor.to(torch.float32, copy=True) for tensor in (numerical, labels)), *ids]


def _groups(features: list[list[int]], ids: list[Tensor]) -> list[IdGroup]:
    return [IdGroup(f, i) for f, i in zip(features, ids, strict=True)]


def build_trainer(parts: list[nn.Module], mesh: Mesh, cfg: DlrmRun) -> DlrmTrainer:
    return DlrmTrainer(whole(parts), mesh, cfg)


def build_predictor(trainer: DlrmTrainer) -> Callable[[ClickBatch], Tensor]:
    """A function from a batch to its [B] click logits, both in host memory.

    On several ranks, each is given a share of the batch, and gets the logits of the whole batch.
    """
    trainer.model.cast_dense(compute_dtype(trainer.cfg.precision))

    def predict(batch: ClickBatch) -> Tensor:
        shares = rank_shares(batch.global_samples, trainer.mesh.dp_size)
        with trainer.turn:
            logits = trainer.predict(trainer.prepare_to_predict(batch, max(shares)))
            return trainer.mesh.gather_over_dp(logits, shares).cpu()

    if trainer.mesh.dp_size > 1:
        return predict
    if trainer.uses_graphs:
        return graphed_prediction.TrainerGraphs(trainer, predict)
    return fast_prediction.of_trainer(trainer) or predict


def predict(trainer: DlrmTrainer, data: Data[ClickBatch]) -> Predictions:
    """Click logits and labels of all rows of a split."""
    pieces = []
    for batch in data:
        prepared = trainer.prepare_to_predict(batch, filled(trainer.cfg.eval_batch))
        logits = trainer.predict(prepared)  # first: it waits for the copies
        labels = torch.cat([micro.labels_B for micro in prepared.micro_batches])
        both = torch.stack([logits, labels], dim=1)
        shares = rank_shares(batch.global_samples, trainer.mesh.dp_size)
        pieces.append(trainer.mesh.gather_over_dp(both, shares))
    joined, labels = torch.cat(pieces).unbind(1)
    bad = (~joined.isfinite()).nonzero()
    if len(bad):
        raise InputError(
            f"{len(bad):,} of {len(joined):,} predictions for the {data.split} split are not "
            f"finite, the first for row {int(bad[0])}. Check the values of that row; if all rows "
            "are affected, the weights have grown without bound: lower lr."
        )
    return Predictions(logits=joined.contiguous(), labels=labels > 0)
