"""Tables in host memory: the rows of a batch come to the device before it, and go back after it.

The distinct rows that a batch looks up, with their optimiser state, are prefetched ahead of its
step into a working set on the device; they are looked up and updated there, and written back:

    ahead of the step    prefetch 2                prefetch 3                prefetch 4
    steps                step 1                    step 2                    step 3
    write-back                     write 1                   write 2

A GPU has the host's memory mapped, and its kernels do both over its link (`copy_rows`), each on a
stream of its own. The number of distinct rows never leaves it, so the host does not wait: a working
set has room for as many rows as were looked up, and what is left names no row.

A prefetch runs before the step ahead of it has changed rows, so it may be out of date. So every
working set knows which write-backs it has seen; before it is used, rows of later write-backs are
copied from their working sets. Training is thus exactly that of tables in device memory.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from trainmark.embeddings.tables import row_update
from trainmark.embeddings.tables.mapped import map_to_gpu
from trainmark.embeddings.tables.row_update import Plan, Settings
from trainmark.embeddings.tables.store import (
    PartRows,
    RequestedRows,
    RowHolder,
    TablePart,
    TableStore,
    init_part,
)
from trainmark.embeddings.tables.update import State, UpdateRule
from trainmark.hardware.allocator import use_huge_pages
from trainmark.kernels.copy_rows import read_rows_into, write_rows_from
from trainmark.kernels.sparse_update import SortedRows, sort_rows
from trainmark.kernels.table_formats import Rows
from trainmark.training.transfer import used_here


@dataclass(kw_only=True)
class WorkingSet:
    """Rows of a host store on the device. What it calls rows are its own: 0 to n - 1."""

    rule: UpdateRule
    store_rows: Tensor
    """[n] which rows of the store, ascending; behind the last of them, rows that it has not."""
    places: Tensor
    """Of each id that was looked up, its row here."""
    plan: Plan
    """The same for an update."""
    weight: Tensor
    state: State
    shared_state: State
    """The store's scalars."""
    writes_before: int = 0
    """How many write-backs of the store it has seen."""
    is_taken: bool = False
    """Whether it has been brought up to date: its step may read it."""

    @property
    def rows(self) -> Rows:
        return Rows(self.weight)

    def update(self, plan: Plan, grads: Tensor, settings: Settings) -> None:
        state = self.state | self.shared_state
        row_update.update(self.rule, self.rows, state, plan, grads, settings)

    def update_summed(
        self, rows: Tensor, grads: Tensor, mean_square: Tensor, settings: Settings
    ) -> None:
        row_update.update_summed(
            self.rule, self.weight, self.state, rows, grads, mean_square, settings
        )

    def in_store(self, rows: Tensor) -> Tensor:
        return self.store_rows.index_select(0, rows)

    def take_newer(self, newer: "WorkingSet", beyond: int) -> None:
        """Replace the rows below `beyond` that `newer` has, too, by what it has."""
        count = len(newer.store_rows)
        if count == 0:
            return
        found = torch.searchsorted(newer.store_rows, self.store_rows)
        is_there = newer.store_rows[found.clamp(max=count - 1)] == self.store_rows
        found = torch.where(is_there & (self.store_rows < beyond), found, count)
        read_rows_into(self.weight, newer.weight, found)
        for kind, tensor in self.state.items():
            read_rows_into(tensor, newer.state[kind], found)

    def tensors(self) -> list[Tensor]:
        plan = row_update.plan_tensors(self.plan)
        return [self.store_rows, self.places, *plan, self.weight, *self.state.values()]


def distinct(ids: Tensor, beyond: int) -> tuple[Tensor, Tensor, SortedRows]:
    """The distinct ids in order, without asking how many there are.

    Args:
        ids: [n]
        beyond: larger than all of them; takes the places behind the last one.

    Returns:
        [n] distinct ids; [n] the place of each id among them; those places, sorted.
    """
    in_order = sort_rows(ids[:, None])
    sorted_ids = in_order.rows_N
    is_new = torch.ones_like(sorted_ids)
    is_new[1:] = (sorted_ids[1:] != sorted_ids[:-1]).to(is_new)
    places = is_new.cumsum(0) - 1
    found = torch.full_like(sorted_ids, beyond).scatter_(0, places, sorted_ids)
    of_each = torch.empty_like(places).scatter_(0, in_order.places_N, places)
    return found, of_each, SortedRows(places, in_order.places_N)


def _requested(working: WorkingSet) -> RequestedRows:
    return RequestedRows(rows=working.places, plan=working.plan, holder=working)


def _working(requested: RequestedRows) -> WorkingSet:
    return cast(WorkingSet, requested.holder)


class HostStore(TableStore):
    """A store in host memory whose rows are computed with on `device`."""

    def __init__(
        self, parts: Sequence[TablePart], width: int, rule: UpdateRule, device: torch.device
    ) -> None:
        super().__init__(parts, width, rule)
        self._device = device
        self._writing: Any = None
        """The stream of write-backs, once there is one; a CPU needs none."""
        self._written_event: Any = None
        self._writes = 0
        self._written: deque[tuple[int, WorkingSet]] = deque()
        """Write-backs that pending prefetches have not seen, by number."""
        self._unused: Counter[int] = Counter()
        """Pending prefetches, by `writes_before`."""

    def _apply(self, *_: Any, **__: Any) -> "HostStore":
        return self  # the host keeps it, wherever the model moves

    # --- prefetch

    @torch.no_grad()
    def request(self, ids: Tensor, places: Tensor | None = None) -> RequestedRows:
        """Begin to copy the rows of `ids` to the device, on the current stream."""
        beyond = self.starts[-1]
        if places is None:
            rows, of_ids, plan = distinct(ids, beyond)
        else:
            rows, of_ids, _ = distinct(torch.where(ids < 0, beyond, ids), beyond)
            of_ids = torch.where(ids < 0, -1, of_ids)
        has_kernel = row_update.has_kernel(self.rule, ids)
        if self._written_event is not None:
            self._written_event.wait()
        self._unused[self._writes] += 1
        of_rows = {k: t for k, t in self.optimizer_state.items() if t.dim() > 0}
        working = WorkingSet(
            rule=self.rule,
            store_rows=rows,
            places=of_ids,
            plan=plan if has_kernel and places is None else self.plan_update(of_ids, places),
            weight=self._prefetched(self.weight, rows),
            state={kind: self._prefetched(tensor, rows) for kind, tensor in of_rows.items()},
            shared_state=self.scalar_state(),
            writes_before=self._writes,
        )
        return _requested(working)

    def _prefetched(self, table: Tensor, rows: Tensor) -> Tensor:
        prefetched = torch.empty(len(rows), *table.shape[1:], dtype=table.dtype, device=rows.device)
        read_rows_into(prefetched, table, rows)
        return prefetched

    def take(self, requested: RequestedRows) -> None:
        working = _working(requested)
        if working.is_taken:
            return
        working.is_taken = True
        used_here(working.tensors())
        for number, written in self._written:
            if number > working.writes_before:
                working.take_newer(written, self.starts[-1])
        self._unused[working.writes_before] -= 1
        self._unused += Counter()  # drops what is zero
        self._forget_old()

    # --- write-back

    def joined(
        self, requests: Sequence[RequestedRows], places: Tensor | None = None
    ) -> RequestedRows:
        sets = [_working(requested) for requested in requests]
        rows, new, _ = distinct(torch.cat([s.store_rows for s in sets]), self.starts[-1])

        def spread(tensors: list[Tensor]) -> Tensor:
            together = torch.cat(tensors)
            # A row of several micro-batches is the same in all: any may be the last to be written.
            return torch.empty_like(together).index_put((new,), together)

        parts = new.split([len(s.store_rows) for s in sets])
        of_ids = torch.cat([part[s.places] for part, s in zip(parts, sets, strict=True)])
        if places is not None:
            of_ids = torch.where(torch.cat([s.places for s in sets]) < 0, -1, of_ids)
        working = WorkingSet(
            rule=self.rule,
            store_rows=rows,
            places=of_ids,
            plan=self.plan_update(of_ids, places),
            weight=spread([s.weight for s in sets]),
            state={kind: spread([s.state[kind] for s in sets]) for kind in sets[0].state},
            shared_state=sets[0].shared_state,
        )
        return _requested(working)

    @torch.no_grad()
    def write_back(self, holder: RowHolder) -> None:
        """Begin to copy updated rows to host memory."""
        working = cast(WorkingSet, holder)
        self._writes += 1
        self._written.append((self._writes, working))
        self._forget_old()
        with self._on_writing_stream():
            used_here(working.tensors())
            write_rows_from(working.weight, self.weight, working.store_rows)
            for kind, tensor in working.state.items():
                write_rows_from(tensor, self.optimizer_state[kind], working.store_rows)
            if self._writing is not None:
                self._written_event = torch.Event(device=self._device)
                self._written_event.record()

    def _forget_old(self) -> None:
        """Drop write-backs that all pending prefetches have seen."""
        oldest = min(self._unused, default=self._writes)
        while self._written and self._written[0][0] <= oldest:
            self._written.popleft()

    def flush(self) -> None:
        """Wait until host memory has all updates."""
        if self._writing is not None:
            self._writing.synchronize()

    def _on_writing_stream(self) -> AbstractContextManager[Any]:
        """Behind what the current stream has done so far; a CPU has no streams."""
        if self._device.type in ("cpu", "meta"):
            return nullcontext()
        if self._writing is None:
            self._writing = torch.Stream(device=self._device)
        self._writing.wait_stream(torch.accelerator.current_stream(self._device))
        return cast(AbstractContextManager[Any], self._writing)

    # --- state

    @torch.no_grad()
    def init_weights(self, seed: int, bound: float | None = None) -> None:
        self.weight = torch.empty(self.weight.shape)
        use_huge_pages(self.weight)
        map_to_gpu(self.weight, self._device, owner=self)
        for part, _, weight in super().part_weights():
            init_part(part, weight, seed, bound=bound, draw_on=self._device)

    def create_state(self) -> None:
        super().create_state()
        for kind, tensor in self.optimizer_state.items():
            if tensor.dim() == 0:  # which the rule uses on the device
                self.optimizer_state[kind] = tensor.to(self._device)
            else:
                map_to_gpu(tensor, self._device, owner=self)

    def part_weights(self) -> Iterator[PartRows]:
        self.flush()
        return super().part_weights()

    def part_state(self) -> Iterator[PartRows]:
        self.flush()
        return super().part_state()
