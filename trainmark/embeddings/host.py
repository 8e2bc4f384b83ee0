"""Tables in host memory: the rows of a batch come to the device before it, and go back after it.

The rows that a batch looks up, with their optimiser state, are fetched ahead of its step into a
working set on the device, through pinned memory; they are looked up and updated there, and written
back. One thread per store does both in the order in which they were asked for:

    main thread     prepare 2      step 1           prepare 3      step 2           ...
    store's thread        fetch 2        write 1          fetch 3        write 2

A batch is prepared while the step before it has yet to change rows, so what is fetched may be out
of date: every working set is numbered by the writes that its fetch comes after, and before it is
used, rows that later writes have changed are taken from the working sets of those. Training is
thus exactly that of tables in device memory.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from trainmark.allocator import use_huge_pages
from trainmark.embeddings.store import TablePart, TableStore, gated, init_part
from trainmark.embeddings.update import RowwiseAdagrad, State, UpdateRule


@dataclass(kw_only=True)
class WorkingSet:
    """Rows of a host store on the device. What it calls rows are its own: 0 to n - 1."""

    rule: UpdateRule
    store_rows: Tensor
    """[n] which rows of the store, ascending."""
    store_rows_on_host: Tensor
    places: Tensor
    """Of each id that was looked up, its row here."""
    weight: Tensor
    state: State
    shared_state: State
    """The store's scalars."""
    ready: Any = None
    """The event after which all of it may be read."""

    def gather_into(self, rows: Tensor, out: Tensor) -> None:
        """Write rows to a contiguous [n, width] tensor, in its type."""
        out.copy_(self.weight.index_select(0, rows))

    def update(self, rows: Tensor, grads: Tensor, lr: float, gate: Tensor) -> None:
        """Change rows, duplicates included, if `gate` is 1. Overwrites `grads`."""
        state = self.state | self.shared_state
        self.rule.update(self.weight, state, rows, gated(grads, gate), lr, gate)

    def update_rows(self, rows: Tensor, grads: Tensor, mean_square: Tensor, lr: float) -> None:
        """Row-wise Adagrad on distinct rows whose mean(g^2) the caller has found."""
        rule = cast(RowwiseAdagrad, self.rule)
        rule.update_rows(self.weight, self.state, rows, grads, mean_square, lr)

    def in_store(self, rows: Tensor) -> Tensor:
        """Which rows of the store these are."""
        return self.store_rows.index_select(0, rows)

    def take_newer(self, newer: "WorkingSet") -> None:
        """Replace the rows that `newer` has, too, by what it has; without asking the host."""
        if len(newer.store_rows) == 0:
            return
        found = torch.searchsorted(newer.store_rows, self.store_rows)
        found.clamp_(max=len(newer.store_rows) - 1)
        is_there = newer.store_rows[found] == self.store_rows

        def chosen(new: Tensor, old: Tensor) -> Tensor:
            mask = is_there if old.dim() == 1 else is_there[:, None]
            return torch.where(mask, new.index_select(0, found), old)

        self.weight = chosen(newer.weight, self.weight)
        self.state = {kind: chosen(newer.state[kind], old) for kind, old in self.state.items()}

    def tensors(self) -> list[Tensor]:
        return [self.store_rows, self.places, self.weight, *self.state.values()]


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A working set on its way."""

    future: "Future[WorkingSet]"
    writes_before: int


class HostStore(TableStore):
    """A store in host memory whose rows are computed with on `device`."""

    def __init__(
        self, parts: Sequence[TablePart], width: int, rule: UpdateRule, device: torch.device
    ) -> None:
        super().__init__(parts, width, rule)
        self._device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="host-tables")
        has_stream = device.type not in ("cpu", "meta")
        self._stream = torch.Stream(device=device) if has_stream else None
        self._writes = 0
        self._writing: deque[Future[None]] = deque()
        self._written: deque[tuple[int, WorkingSet]] = deque()
        """What fetches that are not used yet may have missed, with its number."""
        self._unused: Counter[int] = Counter()
        """How many of them there are, by `writes_before`."""

    def _apply(self, *_: Any, **__: Any) -> "HostStore":
        return self  # the host keeps it, wherever the model moves

    # --- fetching

    def fetch(self, ids: Callable[[], Tensor]) -> Fetched:
        """Begin to bring the rows of `ids`, which is called when it may wait, to the device."""
        self._unused[self._writes] += 1
        made = self._event()
        return Fetched(
            future=self._thread.submit(self._fetch, ids, made), writes_before=self._writes
        )

    @torch.no_grad()
    def _fetch(self, ids: Callable[[], Tensor], made: Any) -> WorkingSet:
        with self._on_own_stream():
            if made is not None:
                made.wait()
            store_rows, places = torch.unique(ids(), return_inverse=True)
            on_host = store_rows.cpu()
            rows_of = {k: t for k, t in self.optimizer_state.items() if t.dim() > 0}
            return WorkingSet(
                rule=self.rule,
                store_rows=store_rows,
                store_rows_on_host=on_host,
                places=places,
                weight=self._to_device(self.weight, on_host),
                state={kind: self._to_device(t, on_host) for kind, t in rows_of.items()},
                shared_state=self.scalar_state(),
                ready=self._event(),
            )

    def _to_device(self, table: Tensor, rows: Tensor) -> Tensor:
        pinned = self._stream is not None
        staged = table.new_empty(len(rows), *table.shape[1:], pin_memory=pinned)
        torch.index_select(table, 0, rows, out=staged)
        return staged.to(self._device, non_blocking=True)

    def take(self, fetched: Fetched) -> WorkingSet:
        """The rows that were fetched, as they are after all updates so far."""
        working = fetched.future.result()
        if working.ready is not None:
            working.ready.wait()
            for tensor in working.tensors():
                tensor.record_stream(torch.accelerator.current_stream())
        for number, written in self._written:
            if number > fetched.writes_before:
                working.take_newer(written)
        self._unused[fetched.writes_before] -= 1
        self._unused += Counter()  # drops what is zero
        self._forget_old()
        return working

    # --- writing back

    def joined(self, sets: Sequence[WorkingSet]) -> WorkingSet:
        """The working sets of several micro-batches as one."""
        if len(sets) == 1:
            return sets[0]
        rows, places = torch.unique(torch.cat([s.store_rows for s in sets]), return_inverse=True)

        def spread(tensors: list[Tensor]) -> Tensor:
            together = torch.cat(tensors)
            # A row of several micro-batches is the same in all: any may be the last to be written.
            return together.new_empty(len(rows), *together.shape[1:]).index_put((places,), together)

        parts = places.split([len(s.store_rows) for s in sets])
        return WorkingSet(
            rule=self.rule,
            store_rows=rows,
            store_rows_on_host=rows.cpu(),
            places=torch.cat([part[s.places] for part, s in zip(parts, sets, strict=True)]),
            weight=spread([s.weight for s in sets]),
            state={kind: spread([s.state[kind] for s in sets]) for kind in sets[0].state},
            shared_state=sets[0].shared_state,
        )

    def write_back(self, working: WorkingSet) -> None:
        """Begin to write updated rows to host memory."""
        while self._writing and self._writing[0].done():
            self._writing.popleft().result()  # raises what went wrong
        self._writes += 1
        self._written.append((self._writes, working))
        self._forget_old()
        self._writing.append(self._thread.submit(self._write, working, self._event()))

    def _write(self, working: WorkingSet, updated: Any) -> None:
        with self._on_own_stream():
            if updated is not None:
                updated.wait()
            targets = [(self.weight, working.weight)]
            targets += [(self.optimizer_state[kind], t) for kind, t in working.state.items()]
            copies = [(table, self._to_host(rows)) for table, rows in targets]
            if self._stream is not None:
                self._stream.synchronize()
            for table, rows in copies:
                table[working.store_rows_on_host] = rows

    def _to_host(self, rows: Tensor) -> Tensor:
        if self._stream is None:
            return rows
        rows.record_stream(self._stream)
        pinned = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        return pinned.copy_(rows, non_blocking=True)

    def _forget_old(self) -> None:
        """Drop what no fetch on its way can have missed."""
        oldest = min(self._unused, default=self._writes)
        while self._written and self._written[0][0] <= oldest:
            self._written.popleft()

    def flush(self) -> None:
        """Wait until host memory has all updates."""
        while self._writing:
            self._writing.popleft().result()

    # --- streams; a CPU has none

    def _on_own_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else self._stream

    def _event(self) -> Any:
        """The present point of the current stream."""
        if self._stream is None:
            return None
        event = torch.Event(device=self._device)
        event.record()
        return event

    # --- state

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        self.weight = torch.empty(self.weight.shape)
        use_huge_pages(self.weight)
        for part, weight in super().part_weights():
            init_part(part, weight, seed, draw_on=self._device)

    def create_state(self) -> None:
        super().create_state()
        for kind, tensor in self.scalar_state().items():  # which the rule uses on the device
            self.optimizer_state[kind] = tensor.to(self._device)

    def part_weights(self) -> Iterator[tuple[TablePart, Tensor]]:
        self.flush()
        return super().part_weights()

    def part_state(self) -> Iterator[tuple[TablePart, str, Tensor]]:
        self.flush()
        return super().part_state()
