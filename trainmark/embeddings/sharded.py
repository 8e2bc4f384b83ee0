"""The embedding engine of many ranks: tables model-parallel, samples data-parallel.

Every rank holds parts of tables (`exchange/stores.py`) and looks up rows for its own samples:

    prepare   ahead of the step    ids to the ranks that hold their rows           all-to-all
    begin     forward              rows back, in the compute dtype, while the
                                   bottom MLP runs                                 all-to-all
    backward                       gradients of rows, in the compute dtype, while
                                   the bottom MLP's backward pass runs             all-to-all
    apply                          each rank updates the rows that it holds        nothing

There is one all-to-all for all tables, whatever their sharding. Ids travel on a process group of
their own, so that those of the next batch never queue behind this step. Where tables are row-wise,
how many ids go where depends on the ids: the counts are exchanged first, and `prepare` reads them
on the host. Nothing else in the exchange makes the host wait for a GPU.

What a rank receives for its samples lies in the order of the senders' stores, in pieces that always
travel together (`unit`): whole rows, or the common divisor of column slices. The kernel of the
interaction reads each piece from where it lies, and leaves its gradient in the same place of what
is sent back. Where it cannot (a CPU without numba; slices on a GPU), one `index_select` puts rows
in the order of samples and features, and its inverse serves the gradients.

Tables that are not fp32 lie in stores of their own, and their rows travel like all others. Updates
are those of one process, but for the order of additions and, below 32 bits, the bits of rounding.
Row-wise Adagrad needs the mean over all columns of a row: `squares.py`.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainmark.distributed.mesh import Mesh, all_reduce_sent_bytes
from trainmark.embeddings.engine import EmbeddingEngine, Interaction
from trainmark.embeddings.exchange.buckets import Bucketed
from trainmark.embeddings.exchange.connection import Connection
from trainmark.embeddings.exchange.routes import Routes
from trainmark.embeddings.exchange.row_exchange import RequestedRows, RowExchange
from trainmark.embeddings.exchange.squares import ColumnSquares
from trainmark.embeddings.exchange.stores import RankTables
from trainmark.embeddings.placement.placement import Placement
from trainmark.embeddings.tables.batch import IdGroup, gradient, joined
from trainmark.embeddings.tables.formats import Formats
from trainmark.embeddings.tables.host import HostStore
from trainmark.embeddings.tables.row_update import (
    LookedUpRows,
    Settings,
    plan_update,
    summed_rows,
)
from trainmark.embeddings.tables.update import RowwiseAdagrad, UpdateRule
from trainmark.kernels.compiled import is_compiled_for
from trainmark.kernels.gather_interaction import gather_interaction
from trainmark.kernels.gather_rows import gather_rows_into
from trainmark.kernels.interaction import dot_interaction
from trainmark.kernels.pool_rows import Bags, pool_rows
from trainmark.kernels.sparse_update import SortedRows
from trainmark.kernels.table_formats import Rows, Tables
from trainmark.training.transfer import used_here

INT32_ROWS = 2**31


class ShardedEngine(RankTables, EmbeddingEngine):
    """Tables spread over ranks.

    Args:
        placement: who holds what.
        table_rows: rows of each table; categorical feature i looks up table i.
        dim: width of a row; zeros follow the rows of a table that is narrower by the placement.
        rule: how rows are updated.
        mesh: this rank's place among all.
        dtype: in which rows and gradients travel, the compute dtype.
        hotness: ids of each feature, which are added up; None: one of each.
        formats: how tables are stored; None: in fp32. Others have all columns of a row in one
            place, in a device's memory, and are not replicated.
        force_exchange: talk to oneself through a process group where there is nobody else.
    """

    def __init__(
        self,
        placement: Placement,
        table_rows: Sequence[int],
        dim: int,
        rule: UpdateRule,
        mesh: Mesh,
        dtype: torch.dtype,
        *,
        hotness: Sequence[int] | None = None,
        formats: Formats | None = None,
        force_exchange: bool = False,
    ) -> None:
        formats = formats or Formats(of_tables=["fp32"] * len(table_rows))
        routes = Routes(placement, table_rows, dim, hotness, formats.of_tables)
        super().__init__(routes, mesh.dp_rank, rule, formats, mesh.device)
        self._vectors = self.routes.vectors()
        self.mesh, self.dtype = mesh, dtype
        self._rank, self._force = mesh.dp_rank, force_exchange
        self._mine = self.routes.stores[self._rank]
        kinds = ("ids", "counts", "rows", "gradients", "squares", "replicas")
        self.sent_bytes: Counter[str] = Counter(dict.fromkeys(kinds, 0))
        self._ids_type = torch.int32 if self.routes.max_rows < INT32_ROWS else torch.int64
        squares = ColumnSquares(self.routes, self._rank)
        needs_squares = isinstance(rule, RowwiseAdagrad) and squares.needed
        self._squares = squares if needs_squares else None
        self._sliced = squares.stores if needs_squares else []
        self._connected: Connection | None = None
        self._looked_up: list[RowExchange] = []
        self._on_gpu = mesh.device.type == "cuda"
        is_compiled = is_compiled_for(mesh.device, dtype)
        self._reads_in_place = is_compiled or (self._on_gpu and self.routes.unit == dim)
        self._reads_in_place &= len(self._vectors) == self.routes.num_features
        # On a GPU a stream waits for the ids, else the host: worth it to prefetch rows from it.
        on_host = any(isinstance(store, HostStore) for store in self.stores)
        self._requests_ahead = self._on_gpu or on_host
        # No size may depend on the ids, and no store may track its writes or touched rows.
        tracks = bool(self.replicas.parts) and not rule.ignores_zeros
        is_static = not (self.routes.cut_stores or on_host or self._squares or tracks)
        # On several ranks, every step counts the bytes sent; graphs of that are untried.
        alone = self.routes.devices == 1
        self.works_in_graphs = alone and self._on_gpu and is_static and rule.kernel is not None

    # --- ids, ahead of the step

    def prepare(self, groups: Sequence[IdGroup], samples: Sequence[int]) -> RowExchange:
        connected = self._connect()
        own_samples = samples[self._rank]
        ids_SB = connected.join(groups, own_samples)
        whole = connected.whole_rows(ids_SB)
        sent_bytes: Counter[str] = Counter()
        if connected.buckets is None:
            layout = connected.layouts.of_whole_rows(tuple(samples))
            sent = whole.flatten()
        else:
            cut = connected.buckets.sort(ids_SB)
            to_each, from_each, sent_bytes["counts"] = self._exchange_counts(cut)
            layout = connected.layouts.layout(samples, to_each, from_each, cut)
            sent = connected.layouts.interleaved(whole, cut, to_each)
        ids = connected.ids.start(sent, layout.ids_out, layout.ids_in)
        sent_bytes["ids"] = ids.sent_bytes
        replica_ids = connected.replica_rows(ids_SB).flatten().long()
        bags = connected.replica_bags(own_samples)
        places = None if bags is None else bags.row_of_id
        learns = torch.is_grad_enabled()
        plan = plan_update(self.rule, replica_ids, places) if learns else LookedUpRows(replica_ids)
        prepared = RowExchange(
            layout=layout,
            ids=ids,
            sent_ids=sent,
            samples=own_samples,
            replica_ids=replica_ids,
            replica_plan=plan,
            replica_bags=bags,
            sent_bytes=sent_bytes,
        )
        if self._requests_ahead:
            prepared.requested = self._requested(prepared)
        return prepared

    def _requested(self, prepared: RowExchange) -> list[RequestedRows]:
        """What all ranks request of this one, sorted for an update, prefetched from the host."""
        ids, layout = prepared.ids.wait(), prepared.layout
        return [
            store.request(layout.ids_of(index, ids), layout.gradients_of(index))
            for index, store in enumerate(self.stores)
        ]

    def _connect(self) -> Connection:
        """Groups and indices, made when first needed: a dry run has no use for them."""
        if self._connected is None:
            self._connected = Connection(self.routes, self.mesh, self._ids_type, self._force)
        return self._connected

    def _exchange_counts(self, cut: Bucketed) -> tuple[list[int], list[list[int]], int]:
        """How many ids of row-wise tables go to each bucket, and come from each rank; bytes sent.

        The host waits here for the counts of all ranks.
        """
        ranks, mine = self.routes.devices, self.routes.num_cut(self._rank)
        sizes = [self.routes.num_cut(device) for device in range(ranks)]
        exchanged = self._connect().ids.start(cut.counts, sizes, [mine] * ranks)
        both = torch.cat([cut.counts, exchanged.wait()]).tolist()
        to_each, received = both[: sum(sizes)], both[sum(sizes) :]
        from_each = [received[r * mine : (r + 1) * mine] for r in range(ranks)]
        return to_each, from_each, exchanged.sent_bytes

    # --- rows, forward

    def _take_rows(self, prepared: RowExchange) -> None:
        """Rows that are requested of this rank are at hand, and up to date."""
        if not self._requests_ahead:
            prepared.requested = self._requested(prepared)
        used_here(prepared.prepared_tensors())
        for store, requested in zip(self.stores, prepared.requested, strict=True):
            store.take(requested)

    def begin(self, prepared: RowExchange) -> None:
        layout = prepared.layout
        self._take_rows(prepared)
        ids = prepared.ids.received  # `_requested` has waited for them
        size = sum(layout.rows_in)
        of_replicas = self._replica_elements(prepared)
        lacking = prepared.samples * self.routes.lacking + layout.none * self.routes.dim
        received = ids.new_empty(size + of_replicas + lacking, dtype=self.dtype)
        # With nobody to talk to, what would be sent is received already.
        alone = self._connect().group is None
        rows = received[:size] if alone else received.new_empty(sum(layout.rows_out))
        self._read_rows(prepared, rows)
        into = rows if alone else received[:size]
        exchange = self._connect().rows
        prepared.rows = exchange.start(rows, layout.rows_out, layout.rows_in, into=into)
        self._read_replicas(prepared, received[size : size + of_replicas])
        if lacking:
            received[-lacking:].zero_()
        prepared.received = received

    def _read_rows(self, prepared: RowExchange, rows: Tensor) -> None:
        """What all ranks request of this one, in the order in which it is sent."""
        begins = [0] * len(self.stores)
        for segment in prepared.layout.segments:
            requested, begin = prepared.requested[segment.store], begins[segment.store]
            end = begin + segment.ids.stop - segment.ids.start
            part = rows[segment.rows].view(-1, self._mine[segment.store].width)
            listed = requested.rows[begin:end]
            _read(requested.holder.rows, listed, segment.bags, part)
            begins[segment.store] = end

    def _read_replicas(self, prepared: RowExchange, rows: Tensor) -> None:
        """Of replicated tables, what this rank's samples need."""
        into = rows.view(-1, self.routes.dim)
        if len(into):
            _read(self.replicas.rows, prepared.replica_ids, prepared.replica_bags, into)

    def _replica_elements(self, prepared: RowExchange) -> int:
        """Of the rows of replicated tables that a micro-batch has."""
        return len(self.routes.replicas.parts) * prepared.samples * self.routes.dim

    def lookup_and_interact(
        self, prepared: RowExchange, x_BD: Tensor, plain: Interaction = dot_interaction
    ) -> Tensor:
        if self._reads_in_place:
            return self._interact_in_place(prepared, x_BD)
        return super().lookup_and_interact(prepared, x_BD, plain)

    def _interact_in_place(self, prepared: RowExchange, x_BD: Tensor) -> Tensor:
        """Read rows from where they were received, and leave gradients in the same places."""
        received = self._received_rows(prepared)
        pieces = self.routes.num_features * self.routes.dim // self.routes.unit
        places_BQ = prepared.layout.places.view(prepared.samples, pieces)
        tables = Tables(Rows(received.view(-1, self.routes.unit)))
        if not torch.is_grad_enabled():
            return gather_interaction(x_BD, places_BQ, tables)
        rows = tables.first.codes
        grads = torch.empty_like(rows) if self._on_gpu else rows
        # As soon as the interaction's backward pass is done, before the bottom MLP's.
        x_BD.register_hook(lambda _: self._send_gradients(prepared, grads.view(-1)))
        finite = self._connect().finite
        return gather_interaction(x_BD, places_BQ, tables, grads, finite, at_rows=True)

    def lookup(self, prepared: RowExchange) -> Tensor:
        """[B, F, D] rows of this rank's samples. In training, the result collects the gradient."""
        units, places = self._received_rows(prepared), prepared.layout.places
        rows_BFD = self._by_feature(units.view(-1, self.routes.unit), places, prepared.samples)
        if torch.is_grad_enabled():
            # As soon as the interaction's backward pass is done, before the bottom MLP's.
            rows_BFD.requires_grad_().register_post_accumulate_grad_hook(
                lambda rows: self._send_gradients(prepared, self._as_received(prepared, rows))
            )
        return rows_BFD

    def _by_feature(self, units: Tensor, places: Tensor, samples: int) -> Tensor:
        """[B, F, D] put together from what was received, the vectors of each feature added up."""
        features, dim = self.routes.num_features, self.routes.dim
        if len(self._vectors) == features:
            return units.index_select(0, places).view(samples, features, dim)
        if self.routes.unit < dim:
            vectors = units.index_select(0, places).view(-1, dim)
            units, places = vectors, torch.arange(len(vectors), device=places.device)
        rows_BFD = units.new_empty(samples, features, dim)
        bags = self._connect().layouts.vectors(samples)
        pool_rows(places, bags, Tables(Rows(units)), rows_BFD.view(-1, dim))
        return rows_BFD

    def _received_rows(self, prepared: RowExchange) -> Tensor:
        if prepared.rows is None or prepared.received is None:
            raise RuntimeError("Call `begin` before reading rows, and read them only once.")
        prepared.rows.wait()
        if torch.is_grad_enabled():
            self._looked_up.append(prepared)
            self.sent_bytes.update(prepared.sent_bytes, rows=prepared.rows.sent_bytes)
        received, prepared.rows, prepared.received = prepared.received, None, None
        return received

    # --- gradients, backward

    def _as_received(self, prepared: RowExchange, rows_BFD: Tensor) -> Tensor:
        """The gradients in the order in which the rows came."""
        prepared.in_order = gradient(rows_BFD)
        units, inverse = prepared.in_order.reshape(-1, self.routes.unit), prepared.layout.inverse
        in_order = units.new_empty(len(inverse), self.routes.unit)
        gather_rows_into(in_order, inverse, Tables(Rows(units)))
        return in_order.view(-1)

    def _send_gradients(self, prepared: RowExchange, grads: Tensor) -> None:
        layout = prepared.layout
        size, replicas = sum(layout.rows_in), self._replica_elements(prepared)
        sent, of_replicas = grads[:size], grads[size : size + replicas]
        prepared.gradients = self._connect().rows.start(sent, layout.rows_in, layout.rows_out)
        self.sent_bytes["gradients"] += prepared.gradients.sent_bytes
        if len(prepared.replica_ids):
            rows = of_replicas.view(-1, self.routes.dim)
            self.replicas.add_gradients(prepared.replica_ids, prepared.replica_plan, rows)

    def gradients(self) -> list[Tensor]:
        """Of rows read in place, 0, or infinite if one is not: the kernel has checked."""
        in_order = [p.in_order for p in self._looked_up if p.in_order is not None]
        return in_order or [1 / self._connect().finite - 1]

    def rows_in_use(self, prepared: RowExchange) -> list[Tensor]:
        self._take_rows(prepared)
        rows = prepared.replica_ids.new_empty(sum(prepared.layout.rows_out), dtype=self.dtype)
        of_replicas = rows.new_empty(self._replica_elements(prepared))
        self._read_rows(prepared, rows)
        self._read_replicas(prepared, of_replicas)
        return [rows, of_replicas]

    def row_gradients(self) -> list[Tensor]:
        of_stores = [
            self._received(store, prepared)
            for store in range(len(self.stores))
            for prepared in self._looked_up
        ]
        return [*of_stores, *self.replicas.gradients()]

    def forget(self) -> None:
        self._looked_up = []
        self.replicas.forget()
        if self._reads_in_place:
            self._connect().finite.fill_(1)

    def apply_gradients(self, lr: float, gate: Tensor, unscale: Tensor | None = None) -> None:
        looked_up, self._looked_up = self._looked_up, []
        if not looked_up:
            return
        if self._reads_in_place:
            self._connect().finite.fill_(1)
        if gate.device.type == "cpu" and not gate:  # here asking costs nothing
            self.replicas.forget()
            return
        settings = Settings(lr=lr, gate=gate, unscale=unscale, updates=self.updates)
        summed = self._sum_replicas()
        for index in [i for i in range(len(self.stores)) if i not in self._sliced]:
            requested, grads = self._collected(index, looked_up)
            requested.holder.update(requested.plan, grads, settings)
            self.stores[index].write_back(requested.holder)
        if self._squares is not None:
            self._update_slices(self._squares, looked_up, settings)
        if self.replicas.parts:
            if summed is not None:
                summed.wait()
            self.replicas.apply_sum(settings)
        if self.updates is not None:
            self.updates += 1

    def _update_slices(
        self, squares: ColumnSquares, looked_up: list[RowExchange], settings: Settings
    ) -> None:
        """Row-wise Adagrad where a row's columns lie on several ranks; all take part."""
        holders, summed, in_store, repeat = {}, {}, {}, False
        for index in self._sliced:
            requested, grads = self._collected(index, looked_up)
            rows, grads = summed_rows(requested.plan, grads, settings)
            holders[index], summed[index] = requested.holder, (rows, grads)
            in_store[index] = (requested.holder.in_store(rows), grads)
            repeat = isinstance(requested.plan, SortedRows)
        means, sent_bytes = squares.means(self._connect().rows, in_store, repeat=repeat)
        self.sent_bytes["squares"] += sent_bytes
        for index, (rows, grads) in summed.items():
            holders[index].update_summed(rows, grads, means[index], settings)
            self.stores[index].write_back(holders[index])

    def _collected(self, index: int, looked_up: list[RowExchange]) -> tuple[RequestedRows, Tensor]:
        """Rows of a store and their gradients, of all micro-batches and ranks."""
        requested = [prepared.requested[index] for prepared in looked_up]
        grads = joined([self._received(index, prepared) for prepared in looked_up])
        if len(requested) == 1:
            return requested[0], grads
        return self.stores[index].joined(requested, self._places(index, looked_up)), grads

    def _places(self, index: int, looked_up: list[RowExchange]) -> Tensor | None:
        """Of the rows of a store in several micro-batches: where their gradients are."""
        found, before = [], 0
        for prepared in looked_up:
            places = prepared.layout.gradients_of(index)
            if places is None:
                return None
            found.append(places + before)
            segments = [s for s in prepared.layout.segments if s.store == index]
            before += sum(s.bags.num_rows for s in segments if s.bags is not None)
        return joined(found)

    def _received(self, store: int, prepared: RowExchange) -> Tensor:
        """[n, width] gradient rows of one of this rank's stores, from all ranks."""
        if prepared.gradients is None:
            raise RuntimeError("Rows were looked up in training, but no backward pass came.")
        received = prepared.gradients.wait()
        segments = [s for s in prepared.layout.segments if s.store == store]
        return joined([received[s.rows] for s in segments]).view(-1, self._mine[store].width)

    def _sum_replicas(self) -> Any:
        """Begin to add up the gradients of replicated tables, to go on during the updates."""
        if not self.replicas.parts:
            return None
        work = self.replicas.start_sum(self._connect().group)
        sent = all_reduce_sent_bytes(self.replicas.buffer_bytes, self.routes.devices)
        self.sent_bytes["replicas"] += sent
        return work


def _read(table: Rows, ids: Tensor, bags: Bags | None, into: Tensor) -> None:
    """Write rows, or the sums of bags of them, to a contiguous tensor, in its type."""
    if bags is None:
        gather_rows_into(into, ids, Tables(table))
    else:
        pool_rows(ids, bags, Tables(table), into)
