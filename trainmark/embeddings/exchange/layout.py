"""How much goes where for one micro-batch, and how what comes back is put in order."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainmark.embeddings.exchange.buckets import Bucketed
from trainmark.embeddings.exchange.routes import Routes
from trainmark.embeddings.tables.batch import joined


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Ids that one rank sent for one store, and the elements of their rows in the buffer."""

    store: int
    ids: slice
    """Among all ids that this rank has received."""
    rows: slice
    """Among all elements that this rank sends back."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How much goes where for a micro-batch, in elements, and how rows are put in order."""

    ids_out: list[int]
    """To each rank."""
    ids_in: list[int]
    rows_out: list[int]
    rows_in: list[int]
    segments: list[Segment]
    places: Tensor
    """[samples * features * pieces] where each piece lies in what is received, in units."""
    inverse: Tensor
    """Where each unit received belongs among the pieces."""

    def ids_of(self, store: int, received: Tensor) -> Tensor:
        """Of all ids that were received, those for one store."""
        ids = joined([received[s.ids] for s in self.segments if s.store == store])
        return ids if ids.is_cuda else ids.long()  # some of torch's CPU operations want 64 bits


class Layouts:
    """Makes the layouts of one rank."""

    def __init__(self, routes: Routes, rank: int, device: torch.device) -> None:
        self.routes, self._rank, self._device = routes, rank, device
        self._mine = routes.stores[rank]
        self._known: dict[tuple[int, ...], Layout] = {}
        cut = sorted({shard.table for shard in routes.cut_shards()})
        self._cut_features = torch.tensor(cut, dtype=torch.int64, device=device)

    def of_whole_rows(self, samples: tuple[int, ...]) -> Layout:
        """Without row-wise tables a layout depends on the number of samples alone."""
        if samples not in self._known:
            self._known[samples] = self.layout(samples, [], [[] for _ in samples], None)
        return self._known[samples]

    def layout(
        self,
        samples: Sequence[int],
        to_each: list[int],
        from_each: list[list[int]],
        cut: Bucketed | None,
    ) -> Layout:
        """The layout of a micro-batch.

        Args:
            samples: of each rank.
            to_each: how many of this rank's ids fall into each bucket of row-wise tables.
            from_each: how many ids each rank sends for each of this rank's buckets.
            cut: this rank's ids of row-wise tables, if there are any.
        """
        routes, own_samples = self.routes, samples[self._rank]
        ids_out, rows_in, counts = [], [], iter(to_each)
        for stores in routes.stores:
            sizes = [next(counts) if s.cut else len(s.parts) * own_samples for s in stores]
            ids_out.append(sum(sizes))
            rows_in.append(sum(n * s.width for n, s in zip(sizes, stores, strict=True)))
        segments, ids_in, rows_out = self._segments(samples, from_each)
        places = self._places(own_samples, to_each, cut)
        inverse = torch.empty_like(places)
        inverse[places] = torch.arange(len(places), device=places.device)
        return Layout(
            ids_out=ids_out,
            ids_in=ids_in,
            rows_out=rows_out,
            rows_in=rows_in,
            segments=segments,
            places=places,
            inverse=inverse,
        )

    def _segments(
        self, samples: Sequence[int], from_each: list[list[int]]
    ) -> tuple[list[Segment], list[int], list[int]]:
        """What every rank asks of this one: segments, and ids and elements per rank."""
        segments, ids_in, rows_out = [], [], []
        ids_end = rows_end = 0
        for rank_samples, cut_counts in zip(samples, from_each, strict=True):
            ids_begin, rows_begin, counts = ids_end, rows_end, iter(cut_counts)
            for index, store in enumerate(self._mine):
                size = next(counts) if store.cut else len(store.parts) * rank_samples
                ids = slice(ids_end, ids_end + size)
                rows = slice(rows_end, rows_end + size * store.width)
                segments.append(Segment(store=index, ids=ids, rows=rows))
                ids_end, rows_end = ids.stop, rows.stop
            ids_in.append(ids_end - ids_begin)
            rows_out.append(rows_end - rows_begin)
        if len(self._mine) == 1:  # all ids are for the same store: one lookup serves all ranks
            segments = [Segment(store=0, ids=slice(0, ids_end), rows=slice(0, rows_end))]
        return segments, ids_in, rows_out

    def _places(self, samples: int, to_each: list[int], cut: Bucketed | None) -> Tensor:
        routes, device = self.routes, self._device
        first, step, buckets = (
            torch.tensor(values, dtype=torch.int64, device=device)
            for values in routes.places(samples, to_each)
        )
        places_BQ = torch.arange(samples, device=device)[:, None] * step + first
        if cut is not None:
            pieces = routes.dim // routes.unit
            features = self._cut_features
            begin_BR = (buckets[cut.bucket] + cut.place * pieces).t()
            of_pieces = torch.arange(pieces, device=device)
            places_BFP = places_BQ.view(samples, routes.num_features, pieces)
            places_BFP[:, features] = begin_BR[:, :, None] + of_pieces
        return places_BQ.flatten()

    def interleaved(self, whole: Tensor, cut: Bucketed, to_each: list[int]) -> Tensor:
        """What each rank gets of both kinds, rank by rank."""
        routes, samples = self.routes, whole.shape[1]
        counts, sizes = iter(to_each), []
        for device in range(routes.devices):
            sizes.append(routes.num_whole(device) * samples)
            sizes.append(sum(next(counts) for _ in range(routes.num_cut(device))))
        wholes = whole.flatten().split(sizes[::2])
        cuts = cut.ids.split(sizes[1::2])
        return torch.cat([part for pair in zip(wholes, cuts, strict=True) for part in pair])
