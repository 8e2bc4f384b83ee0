"""The stores of one rank under a placement: its parts of tables, and replicas of small tables.

A replicated table lies whole on every device. Every rank adds the gradients of its own samples to a
dense buffer; one all-reduce makes them those of the global batch, and each rank applies the same
update to the same rows.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainmark.config import filled
from trainmark.embeddings.exchange.routes import StoreParts
from trainmark.embeddings.tables.format_store import Formats, FormatStore
from trainmark.embeddings.tables.host import HostStore
from trainmark.embeddings.tables.row_update import PlacedRows, Plan, Settings
from trainmark.embeddings.tables.store import TableBytes, TableStore
from trainmark.embeddings.tables.update import UpdateRule
from trainmark.kernels.sparse_update import Rule, SortedRows, update_rows
from trainmark.kernels.table_formats import Rows

Store = TableStore | FormatStore


def make_stores(
    all_stores: Sequence[Sequence[StoreParts]],
    device: int,
    rule: UpdateRule,
    formats: Formats,
    computes_on: torch.device,
) -> list[Store]:
    """The stores of one device, of those of all."""
    before, count = sum(map(len, all_stores[:device])), sum(map(len, all_stores))
    stores: list[Store] = []
    for number, parts in enumerate(all_stores[device], start=before):
        if parts.memory == "host":
            stores.append(HostStore(parts.parts, parts.width, rule, computes_on))
        elif parts.table_format == "fp32":
            stores.append(TableStore(parts.parts, parts.width, rule))
        else:
            stores.append(
                FormatStore(
                    parts.parts,
                    parts.width,
                    filled(rule.kernel),
                    parts.table_format,
                    formats.state_dtype,
                    formats.rounding(number, count),
                )
            )
    return stores


def stored_bytes(stores: Iterable[Store]) -> TableBytes:
    """What stores take of a device, whether or not they are allocated."""
    weights = optimizer = 0
    for store in stores:
        store.create_state()
        weights += sum(rows.nbytes for _, _, rows in store.part_weights())
        optimizer += sum(rows.nbytes for _, _, rows in store.part_state())
        optimizer += sum(scalar.nbytes for scalar in store.scalar_state().values())
    return TableBytes(weights=weights, optimizer=optimizer)


class Replicas(TableStore):
    """The tables that lie whole on every device."""

    def __init__(self, parts: StoreParts, rule: UpdateRule, *, has_bags: bool = False) -> None:
        super().__init__(parts.parts, parts.width, rule)
        self._has_bags = has_bags
        self._rows = parts.num_rows
        self._buffer: Tensor | None = None

    def add_gradients(self, ids: Tensor, plan: Plan, grads: Tensor) -> None:
        """Collect the gradient rows of some lookups of this rank."""
        gradient, touched = self._views()
        if isinstance(plan, SortedRows):
            one = torch.ones((), device=grads.device)
            plus = Settings(lr=-1.0, gate=one)
            update_rows(Rows(gradient), None, plan, grads, Rule("sgd"), plus.scalars, None)
        elif isinstance(plan, PlacedRows):
            ids = plan.rows_N
            gradient.index_add_(0, ids, grads[plan.places_N].float())
        else:
            gradient.index_add_(0, ids, grads.float())
        if touched is not None:
            touched[ids[ids >= 0] if self._has_bags else ids] = 1

    def start_sum(self, group: Any) -> Any:
        """Begin to add the gradients of all ranks; what to wait for."""
        self._views()
        return dist.all_reduce(self._buffer, group=group, async_op=True) if group else None

    def apply_sum(self, settings: Settings) -> None:
        """Update with the sums over all ranks, and forget them."""
        gradient, touched = self._views()
        if touched is None:
            rows = torch.arange(self._rows, device=gradient.device)
        else:
            rows = touched.nonzero().squeeze(1)
            gradient = gradient.index_select(0, rows)
        self.update(self.plan_update(rows), gradient, settings)
        self.forget()

    def gradients(self) -> list[Tensor]:
        """Of this rank's lookups, if there were any."""
        return [] if self._buffer is None else [self._buffer]

    def forget(self) -> None:
        """Drop the gradients."""
        if self._buffer is not None:
            self._buffer.zero_()

    @property
    def buffer_bytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.nbytes

    def _views(self) -> tuple[Tensor, Tensor | None]:
        """The summed gradients [rows, width]; and which rows were touched, if the rule must know.

        To skip the rows that were not costs a GPU a look at how many there are, so rules that
        leave a row with a zero gradient as it is are given all of them.
        """
        size = self._rows * self.width
        needs_touched = not self.rule.ignores_zeros
        if self._buffer is None:
            elements = size + needs_touched * self._rows
            self._buffer = torch.zeros(elements, device=self.weight.device)
        gradient = self._buffer[:size].view(self._rows, self.width)
        return gradient, self._buffer[size:] if needs_touched else None
