"""The engine of one device in which lookup and interaction are one kernel, and tables any format.

Large tables may be stored in 16 or 8 bits, with stochastic rounding; small ones stay fp32.
A row is read three times and written once in a step: by the forward pass, by the backward pass,
which reads it again rather than keep a copy, and by the update.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainmark.embeddings.engine import EmbeddingEngine, Interaction
from trainmark.embeddings.tables.batch import IdGroup, gradient, joined
from trainmark.embeddings.tables.formats import LARGEST_INT32, Formats
from trainmark.embeddings.tables.row_update import Settings
from trainmark.embeddings.tables.store import TableStore, table_names, whole_table, whole_tables
from trainmark.embeddings.tables.update import UpdateRule
from trainmark.kernels.gather_interaction import gather_interaction
from trainmark.kernels.gather_rows import gather_rows
from trainmark.kernels.interaction import dot_interaction
from trainmark.kernels.sparse_update import SortedRows, sort_rows, sort_rows_of_two
from trainmark.kernels.table_formats import Tables
from trainmark.training.transfer import used_here


@dataclass(frozen=True)
class PreparedIds:
    """A micro-batch's ids, and what its update needs to know of them."""

    ids_BF: Tensor
    """Rows of the store that the feature is in."""
    batches: list[SortedRows]
    """One per store."""

    @property
    def num_gradients(self) -> int:
        """Rows that collect the gradient."""
        return self.ids_BF.numel()

    def tensors(self) -> list[Tensor]:
        sorted_rows = [t for batch in self.batches for t in (batch.rows_N, batch.places_N)]
        return [self.ids_BF, *sorted_rows]


class FusedEngine(nn.Module, EmbeddingEngine):
    """Whole tables of one width on one device.

    Args:
        table_rows: rows of each table; categorical feature i looks up table i.
        dim: width of a row.
        rule: how rows are updated.
        formats: how tables are stored; of at most two kinds, see `kernels.table_formats`.
        dtype: in which `lookup` returns rows, the compute dtype.
    """

    updates: Tensor
    works_in_graphs = True

    def __init__(
        self,
        table_rows: Sequence[int],
        dim: int,
        rule: UpdateRule,
        formats: Formats,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.sent_bytes: dict[str, int] = {}
        names = table_names(len(table_rows))
        parts = [whole_table(n, rows, dim) for n, rows in zip(names, table_rows, strict=True)]
        kinds = list(dict.fromkeys(formats.of_tables))
        self._features = [
            [i for i, used in enumerate(formats.of_tables) if used == kind] for kind in kinds
        ]
        self.stores = nn.ModuleList(
            TableStore(
                [parts[i] for i in features],
                dim,
                rule,
                kind,
                formats.state_dtype,
                formats.rounding(number, len(kinds)),
            )
            for number, (kind, features) in enumerate(zip(kinds, self._features, strict=True))
        )
        # Counts steps: rounding draws other bits in each, and the same after a resumption.
        self.register_buffer(
            "updates", torch.empty((), dtype=torch.int32, device="meta"), persistent=False
        )
        self._rounds = formats.rounds
        self._constants: _Constants | None = None
        self._looked_up: list[Any] = []
        self._gradient_rows: dict[int, Tensor] = {}
        """Of each micro-batch, flat."""

    # --- forward

    def prepare(self, groups: Sequence[IdGroup], samples: Sequence[int]) -> Any:
        constants = self._on_device()
        starts, places_F = constants.of_groups(groups)
        ids_FB = joined(
            [group.ids + start_K1 for group, start_K1 in zip(groups, starts, strict=True)]
        )
        ids_BF = ids_FB.t()
        ids_BF = ids_BF.contiguous() if places_F is None else ids_BF.index_select(1, places_F)
        return PreparedIds(ids_BF, constants.sorted_rows(ids_BF) if torch.is_grad_enabled() else [])

    def begin(self, prepared: Any) -> None:
        """In training, note what the update will need."""
        used_here(prepared.tensors())
        if torch.is_grad_enabled():
            self._looked_up.append(prepared)

    def lookup(self, prepared: Any) -> Tensor:
        """In training, of the latest ids that were begun."""
        rows_BFD = gather_rows(prepared.ids_BF, self._tables(), self.dtype)
        if torch.is_grad_enabled():
            number = len(self._looked_up) - 1
            self._gradient_rows.pop(number, None)
            keep = partial(self._keep_gradient, number)
            rows_BFD.requires_grad_().register_post_accumulate_grad_hook(keep)
        return rows_BFD

    def _keep_gradient(self, number: int, rows_BFD: Tensor) -> None:
        grads_BFD = gradient(rows_BFD)
        self._gradient_rows[number] = grads_BFD.reshape(-1)
        self._on_device().finite.mul_(grads_BFD.isfinite().all())

    def lookup_and_interact(
        self, prepared: Any, x_BD: Tensor, plain: Interaction = dot_interaction
    ) -> Tensor:
        """In training, of the latest ids that were begun."""
        ids_BF: Tensor = prepared.ids_BF
        if not torch.is_grad_enabled():
            return gather_interaction(x_BD, ids_BF, self._tables())
        grads_BFD = self._gradient_buffer(
            len(self._looked_up) - 1, (*ids_BF.shape, x_BD.shape[1]), x_BD
        )
        finite = self._on_device().finite
        return gather_interaction(x_BD, ids_BF, self._tables(), grads_BFD, finite)

    def _gradient_buffer(self, number: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Where a micro-batch's gradient rows go: always to the same place, as a graph demands."""
        held = self._gradient_rows.get(number)
        if held is None or held.numel() < math.prod(shape) or held.dtype != like.dtype:
            held = self._gradient_rows[number] = like.new_empty(math.prod(shape))
        return held[: math.prod(shape)].view(shape)

    def _tables(self) -> Tables:
        rows = [store.rows for store in self._stores()]
        if len(rows) == 1:
            return Tables(rows[0])
        return Tables(rows[0], rows[1], self._on_device().in_second_F)

    # --- update

    def gradients(self) -> list[Tensor]:
        """0, or infinite if a gradient is not finite: the backward pass has checked them all."""
        return [1 / self._on_device().finite - 1]

    def rows_in_use(self, prepared: PreparedIds) -> list[Tensor]:
        used_here(prepared.tensors())
        return [gather_rows(prepared.ids_BF, self._tables(), self.dtype)]

    def row_gradients(self) -> list[Tensor]:
        width = self._tables().first.codes.shape[1]
        return [
            self._gradient_rows[number][: prepared.num_gradients * width].view(-1, width)
            for number, prepared in enumerate(self._looked_up)
        ]

    def forget(self) -> None:
        self._looked_up = []
        self._on_device().finite.fill_(1)

    def apply_gradients(self, lr: float, gate: Tensor, unscale: Tensor | None = None) -> None:
        looked_up, grads_of_micros = self._looked_up, self.row_gradients()
        self.forget()
        if not looked_up:
            return
        settings = Settings(lr=lr, gate=gate, unscale=unscale, updates=self.updates)
        grads = joined(grads_of_micros)
        prepared = looked_up[0] if len(looked_up) == 1 else self._joined(looked_up)
        for store, batch in zip(self._stores(), prepared.batches, strict=True):
            store.update(batch, grads, settings)
        self.updates += 1

    def _joined(self, looked_up: list[PreparedIds]) -> PreparedIds:
        """The lookups of several micro-batches as one."""
        ids_BF = torch.cat([prepared.ids_BF for prepared in looked_up])
        return PreparedIds(ids_BF, self._on_device().sorted_rows(ids_BF))

    # --- state

    def init_weights(self, seed: int, bound: float | None = None) -> None:
        for store in self._stores():
            store.init_weights(seed, bound)

    def create_state(self) -> None:
        for store in self._stores():
            store.create_state()
        self.updates.zero_()

    def table_weights(self) -> dict[str, Tensor]:
        return whole_tables(rows for store in self._stores() for rows in store.part_weights())

    def table_state(self) -> dict[str, Tensor]:
        state = whole_tables(rows for store in self._stores() for rows in store.part_state())
        return state | ({"tables.updates": self.updates} if self._rounds else {})

    def _stores(self) -> list[TableStore]:
        return list(self.stores)  # type: ignore[arg-type]

    def _on_device(self) -> "_Constants":
        if self._constants is None:
            self._constants = _Constants(self._stores(), self._features, self.updates.device)
        return self._constants


class _Constants:
    """Small tensors that every step needs, copied to the device only once."""

    def __init__(
        self, stores: list[TableStore], features: list[list[int]], device: torch.device
    ) -> None:
        starts = {
            feature: start
            for store, own in zip(stores, features, strict=True)
            for feature, start in zip(own, store.starts, strict=False)
        }
        # A sort of int32 takes half the time. Two stores are sorted as one.
        wide = sum(store.starts[-1] for store in stores) > LARGEST_INT32
        dtype = torch.int64 if wide else torch.int32
        in_order = [starts[feature] for feature in range(len(starts))]
        self.starts_F = torch.tensor(in_order, dtype=dtype, device=device)
        self._has_two = len(stores) == 2
        self.in_second_F = torch.zeros(len(starts), dtype=torch.bool, device=device)
        if self._has_two:
            self.in_second_F[features[1]] = True
            self._first_features, self._first_rows = len(features[0]), stores[0].starts[-1]
            self._offsets_F = (self.in_second_F * self._first_rows).to(dtype)
        self.finite = torch.ones((), device=device)
        self._of_groups: dict[Any, tuple[list[Tensor], Tensor | None]] = {}

    def sorted_rows(self, ids_BF: Tensor) -> list[SortedRows]:
        """Of each store."""
        if not self._has_two:
            return [sort_rows(ids_BF)]
        return sort_rows_of_two(ids_BF, self._offsets_F, self._first_features, self._first_rows)

    def of_groups(self, groups: Sequence[IdGroup]) -> tuple[list[Tensor], Tensor | None]:
        """Where the tables of each group start, and the place of each feature among all groups;
        None where that is its own."""
        features = tuple(tuple(group.features) for group in groups)
        if features not in self._of_groups:
            order, device = list(itertools.chain(*features)), self.starts_F.device
            starts = [self.starts_F[group.features][:, None] for group in groups]
            places = torch.tensor(order, device=device).argsort()
            self._of_groups[features] = (starts, None if order == sorted(order) else places)
        return self._of_groups[features]
