"""Embedding tables: where they live, how they are looked up and updated.

Begin with `engine.py`: `Engine` is all that a model and its trainer see of tables, and
`LocalEngine` is the plainest of them. The others, by what they are about:

    engines       fused.py               one GPU: lookup and interaction in one kernel, any format
                  sharded.py             many ranks, or tables in host memory
                  torchrec_engine.py     TorchRec's tables; torchrec_tables.py makes them
    rows          store.py               parts of tables in one tensor, with their optimiser state
                  format_store.py        the same in 16 or 8 bits
                  host.py, mapped.py     in host memory, fetched for each batch
                  replicas.py            of small tables, whole on every device
                  stores.py              whichever of them a placement asks for
    updates       update.py              the rules: SGD, Adagrad, row-wise Adagrad, Adam
                  row_update.py          a rule applied to rows, by a kernel where there is one
                  squares.py             row-wise Adagrad where ranks share the columns of a row
    placements    placement.py           plain data: which part of which table lies where
                  strategies.py          the published ways to choose one
                  auto_placement.py      ours, by predicted time; access.py knows how often rows
                                         are looked up, cutting.py makes pieces of tables
    exchange      routes.py              from a placement to what each rank sends to whom
                  layout.py, buckets.py  how much of it for one micro-batch; ids of row-wise tables
                  lookups.py             a micro-batch on its way
                  exchange.py            all-to-all, every byte counted
                  connection.py          process groups, and indices on the device
    checkpoints   boxes.py               parts of tables under their global names
"""
