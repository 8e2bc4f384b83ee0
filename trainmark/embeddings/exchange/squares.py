"""Row-wise Adagrad over column slices: every slice of a row needs the mean square of the whole row.

The ranks that hold slices of a table receive the same ids for it, and so know the same distinct
rows. Each sends the others one number per row, the sum of squares over its own columns; all add
them in the order of the columns, so that their copies of the row's state stay equal to the bit.

On a GPU, where the host would have to wait to learn how many rows are distinct, there is a number
for every lookup instead: zero, but for the first one of a row.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trainmark.embeddings.exchange.all_to_all import Exchange
from trainmark.embeddings.exchange.routes import Routes
from trainmark.embeddings.tables.update import square_sums


@dataclass(frozen=True, kw_only=True)
class _Slice:
    """Some columns of a table, as one part of one store."""

    table: int
    column: int
    store: int
    part: int


class ColumnSquares:
    """Exchanges the sums between the holders of slices."""

    def __init__(self, routes: Routes, rank: int) -> None:
        self._routes = routes
        self._slices = [list(_slices(routes, device)) for device in range(routes.devices)]
        self._tables = [{s.table for s in slices} for slices in self._slices]
        self._rank = rank

    @property
    def needed(self) -> bool:
        """Whether any rank holds a slice, so that all take part."""
        return any(self._slices)

    @property
    def stores(self) -> list[int]:
        """This rank's stores of slices."""
        return sorted({s.store for s in self._slices[self._rank]})

    def means(
        self,
        exchange: Exchange,
        summed: Mapping[int, tuple[Tensor, Tensor]],
        *,
        repeat: bool = False,
    ) -> tuple[dict[int, Tensor], int]:
        """The mean squares of whole rows, for each store of slices; and the bytes sent.

        Args:
            exchange: to the other ranks.
            summed: of each store, the rows in order, and their gradients.
            repeat: whether a row is there as often as it was looked up.
        """
        mine = self._sums(summed, repeat)
        lengths = {s.table: len(sums) for s, sums in mine.items()}
        ranks = range(self._routes.devices)
        sent = [[sums for s, sums in mine.items() if s.table in self._tables[r]] for r in ranks]
        shared = [[s for s in self._slices[r] if s.table in lengths] for r in ranks]
        sizes_in = [[lengths[s.table] for s in of_rank] for of_rank in shared]
        parts = [sums for of_rank in sent for sums in of_rank]
        pending = exchange.start(
            torch.cat(parts) if parts else torch.empty(0, device=exchange.device),
            [sum(map(len, of_rank)) for of_rank in sent],
            [sum(of_rank) for of_rank in sizes_in],
        )
        received = pending.wait().split([size for of_rank in sizes_in for size in of_rank])
        totals: dict[int, Tensor] = {}
        found = zip((s for of_rank in shared for s in of_rank), received, strict=True)
        for s, sums in sorted(found, key=lambda pair: (pair[0].table, pair[0].column)):
            totals[s.table] = totals[s.table] + sums if s.table in totals else sums
        widths = self._routes.widths
        means = {
            store: torch.cat([totals[s.table] / widths[s.table] for s in mine if s.store == store])
            for store in self.stores
        }
        return means, pending.sent_bytes

    def _sums(
        self, summed: Mapping[int, tuple[Tensor, Tensor]], repeat: bool
    ) -> dict[_Slice, Tensor]:
        """The sums of squares of this rank's slices."""
        found = {}
        for store, (rows, grads) in summed.items():
            bounds = self._bounds(store, rows, repeat)
            sums = square_sums(grads)
            for s in self._slices[self._rank]:
                if s.store == store:
                    found[s] = sums[bounds[s.part] : bounds[s.part + 1]]
        return found

    def _bounds(self, store: int, rows: Tensor, repeat: bool) -> list[int]:
        """Where the rows of each part begin, and the last ones end."""
        starts = self._routes.stores[self._rank][store].starts
        if repeat and not self._routes.has_bags:  # every sample looks up a row of every part
            return [len(rows) // (len(starts) - 1) * part for part in range(len(starts))]
        return torch.searchsorted(rows, torch.tensor(starts).to(rows.device)).tolist()


def _slices(routes: Routes, device: int) -> Iterator[_Slice]:
    for index, store in enumerate(routes.stores[device]):
        for place, (part, table) in enumerate(zip(store.parts, store.tables, strict=True)):
            if part.width < routes.widths[table]:
                yield _Slice(table=table, column=part.columns[0], store=index, part=place)
