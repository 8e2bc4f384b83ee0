"""Owns what ranks send each other for tables that are spread over them.

routes.py        from a placement to what each rank sends to whom
layout.py        how much of it for one micro-batch; buckets.py sorts ids of row-wise tables
lookups.py       a micro-batch on its way
all_to_all.py    the collective, every byte counted
connection.py    process groups, and indices on the device
stores.py        what a rank holds: its parts, and replicas of small tables
squares.py       row-wise Adagrad where ranks share the columns of a row
"""
