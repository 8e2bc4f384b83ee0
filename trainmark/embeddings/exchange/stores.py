"""The stores of one rank under a placement: its parts of tables, and replicas of small tables.

A replicated table lies whole on every device. Every rank adds the gradients of its own samples to a
dense buffer; one all-reduce makes them those of the global batch, and each rank applies the same
update to the same rows.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainmark.embeddings.exchange.routes import Routes, StoreParts
from trainmark.embeddings.tables.formats import Formats
from trainmark.embeddings.tables.host import HostStore
from trainmark.embeddings.tables.row_update import Plan, Settings
from trainmark.embeddings.tables.store import TableBytes, TableStore, table_shards, whole_tables
from trainmark.embeddings.tables.update import UpdateRule
from trainmark.kernels.sparse_update import Rule, SortedRows, update_rows
from trainmark.kernels.table_formats import Rows


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
        else:
            ids = plan.rows_N
            grads = grads if plan.places_N is None else grads[plan.places_N]
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


class RankTables(nn.Module):
    """All that one rank holds of tables: rows, optimiser state, and their names in checkpoints.

    Args:
        routes: which parts each rank has.
        rank: this one.
        rule: how rows are updated.
        formats: how tables are stored.
        device: where rows are computed with, those in host memory, too.
    """

    updates: Tensor | None

    def __init__(
        self, routes: Routes, rank: int, rule: UpdateRule, formats: Formats, device: torch.device
    ) -> None:
        super().__init__()
        self.routes, self.rule = routes, rule
        self._formats, self._device = formats, device
        self.stores = self._stores_of(rank)
        self._modules_of_stores = nn.ModuleList(self.stores)
        self.replicas = Replicas(routes.replicas, rule, has_bags=routes.has_bags)
        # Counts steps: rounding draws other bits in each, and the same after a resumption.
        count = torch.empty((), dtype=torch.int32, device="meta") if formats.rounds else None
        self.register_buffer("updates", count, persistent=False)

    def _stores_of(self, rank: int) -> list[TableStore]:
        before = sum(map(len, self.routes.stores[:rank]))
        return [
            self._store(parts, number)
            for number, parts in enumerate(self.routes.stores[rank], start=before)
        ]

    def _store(self, parts: StoreParts, number: int) -> TableStore:
        """One of the stores of all ranks, by its number among them."""
        if parts.memory == "host":
            return HostStore(parts.parts, parts.width, self.rule, self._device)
        rounding = self._formats.rounding(number, sum(map(len, self.routes.stores)))
        return TableStore(
            parts.parts,
            parts.width,
            self.rule,
            parts.table_format,
            self._formats.state_dtype,
            None if parts.table_format == "fp32" else rounding,
        )

    def _all_stores(self) -> list[TableStore]:
        return [*self.stores, *([self.replicas] if self.replicas.parts else [])]

    def init_weights(self, seed: int, bound: float | None = None) -> None:
        for store in self._all_stores():
            store.init_weights(seed, bound)

    def create_state(self) -> None:
        for store in self._all_stores():
            store.create_state()
        if self.updates is not None:
            self.updates.zero_()

    def table_weights(self) -> dict[str, Any]:
        of_stores = table_shards(rows for store in self.stores for rows in store.part_weights())
        return {**of_stores, **whole_tables(self.replicas.part_weights())}

    def table_state(self) -> dict[str, Any]:
        of_stores = table_shards(rows for store in self.stores for rows in store.part_state())
        whole = whole_tables(self.replicas.part_state())
        scalars = {f"tables.{kind}": scalar for kind, scalar in self._all_scalars().items()}
        updates = {} if self.updates is None else {"tables.updates": self.updates}
        return {**of_stores, **whole, **scalars, **updates}

    def _all_scalars(self) -> dict[str, Tensor]:
        """The state that all rows share, of any one store: all have the same."""
        return {k: t for store in self._all_stores() for k, t in store.scalar_state().items()}

    def state_loaded(self) -> None:
        for kind, loaded in self._all_scalars().items():
            for store in self._all_stores():
                store.scalar_state()[kind].copy_(loaded)

    def device_bytes(self) -> TableBytes:
        """Of the fullest device, whether or not anything is allocated."""
        replicas = Replicas(self.routes.replicas, self.rule)
        of_ranks = [
            _bytes_of([*(s for s in stores if not isinstance(s, HostStore)), replicas])
            for stores in map(self._stores_of, range(self.routes.devices))
        ]
        return max(of_ranks, key=lambda found: found.total)


def _bytes_of(stores: list[TableStore]) -> TableBytes:
    weights = optimizer = 0
    for store in stores:
        store.create_state()
        weights += sum(rows.nbytes for _, _, rows in store.part_weights())
        optimizer += sum(rows.nbytes for _, _, rows in store.part_state())
        optimizer += sum(scalar.nbytes for scalar in store.scalar_state().values())
    return TableBytes(weights=weights, optimizer=optimizer)
