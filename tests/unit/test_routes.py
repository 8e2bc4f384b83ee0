"""Which rank an id goes to, and as which row of a store there."""

import torch

from trainmark.distributed.mesh import single
from trainmark.embeddings.exchange.connection import Connection
from trainmark.embeddings.placement.placement import Placement, Shard, TablePlacement
from trainmark.embeddings.sharded import ShardedEngine
from trainmark.embeddings.tables.batch import IdGroup
from trainmark.embeddings.tables.update import Sgd

CPU = torch.device("cpu")


def engine_of_a_cut_table(rows: int, cut: int) -> ShardedEngine:
    """Rank 0 of two that share one table; nothing is allocated."""
    shards = (
        Shard(device=0, rows=(0, cut), columns=(0, 4)),
        Shard(device=1, rows=(cut, rows), columns=(0, 4)),
    )
    table = TablePlacement(table=0, sharding="row_wise", shards=shards)
    placement = Placement(devices=2, tables=(table,))
    return ShardedEngine(placement, [rows], 4, Sgd(), single(CPU), torch.float32)


def test_a_table_of_more_rows_than_32_bits_count_in_stores_of_fewer() -> None:
    rows, cut = 3 * 2**30, 2**30 + 2**29
    engine = engine_of_a_cut_table(rows, cut)
    assert all(part.num_rows < 2**31 for store in engine.stores for part in store.parts)
    connected: Connection = engine._connect()
    ids = torch.tensor([[rows - 1, 5, 2**31 + 7, cut]])
    assert connected.buckets is not None
    found = connected.buckets.sort(connected.join([IdGroup([0], ids)], samples=4))
    assert found.counts.tolist() == [1, 3]
    assert found.ids.tolist() == [5, rows - 1 - cut, 2**31 + 7 - cut, 0]


def test_ids_travel_in_32_bits_where_they_can() -> None:
    connected = engine_of_a_cut_table(2**31 - 1, 2**30)._connect()
    assert connected.join([IdGroup([0], torch.tensor([[3]]))], samples=1).dtype == torch.int32
