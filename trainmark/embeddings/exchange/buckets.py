"""Row-wise tables: ids sorted by the rank that holds their rows, without asking the host."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from trainmark.embeddings.exchange.routes import Routes


@dataclass(frozen=True, kw_only=True)
class Bucketed:
    """The ids of row-wise features in the order in which they are sent. n ids, N buckets."""

    ids: Tensor
    """[n] rows of the receivers' stores, bucket by bucket; behind them, the ids that are none."""
    counts: Tensor
    """[N] how many fall into each bucket."""
    bucket: Tensor
    """[slots, B] where each id went; N if it is none."""
    place: Tensor
    """[slots, B] its place in its bucket."""


class Buckets:
    """Finds the store of each id of the row-wise features.

    The rows of all row-wise tables are numbered through, so that one search serves all features.
    """

    def __init__(self, routes: Routes, device: torch.device) -> None:
        shards = routes.cut_shards()
        self.features = sorted({shard.table for shard in shards})
        sizes = [routes.table_rows[feature] for feature in self.features]
        begins = itertools.accumulate(sizes, initial=0)
        offsets = dict(zip(self.features, begins, strict=False))
        firsts = [offsets[s.table] + s.first_row for s in shards]

        def on_device(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        self._num_buckets, self._has_bags = len(routes.cut_stores), routes.has_bags
        slots = [(slot, offsets[f]) for f in self.features for slot in routes.slots(f)]
        self._slots = on_device([slot for slot, _ in slots])
        self._offsets = on_device([offset for _, offset in slots])[:, None]
        self._firsts = on_device(firsts)
        self._bucket = on_device([s.bucket for s in shards])
        self._shift = on_device([s.start - first for s, first in zip(shards, firsts, strict=True)])
        self._all_buckets = torch.arange(self._num_buckets, device=device)

    def sort(self, ids_SB: Tensor) -> Bucketed:
        """Sort the ids of the row-wise features among [slots, B] ids of all."""
        ids = ids_SB.index_select(0, self._slots)
        rows = ids + self._offsets
        shard = torch.bucketize(rows, self._firsts, right=True) - 1
        bucket = self._bucket[shard]
        local = (rows + self._shift[shard]).to(ids_SB.dtype).flatten()
        if self._has_bags:
            bucket = torch.where(ids < 0, self._num_buckets, bucket)
        in_order, order = torch.sort(bucket.flatten(), stable=True)
        ends = torch.searchsorted(in_order, self._all_buckets, right=True)
        begins = torch.searchsorted(in_order, self._all_buckets)
        place = torch.empty_like(order)
        starts = torch.cat([begins, ends[-1:]])
        place[order] = torch.arange(len(order), device=order.device) - starts[in_order]
        return Bucketed(
            ids=local[order], counts=ends - begins, bucket=bucket, place=place.view_as(bucket)
        )
