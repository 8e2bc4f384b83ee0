"""Owns the input formats: files, read as rows of numbers.

source.py          what the engine asks of a source, and which files it reads
rows.py            what it gets: a schema, and parsed rows
recipes.py         the published rules for Criteo's columns
criteo_text.py     Criteo's text; criteo_format.py: its rules, a line at a time;
                   criteo_columns.py: what parsers take of it;
                   criteo_kernel.py (numba) and criteo_arrow.py: the fast parsers
csv_source.py, parquet_source.py
                   files with any columns; csv_header.py: their names in CSV files;
                   parquet_files.py: damaged ones are told
column_spec.py     --columns: what these columns are; column_types.py: how a type is read;
                   number_readings.py: what is to become of numbers
convert.py         batches of these columns as numbers; column_values.py: one of them
lists.py           columns of several values in a row
labels.py          which rows are clicks; arrow_columns.py: columns in other types
column_match.py    which columns are read, and as what; --vocabulary: as in an earlier dataset
text_files.py      pieces of whole lines, compressed or not; unpack.py: ahead of those who parse;
                   remote.py: files of other machines; apart.py: in another process
"""
