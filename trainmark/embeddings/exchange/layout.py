"""How much goes where for one micro-batch, and how what comes back is put in order."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainmark.embeddings.exchange.buckets import Bucketed
from trainmark.embeddings.exchange.routes import Routes, StoreParts
from trainmark.embeddings.tables.batch import joined
from trainmark.kernels.pool_rows import BagBlock, Bags


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Ids that one rank sent for one store, and the elements of their rows in the buffer."""

    store: int
    ids: slice
    """Among all ids that this rank has received."""
    rows: slice
    """Among all elements that this rank sends back."""
    bags: Bags | None = None
    """How the ids are added up, if several make a row."""


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
    """[samples * vectors * pieces] where each piece lies in what is received, in units."""
    inverse: Tensor
    """Which piece of [samples, features] rows each unit received is, or is added to."""
    none: int
    """How many of this rank's ids of row-wise tables are none."""
    _gradients: dict[int, Tensor | None] = field(default_factory=dict)

    def ids_of(self, store: int, received: Tensor) -> Tensor:
        """Of all ids that were received, those for one store."""
        ids = joined([received[s.ids] for s in self.segments if s.store == store])
        return ids if ids.is_cuda else ids.long()  # some of torch's CPU operations want 64 bits

    def gradients_of(self, store: int) -> Tensor | None:
        """Of each of these ids, which row of the store's gradients is its own; None: that in the
        same place."""
        if store not in self._gradients:  # a layout may serve many steps
            found, before = [], 0
            for segment in self.segments:
                if segment.store == store and segment.bags is not None:
                    found.append(segment.bags.row_of_id + before)
                    before += segment.bags.num_rows
            self._gradients[store] = joined(found) if found else None
        return self._gradients[store]

    def tensors(self) -> list[Tensor]:
        """All that lies on the device."""
        of_bags = [s.bags.table for s in self.segments if s.bags is not None]
        found = [tensor for tensor in self._gradients.values() if tensor is not None]
        return [self.places, self.inverse, *of_bags, *found]


def bags_by_slot(hotness: Sequence[int], samples: Sequence[int], device: torch.device) -> Bags:
    """For each of `samples`, a block of [slots, samples] ids; what they become is [parts, samples].

    Args:
        hotness: of each part.
    """
    blocks, first_id, first_row = [], 0, 0
    for count in samples:
        for slots in hotness:
            blocks.append(
                BagBlock(
                    first_id=first_id,
                    id_step=count,
                    bag_step=1,
                    hotness=slots,
                    bags=count,
                    first_row=first_row,
                    row_step=1,
                )
            )
            first_id, first_row = first_id + slots * count, first_row + count
    return Bags(blocks, device)


class Layouts:
    """Makes the layouts of one rank."""

    def __init__(self, routes: Routes, rank: int, device: torch.device) -> None:
        self.routes, self._rank, self._device = routes, rank, device
        self._mine = routes.stores[rank]
        self._known: dict[tuple[int, ...], Layout] = {}
        self._vectors: dict[int, Bags] = {}
        cut, vectors = {shard.table for shard in routes.cut_shards()}, routes.vectors()
        of_cut = [vector for vector, feature in enumerate(vectors) if feature in cut]
        self._cut_vectors = torch.tensor(of_cut, dtype=torch.int64, device=device)
        self._features_V = torch.tensor(vectors, dtype=torch.int64, device=device)

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
            sizes = [self._sizes(s, own_samples, counts) for s in stores]
            ids_out.append(sum(ids for ids, _ in sizes))
            rows_in.append(sum(n * s.width for (_, n), s in zip(sizes, stores, strict=True)))
        segments, ids_in, rows_out = self._segments(samples, from_each)
        places = self._places(own_samples, to_each, cut)
        inverse = torch.empty_like(places)
        inverse[places] = self._features_pieces(own_samples)
        return Layout(
            ids_out=ids_out,
            ids_in=ids_in,
            rows_out=rows_out,
            rows_in=rows_in,
            segments=segments,
            places=places,
            inverse=inverse,
            none=0 if cut is None else cut.bucket.numel() - sum(to_each),
        )

    def _sizes(self, store: StoreParts, samples: int, counts: Iterator[int]) -> tuple[int, int]:
        """Ids that a rank sends for a store, and rows that it gets; of row-wise parts, `counts`."""
        if store.cut:
            count = next(counts)
            return count, count
        return self.routes.ids_per_sample(store) * samples, len(store.parts) * samples

    def _bags(self, store: StoreParts, samples: Sequence[int]) -> Bags | None:
        if store.cut or not self.routes.has_bags:
            return None
        hotness = [self.routes.hotness[table] for table in store.tables]
        return bags_by_slot(hotness, samples, self._device)

    def _segments(
        self, samples: Sequence[int], from_each: list[list[int]]
    ) -> tuple[list[Segment], list[int], list[int]]:
        """What every rank requests of this one: segments, and ids and elements per rank."""
        segments, ids_in, rows_out = [], [], []
        ids_end = rows_end = 0
        for rank_samples, cut_counts in zip(samples, from_each, strict=True):
            ids_begin, rows_begin, counts = ids_end, rows_end, iter(cut_counts)
            for index, store in enumerate(self._mine):
                num_ids, num_rows = self._sizes(store, rank_samples, counts)
                ids = slice(ids_end, ids_end + num_ids)
                rows = slice(rows_end, rows_end + num_rows * store.width)
                bags = self._bags(store, [rank_samples])
                segments.append(Segment(store=index, ids=ids, rows=rows, bags=bags))
                ids_end, rows_end = ids.stop, rows.stop
            ids_in.append(ids_end - ids_begin)
            rows_out.append(rows_end - rows_begin)
        if len(self._mine) == 1:  # all ids are for the same store: one lookup serves all ranks
            bags = self._bags(self._mine[0], samples)
            segments = [Segment(store=0, ids=slice(0, ids_end), rows=slice(0, rows_end), bags=bags)]
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
            begin_BR = (buckets[cut.bucket] + cut.place * pieces).t()
            of_pieces = torch.arange(pieces, device=device)
            places_BVP = places_BQ.view(samples, len(self._features_V), pieces)
            places_BVP[:, self._cut_vectors] = begin_BR[:, :, None] + of_pieces
        return places_BQ.flatten()

    def _features_pieces(self, samples: int) -> Tensor:
        """[samples * vectors * pieces] the pieces of features that those of vectors belong to."""
        features, pieces = self.routes.num_features, self.routes.dim // self.routes.unit
        of_samples = torch.arange(samples, device=self._device) * features
        rows_BV = of_samples[:, None] + self._features_V
        of_pieces = torch.arange(pieces, device=self._device)
        return (rows_BV[:, :, None] * pieces + of_pieces).flatten()

    def vectors(self, samples: int) -> Bags:
        """How the vectors of each sample, of whole rows, are added up by feature."""
        if samples not in self._vectors:
            blocks: list[BagBlock] = []
            counts = Counter(self.routes.vectors())
            for feature in range(self.routes.num_features):
                blocks.append(
                    BagBlock(
                        first_id=sum(block.hotness for block in blocks),
                        id_step=1,
                        bag_step=len(self._features_V),
                        hotness=counts[feature],
                        bags=samples,
                        first_row=feature,
                        row_step=self.routes.num_features,
                    )
                )
            self._vectors[samples] = Bags(blocks, self._device)
        return self._vectors[samples]

    def interleaved(self, whole: Tensor, cut: Bucketed, to_each: list[int]) -> Tensor:
        """What each rank gets of both kinds, rank by rank."""
        routes, samples = self.routes, whole.shape[1]
        counts, sizes = iter(to_each), []
        for device in range(routes.devices):
            sizes.append(routes.num_whole(device) * samples)
            sizes.append(sum(next(counts) for _ in range(routes.num_cut(device))))
        wholes = whole.flatten().split(sizes[::2])
        cuts = cut.ids[: sum(to_each)].split(sizes[1::2])
        return torch.cat([part for pair in zip(wholes, cuts, strict=True) for part in pair])
