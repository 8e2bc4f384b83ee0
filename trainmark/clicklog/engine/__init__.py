"""Owns the way from parsed rows to a dataset, in bounded memory on one machine.

phases.py          the three phases; parse_phase.py is the first, encode_phase.py the second
job.py             what to prepare, and how
store.py           rows on disk between the phases; column_reader.py: one of their columns
kept.py            columns of raw files that are carried along as they are
work.py            the work folder: what is done already
vocabulary.py      ids of categorical values; vocabulary_builder.py: counts and numbers them;
                   vocabulary_files.py: where they are kept
numbers.py         numerical columns: fitted to training rows, counted, transformed
columns.py         the columns of the dataset, each with what it is made of
arrange.py         columns in the order of the dataset; fields.py: what each column writes
splits.py          which rows train, test, validate; division.py: where these are no ranges
split_binary.py    the files of a dataset
summary.py         prepare.json, and the tables on the terminal
limits.py          memory and processes that a run may use
workers.py         these processes; turns.py: what they do in order
"""
