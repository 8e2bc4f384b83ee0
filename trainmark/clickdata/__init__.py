"""Owns what preparation and training both know of click logs.

feature_spec.py   the specification of a dataset on disk; spec_rules.py: what training accepts
vocabulary_file.py  what its vocabularies mean
identity.py       which dataset a model belongs to
negatives.py      how many rows are clicks, and which share of the others was kept
planted.py        a generated log whose best possible AUC is known (best_auc.py)
terabyte.py       a log of Criteo's size and shape, made row by row from the number
counters.py       random numbers by counter
terabyte_shape.py how that log's tables were made
numerical.py      the transform of integers
"""
