"""Owns the rows that one device holds, their optimiser state and their update.

batch.py              a batch's ids in, gradients of their rows out
bags.py               several ids per feature: lists of rows that are added up
store.py              parts of tables in one tensor; their names in checkpoints
formats.py            in how many bits, and how they are rounded
host.py, mapped.py    in host memory, prefetched for each batch
update.py             the rules: SGD, Adagrad, row-wise Adagrad, Adam
row_update.py         a rule applied to rows, by a kernel where there is one
"""
