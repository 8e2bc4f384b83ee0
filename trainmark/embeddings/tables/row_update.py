"""Updating the rows of a store: by the kernels on a GPU, where they know the rule; else by it.

For the kernels, looked-up rows are sorted ahead of the step. The host then never waits for the GPU.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from trainmark.embeddings.tables.update import (
    RowGradients,
    RowwiseAdagrad,
    State,
    UpdateRule,
    decay_rows,
)
from trainmark.kernels.sparse_update import Rule, SortedRows, sort_rows, update_rows
from trainmark.kernels.table_formats import Rows


@dataclass(frozen=True)
class LookedUpRows:
    """Rows in the order in which they were looked up."""

    rows_N: Tensor
    places_N: Tensor | None = None
    """Where each one's gradient is, if not in the same place: several may share one."""


Plan = LookedUpRows | SortedRows
"""The rows to update, duplicates included: sorted for the kernels, else as they were looked up."""


def plan_tensors(plan: Plan) -> list[Tensor]:
    """What a plan is made of, for streams that read what another has made."""
    return [plan.rows_N] if plan.places_N is None else [plan.rows_N, plan.places_N]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all stores' updates of one step have in common."""

    lr: float
    """Or a tensor, for the kernels in a CUDA graph."""
    gate: Tensor
    """1, or 0: nothing may change."""
    unscale: Tensor | None = None
    """What to multiply gradients by, where the loss was scaled."""
    updates: Tensor | None = None
    """How many there were before, on the device: rounding draws other bits in each."""

    @cached_property
    def scalars(self) -> Tensor:
        """For the kernels. Numbers are filled in: no CUDA graph can hold a copy from the host."""
        scalars = self.gate.new_empty(3)
        factor = 1.0 if self.unscale is None else self.unscale
        for place, value in zip(scalars, (self.lr, factor, self.gate), strict=True):
            _ = place.copy_(value) if isinstance(value, Tensor) else place.fill_(value)
        return scalars


def plan_update(rule: UpdateRule, ids: Tensor, places: Tensor | None = None) -> Plan:
    """What an update of the rows `ids` needs to know of them.

    Args:
        rule: how they are updated.
        ids: rows of the store; with `places`, -1 for none.
        places: where each one's gradient is, if not in the same place.
    """
    if has_kernel(rule, ids):
        return plan_sorted(ids, places)
    if places is None or not len(ids) or ids.min() >= 0:
        return LookedUpRows(ids, places)
    kept = (ids >= 0).nonzero().squeeze(1)
    return LookedUpRows(ids[kept], places[kept])


def plan_sorted(ids: Tensor, places: Tensor | None) -> SortedRows:
    """The same for the kernels."""
    in_order = sort_rows(ids[:, None])
    if places is None:
        return in_order
    return SortedRows(in_order.rows_N, places[in_order.places_N], of_bags=True)


def has_kernel(rule: UpdateRule, ids: Tensor) -> bool:
    return ids.is_cuda and rule.kernel is not None


def update(
    rule: UpdateRule,
    table: Rows,
    state: State,
    plan: Plan,
    grads: Tensor,
    settings: Settings,
    key: Tensor | None = None,
) -> None:
    """Change rows and `state` in place. `grads`, of any float type, may be overwritten.

    Rows that are not fp32 need a sorted plan, and a `key`: see `update_rows`.
    """
    gate, weight = settings.gate, table.codes
    if isinstance(plan, SortedRows):
        if rule.kernel is None:
            raise TypeError(f"{type(rule).__name__} has no kernel that could use sorted rows.")
        grads, sums = grads.contiguous(), state.get("sum")
        update_rows(table, sums, plan, grads, rule.kernel, settings.scalars, key)
    elif gate.device.type != "cpu" or gate:  # on a CPU asking costs nothing
        _decay(rule, weight, plan.rows_N, settings)
        rule.update(weight, state, _gradients(plan, grads, settings), settings.lr, gate)


def update_summed(
    rule: UpdateRule,
    weight: Tensor,
    state: State,
    rows: Tensor,
    grads: Tensor,
    mean_square: Tensor,
    settings: Settings,
) -> None:
    """Row-wise Adagrad on `summed_rows` whose mean(g^2) the caller has found."""
    _decay(rule, weight, rows, settings)
    cast(RowwiseAdagrad, rule).update_rows(weight, state, rows, grads, mean_square, settings.lr)


def _decay(rule: UpdateRule, weight: Tensor, rows: Tensor, settings: Settings) -> None:
    if rule.weight_decay:
        decay_rows(weight, rows, settings.lr * rule.weight_decay * settings.gate)


def summed_rows(plan: Plan, grads: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Rows in order, and the sum of the gradients of each.

    Sorted rows stay as they are, because nobody knows how many are distinct: the sum goes with the
    first of equal ones, and zeros with the others.
    """
    if not isinstance(plan, SortedRows):
        return _gradients(plan, grads, settings).summed()
    plan = _those_there(plan)
    rows = plan.rows_N
    place = torch.arange(len(rows), device=rows.device)
    place[1:] *= rows[1:] != rows[:-1]
    first = SortedRows(place.cummax(0).values if len(rows) else place, plan.places_N)
    sums = torch.zeros(len(rows), grads.shape[1], device=grads.device)
    plus = Settings(lr=-1.0, gate=settings.gate, unscale=settings.unscale)
    update_rows(Rows(sums), None, first, grads.contiguous(), Rule("sgd"), plus.scalars, None)
    return rows, sums


def _those_there(plan: SortedRows) -> SortedRows:
    """Without ids that are none, of which the host must learn how many there are."""
    if not plan.of_bags:
        return plan
    there = plan.rows_N >= 0
    return SortedRows(plan.rows_N[there], plan.places_N[there])


def _gradients(plan: LookedUpRows, grads: Tensor, settings: Settings) -> RowGradients:
    """In fp32 and of the loss itself; zeros where the gate is closed, on a GPU."""
    grads = grads.float()
    if settings.unscale is not None:
        grads = grads.mul_(settings.unscale)
    if settings.gate.device.type != "cpu":
        grads = torch.where(settings.gate > 0, grads, torch.zeros_like(grads))
    return RowGradients(plan.rows_N, grads, plan.places_N)
