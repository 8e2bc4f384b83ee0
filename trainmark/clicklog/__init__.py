"""Owns the way from raw click logs to datasets on disk. Training never imports it.

A *source* (Criteo text, CSV, Parquet) knows how to read rows; one engine does the rest, in bounded
memory and on all cores (engine.workers), in phases whose results stay in a work folder beside
the output until all is done:

    1 parse    every input file, once, into integer columns on disk: the store
    2 encode   fit the numbers to training rows; then every column: count values, make the
               vocabulary, map values to ids, write the training rows in their random order, the
               others in input order
    3 finish   feature_spec.yaml, prepare.json, bad_rows.txt; the folder is renamed into place

The rules that make the result the same bytes for any memory, number of processes, compression of
the input, with or without numba, and however often the run was killed:

- Rows are numbered through all files in input order. A split is a range of row numbers: training
  rows first, then the last day, which is halved. With --split-by, --holdout random and
  --negative-rate it is a range of places in another order of the rows (engine.division), which
  depends on nothing but the rows and the seed.
- The random order of the training rows: row r gets a 40-bit key from (seed, r); rows are sorted by
  key, then by r. So no pass needs to know how many rows there are, and the store can group rows by
  the first bits of their keys while parsing (buckets), so that ordering later touches a bucket at
  a time.
- A vocabulary holds the values that occur at least `threshold` times. Ids go by falling count and
  then by rising value (recipe nvidia), or by the row of the first appearance (torchrec, dlrm).

The store (engine.store) is a file per block of consecutive rows. A block holds the order of its
rows, the labels, the numerical columns (Criteo's ready for training, in float16; others as they
were read, in float64), and each categorical column either as numbers (uint32 or uint64) or, where a
block has few distinct ones, as codes of 1 or 2 bytes into the block's own dictionary with counts;
most columns need no second look at their rows to be counted. 0 is the missing value; the rows that
really hold the number 0 are listed apart. Strings become numbers by interning: every block has a
sorted dictionary, all dictionaries are merged between phases 1 and 2, and a string's number is its
rank, so that ties by number are ties by bytes.

Numbers are fitted (engine.numbers) to the first million training rows in their random order, which
are the same rows for any memory, number of processes, and however often the run was killed.

Counting (arrays.counting) keeps a hash table within its share of the memory. When it is full, the
upper half of the value range is dropped and left to a further pass over the column, so that each
pass gives exact counts for a range of values, the ranges rising. Mapping loads as much of the
vocabulary at a time as fits.

Vocabularies are kept in `vocabulary/cat_i.parquet` (value, id, count; rising values), for
`--vocabulary` and for served requests.

Every finished block and column leaves a line of JSON with sizes and checksums. A run that finds a
work folder of the same settings checks these and continues behind them.

The rooms, each importing only those above it:

    arrays     work on whole arrays, by numpy or numba
    sources    files of several formats, as rows
    engine     from rows to a dataset, on one machine
    spark      the same bytes, on a cluster

The files here, which import any of these:

    criteo.py, csv_data.py, parquet_data.py, npy.py, synthetic.py
                       the options of each `trainmark prepare ...`, and its job
    synthetic_logs.py, synthetic_files.py, synthetic_blocks.py
                       the logs that synthetic.py writes, their formats, and how processes share
                       the work
    tabular.py         what csv and parquet share besides
    inherit.py         what --vocabulary takes over from an earlier dataset
    encode.py          raw files by all settings of an earlier dataset, for a model of it
    preparation.py     a dataset without its rows, which an exported model carries
    log_options.py     what criteo, csv and parquet share
    per_column.py      flags such as 15,C20=3
    transcode.py       data that have ids already: from CSV or Parquet to split_binary
    npy_files.py       TorchRec's day files; to_npy.py writes a dataset as such
    raw_values.py      single rows by the rules of a prepared dataset, for scoring; column_ids.py
                       looks up their ids
"""
