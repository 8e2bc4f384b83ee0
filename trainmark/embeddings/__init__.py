"""Embedding tables: where they live, how they are looked up and updated.

Begin with `engine.py`: `EmbeddingEngine` is all that a model and its trainer see of tables, and
`LocalEngine` is the plainest of them.

    engines    engine.py              one device, plain
               fused.py               one GPU: lookup and interaction in one kernel, any format
               bag_engines.py         both for several ids per feature; mean.py: their mean
               sharded.py             many ranks, or tables in host memory
               torchrec_engine.py     TorchRec's tables; torchrec_tables.py makes them
    below      placement/             plain data: which part of which table lies where
               tables/                rows in memory, and their update
               exchange/              between ranks: ids out, rows back, gradients out

The engines import the packages below them, `exchange` the other two, and none the other way round.
"""
