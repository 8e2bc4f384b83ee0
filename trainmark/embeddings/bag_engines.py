"""The engines of one device for several ids per feature, whose rows are added up.

What is looked up is a list of ids, a feature after the other. A bag's sum is all that is written of
its rows, and its gradient is read for each of its ids, but written once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainmark.embeddings.engine import EmbeddingEngine, LocalEngine
from trainmark.embeddings.fused import FusedEngine
from trainmark.embeddings.tables.bags import BagLists
from trainmark.embeddings.tables.batch import IdGroup, gradient, joined
from trainmark.embeddings.tables.formats import LARGEST_INT32, Formats
from trainmark.embeddings.tables.row_update import Plan
from trainmark.embeddings.tables.update import UpdateRule
from trainmark.kernels.pool_rows import Bags, pool_rows
from trainmark.kernels.sparse_update import SortedRows, sort_rows
from trainmark.kernels.table_formats import Tables
from trainmark.training.transfer import used_here


class LocalBagEngine(LocalEngine):
    """`LocalEngine` for several ids per feature.

    Args:
        hotness: ids of each feature.
    """

    def __init__(
        self, table_rows: Sequence[int], dim: int, rule: UpdateRule, hotness: Sequence[int]
    ) -> None:
        super().__init__(table_rows, dim, rule)
        self._hotness = list(hotness)
        self._lists: BagLists | None = None

    def prepare(self, groups: Sequence[IdGroup], samples: Sequence[int]) -> Any:
        """The list of rows, its bags, and how many samples have them."""
        (own_samples,) = samples
        if self._lists is None:
            features = len(self._hotness)
            self._lists = BagLists(
                self._hotness,
                self.store.starts[:-1],
                [0] * features,
                features,
                torch.int64,
                self.store.weight.device,
            )
        return (*self._lists.join(groups, own_samples), own_samples)

    def _pooled(self, prepared: Any) -> Tensor:
        ids_N: Tensor
        ids_N, bags, samples = prepared
        used_here([ids_N])
        shape = (samples, len(self._hotness), self.store.width)
        rows_BFD = self.store.weight.new_empty(shape)
        pool_rows(ids_N, bags, Tables(self.store.rows), rows_BFD.view(-1, self.store.width))
        return rows_BFD

    def rows_in_use(self, prepared: Any) -> list[Tensor]:
        """Of each bag, the sum."""
        return [self._pooled(prepared)]

    def lookup(self, prepared: Any) -> Tensor:
        rows_BFD = self._pooled(prepared)
        if torch.is_grad_enabled():
            rows_BFD.requires_grad_()
            self._looked_up.append((prepared, rows_BFD))
        return rows_BFD

    lookup_and_interact = EmbeddingEngine.lookup_and_interact  # no kernel does both

    def _plan(self, looked_up: list[Any]) -> Plan:
        lists = [(ids_N, bags, samples * len(self._hotness)) for ids_N, bags, samples in looked_up]
        return self.store.plan_update(*_joined(lists))


@dataclass(frozen=True)
class PreparedBags:
    """A micro-batch's ids, and what its update needs to know of them."""

    ids_N: Tensor
    bags: Bags
    samples: int
    num_gradients: int
    """Rows that collect the gradient: one for each bag, and one for each dense vector."""
    batches: list[SortedRows]
    """One per store."""

    def tensors(self) -> list[Tensor]:
        sorted_rows = [t for batch in self.batches for t in (batch.rows_N, batch.places_N)]
        return [self.ids_N, *sorted_rows]


class FusedBagEngine(FusedEngine):
    """`FusedEngine` for several ids per feature. The arguments are the same, and:

    Args:
        hotness: ids of each feature.
        varies: whether an id may be -1.
    """

    def __init__(
        self,
        table_rows: Sequence[int],
        dim: int,
        rule: UpdateRule,
        formats: Formats,
        dtype: torch.dtype = torch.float32,
        *,
        hotness: Sequence[int],
        varies: bool = True,
    ) -> None:
        super().__init__(table_rows, dim, rule, formats, dtype)
        self._hotness, self._dim, self._varies = list(hotness), dim, varies
        self._lists: BagLists | None = None
        self._offset = 0
        """Of rows of the second store, so that one sort serves both. One place is left between
        them for the -1s of the second."""

    # --- forward

    def prepare(self, groups: Sequence[IdGroup], samples: Sequence[int]) -> PreparedBags:
        (own_samples,) = samples
        ids_N, bags = self._bag_lists().join(groups, own_samples)
        rows = own_samples * self._vectors
        batches = self._sorted(ids_N, bags.rows_of) if torch.is_grad_enabled() else []
        return PreparedBags(ids_N, bags, own_samples, rows, batches)

    @property
    def _vectors(self) -> int:
        return len(self._hotness) + 1

    def _bag_lists(self) -> BagLists:
        if self._lists is None:
            stores = self._stores()
            starts, offsets = [0] * len(self._hotness), [0] * len(self._hotness)
            if len(stores) > 1:
                self._offset = stores[0].starts[-1] + 1
            for store, offset, features in zip(
                stores, (0, self._offset), self._features, strict=False
            ):
                for feature, start in zip(features, store.starts, strict=False):
                    starts[feature], offsets[feature] = start, offset
            # A sort of int32 takes half the time.
            is_wide = self._offset + stores[-1].starts[-1] > LARGEST_INT32
            dtype = torch.int64 if is_wide else torch.int32
            device = self.updates.device
            self._lists = BagLists(
                self._hotness, starts, offsets, self._vectors, dtype, device, varies=self._varies
            )
        return self._lists

    def _sorted(self, ids_N: Tensor, places_of: Callable[[Tensor], Tensor]) -> list[SortedRows]:
        """Of each store.

        Args:
            places_of: from places in the list to where the gradients of those ids are.
        """
        in_order = sort_rows(ids_N[:, None])
        both = SortedRows(in_order.rows_N, places_of(in_order.places_N), of_bags=True)
        if not self._offset:
            return [both]
        in_first, everywhere = (
            sum(self._hotness[f] for f in features)
            for features in (self._features[0], range(len(self._hotness)))
        )
        border = len(ids_N) // everywhere * in_first
        first = SortedRows(both.rows_N[:border], both.places_N[:border], of_bags=True)
        second = SortedRows(
            both.rows_N[border:] - self._offset, both.places_N[border:], of_bags=True
        )
        return [first, second]

    def _pooled(self, prepared: PreparedBags, dtype: torch.dtype) -> Tensor:
        """[B, F + 1, D], with room for a dense vector before each sample's rows."""
        shape = (prepared.samples, self._vectors, self._dim)
        rows = torch.empty(shape, dtype=dtype, device=prepared.ids_N.device)
        pool_rows(prepared.ids_N, prepared.bags, self._tables(), rows.view(-1, self._dim))
        return rows

    def lookup(self, prepared: Any) -> Tensor:
        """In training, of the latest ids that were begun."""
        (rows_BFD,) = self.rows_in_use(prepared)
        if torch.is_grad_enabled():
            number = len(self._looked_up) - 1

            def keep(rows_BFD: Tensor) -> None:
                grads = torch.nn.functional.pad(gradient(rows_BFD), (0, 0, 1, 0))
                self._keep(number, grads)

            rows_BFD.requires_grad_().register_post_accumulate_grad_hook(keep)
        return rows_BFD

    lookup_and_interact = EmbeddingEngine.lookup_and_interact  # no kernel does both

    def lookup_beside(self, prepared: Any, x_BD: Tensor) -> Tensor:
        """In training, of the latest ids that were begun. No copy is made of rows or gradients."""
        if not torch.is_grad_enabled():
            return self._beside(prepared, x_BD)
        number = len(self._looked_up) - 1
        result_BN: Tensor = _Beside.apply(x_BD, self, prepared, number)
        return result_BN

    def _beside(self, prepared: PreparedBags, x_BD: Tensor) -> Tensor:
        vectors = self._pooled(prepared, x_BD.dtype)
        vectors[:, 0] = x_BD
        return vectors.flatten(1)

    # --- update

    def rows_in_use(self, prepared: Any) -> list[Tensor]:
        """Of each bag, the sum."""
        used_here(prepared.tensors())
        return [self._pooled(prepared, self.dtype)[:, 1:].contiguous()]

    def _keep(self, number: int, grads: Tensor) -> None:
        """The gradients of a micro-batch's vectors."""
        self._gradient_rows[number] = grads.reshape(-1)
        # The sum is not finite if a gradient is not; to look at each one takes twice as long.
        self._on_device().finite.mul_(grads.sum(dtype=torch.float32).isfinite())

    def _joined(self, looked_up: list[Any]) -> Any:
        lists = [(p.ids_N, p.bags, p.num_gradients) for p in looked_up]
        ids_N, places_N = _joined(lists)
        first, gradients = looked_up[0], sum(p.num_gradients for p in looked_up)
        samples = sum(p.samples for p in looked_up)
        batches = self._sorted(ids_N, places_N.__getitem__)
        return PreparedBags(ids_N, first.bags, samples, gradients, batches)


class _Beside(torch.autograd.Function):
    """Rows beside dense vectors, whose gradients come back together."""

    @staticmethod
    def forward(
        ctx: Any, x_BD: Tensor, engine: FusedBagEngine, prepared: PreparedBags, number: int
    ) -> Tensor:
        ctx.engine, ctx.number, ctx.dim = engine, number, x_BD.shape[1]
        return engine._beside(prepared, x_BD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BN: Tensor) -> tuple[Tensor | None, ...]:
        ctx.engine._keep(ctx.number, grad_BN)
        return grad_BN[:, : ctx.dim], None, None, None


def _joined(lists: list[tuple[Tensor, Bags, int]]) -> tuple[Tensor, Tensor]:
    """The ids of several micro-batches, and where their gradients are, joined as well.

    Args:
        lists: ids, bags, and the number of their gradients.
    """
    places, before = [], 0
    for _, bags, gradients in lists:
        places.append(bags.row_of_id + before if before else bags.row_of_id)
        before += gradients
    return joined([ids for ids, _, _ in lists]), joined(places)
