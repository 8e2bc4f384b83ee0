"""Sparse update rules: how the rows that a batch touched change. Plain torch, any device.

A rule gets the looked-up ids with their gradient rows, duplicates included. Where a step must not
be applied, its gradients are zero, which leaves SGD and Adagrad exactly as they were; `gate`
(1 or 0, on the device) does the same for Adam's moments.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trainmark.hardware.allocator import use_huge_pages
from trainmark.kernels.compiled import has_compiled
from trainmark.kernels.sparse_update import Rule, RuleName

State = dict[str, Tensor]


@dataclass(frozen=True)
class RowGradients:
    """The rows that a batch looked up, duplicates included, and what their gradients are."""

    ids: Tensor
    grads: Tensor
    places: Tensor | None = None
    """Of each id, which gradient is its own, be it others' as well; None: that in its place."""

    def summed(self) -> tuple[Tensor, Tensor]:
        """Distinct ids, and the sum of the gradients of each."""
        distinct, place = torch.unique(self.ids, return_inverse=True)
        sums = self.grads.new_zeros(distinct.numel(), self.grads.shape[1])
        add_rows(sums, place, self.grads, places=self.places)
        return distinct.long(), sums


class UpdateRule(Protocol):
    """What an engine needs of an optimiser."""

    @property
    def kernel(self) -> Rule | None:
        """The same rule as the kernels know it, if they do."""
        ...

    @property
    def weight_decay(self) -> float:
        """An update takes the learning rate times this share off every row first, once."""
        ...

    @property
    def ignores_zeros(self) -> bool:
        """Whether a row whose gradient is zero stays as it is, and so does its state."""
        ...

    def new_state(self, weight: Tensor, dtype: torch.dtype = torch.float32) -> State:
        """Zeroed state for the rows of `weight`; tensors with as many rows are per-row state.

        `dtype`: of what is as wide as a row. One number a row takes little memory, and is fp32.
        """
        ...

    def update(
        self, weight: Tensor, state: State, found: RowGradients, lr: float, gate: Tensor
    ) -> None:
        """Change decayed `weight` and `state` in place. The gradients may be overwritten."""
        ...


def make_rule(
    name: str, *, eps: float, beta1: float, beta2: float, weight_decay: float = 0.0
) -> UpdateRule:
    """The rule of that name, with the settings that it takes."""
    rules: dict[str, UpdateRule] = {
        "sgd": Sgd(weight_decay),
        "adagrad": Adagrad(eps, weight_decay),
        "rowwise_adagrad": RowwiseAdagrad(eps, weight_decay),
        "adam": LazyAdam(eps, beta1, beta2, weight_decay),
    }
    return rules[name]


class Sgd:
    """w -= lr g. The only rule that is linear in g: duplicates need not be summed first."""

    def __init__(self, weight_decay: float = 0.0) -> None:
        self.weight_decay, self.ignores_zeros = weight_decay, weight_decay == 0
        self.kernel = Rule("sgd", weight_decay=weight_decay)

    def new_state(self, weight: Tensor, dtype: torch.dtype = torch.float32) -> State:
        return {}

    def update(
        self, weight: Tensor, state: State, found: RowGradients, lr: float, gate: Tensor
    ) -> None:
        add_rows(weight, found.ids, found.grads, -lr, found.places)


class Adagrad:
    """s += g^2; w -= lr g / (sqrt(s) + eps)."""

    name: RuleName = "adagrad"

    def __init__(self, eps: float, weight_decay: float = 0.0) -> None:
        self.weight_decay, self.ignores_zeros = weight_decay, weight_decay == 0
        self.eps, self.kernel = eps, Rule(self.name, eps, weight_decay)

    def new_state(self, weight: Tensor, dtype: torch.dtype = torch.float32) -> State:
        return {"sum": _zeros(weight, weight.shape, dtype)}

    def update(
        self, weight: Tensor, state: State, found: RowGradients, lr: float, gate: Tensor
    ) -> None:
        if has_compiled(weight, found.grads):
            from trainmark.kernels import cpu_rows

            ids, grads, places = found.ids, found.grads, found.places
            cpu_rows.adagrad(weight, state["sum"], ids, grads, lr, self.eps, places)
        else:
            self._update_distinct(weight, state, *found.summed(), lr)

    def _update_distinct(
        self, weight: Tensor, state: State, rows: Tensor, grads: Tensor, lr: float
    ) -> None:
        total = state["sum"].index_select(0, rows).addcmul_(grads, grads)
        state["sum"].index_copy_(0, rows, total)
        add_rows(weight, rows, grads.div_(total.sqrt_().add_(self.eps)).mul_(-lr))


class RowwiseAdagrad(Adagrad):
    """One s per row: s += mean(g^2); w -= lr g / (sqrt(s) + eps)."""

    name = "rowwise_adagrad"

    def new_state(self, weight: Tensor, dtype: torch.dtype = torch.float32) -> State:
        return {"sum": _zeros(weight, weight.shape[:1], torch.float32)}

    def _update_distinct(
        self, weight: Tensor, state: State, rows: Tensor, grads: Tensor, lr: float
    ) -> None:
        self.update_rows(weight, state, rows, grads, square_sums(grads) / grads.shape[1], lr)

    def update_rows(
        self,
        weight: Tensor,
        state: State,
        rows: Tensor,
        grads: Tensor,
        mean_square: Tensor,
        lr: float,
    ) -> None:
        """For summed gradients, whose mean(g^2) may be over columns that lie elsewhere.

        A row may come again, with zeros.
        """
        total = state["sum"].index_add_(0, rows, mean_square).index_select(0, rows)
        factor = -lr / total.sqrt_().add_(self.eps)
        add_rows(weight, rows, grads.mul_(factor[:, None]))


class LazyAdam:
    """Adam whose moments move only in the rows touched, as torch.optim.SparseAdam has it."""

    ignores_zeros = False
    kernel = None

    def __init__(self, eps: float, beta1: float, beta2: float, weight_decay: float) -> None:
        self.eps, self.beta1, self.beta2, self.weight_decay = eps, beta1, beta2, weight_decay

    def new_state(self, weight: Tensor, dtype: torch.dtype = torch.float32) -> State:
        return {
            "first": _zeros(weight, weight.shape, dtype),
            "second": _zeros(weight, weight.shape, dtype),
            "steps": weight.new_zeros(()),
        }

    def update(
        self, weight: Tensor, state: State, found: RowGradients, lr: float, gate: Tensor
    ) -> None:
        rows, grads = found.summed()
        keep1, keep2 = 1 - gate * (1 - self.beta1), 1 - gate * (1 - self.beta2)
        first = state["first"].index_select(0, rows).mul_(keep1)
        first.add_(grads, alpha=1 - self.beta1)
        second = state["second"].index_select(0, rows).mul_(keep2)
        second.addcmul_(grads, grads, value=1 - self.beta2)
        state["first"].index_copy_(0, rows, first)
        state["second"].index_copy_(0, rows, second)
        # A gated first step would divide 0 by 0 below, and NaN times a gate of 0 is NaN. In
        # float32, 1 - 0.999 would be off by 5e-5.
        steps = state["steps"].add_(gate).clamp(min=1).double()
        scale = -lr * gate * (1 - self.beta2**steps).sqrt() / (1 - self.beta1**steps)
        add_rows(weight, rows, first.div_(second.sqrt_().add_(self.eps)).mul_(scale))


def _zeros(weight: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """State that is read from all over it, as the rows are."""
    state = weight.new_empty(shape, dtype=dtype)
    use_huge_pages(state)
    return state.zero_()


def square_sums(rows: Tensor) -> Tensor:
    """The sum of squares of each row; six times faster on a CPU than to square and to sum."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms.square_()


def decay_rows(weight: Tensor, rows: Tensor, share: Tensor | float) -> None:
    """Take a share off the rows: once, however often one is named."""
    kept = weight.index_select(0, rows).mul_(1 - share)
    # Equal rows have become equal ones: any may come last. Sorted rows may be of 32 bits.
    weight.index_copy_(0, rows.long(), kept)


def add_rows(
    target: Tensor,
    ids: Tensor,
    rows: Tensor,
    scale: float = 1.0,
    places: Tensor | None = None,
) -> None:
    """target[ids[i]] += scale rows[i], duplicates included; or rows[places[i]]. May overwrite
    `rows`."""
    if has_compiled(target, rows):
        from trainmark.kernels import cpu_rows

        cpu_rows.add_rows(target, ids, rows, scale, places)
        return
    if places is not None:
        rows = rows.index_select(0, places)
    if scale != 1:
        rows = rows.mul_(scale)
    if target.device.type == "cpu":
        # PyTorch sorts an expanded index and adds row by row, in parallel and in a fixed order:
        # four times faster than index_add_ here, and repeatable.
        target.scatter_add_(0, ids.unsqueeze(1).expand_as(rows), rows)
    else:
        target.index_add_(0, ids, rows)
