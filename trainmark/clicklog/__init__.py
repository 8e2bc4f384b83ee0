"""Raw click logs -> train-ready datasets. Owns bytes on disk; training never imports it.

A *source* (Criteo text, CSV, Parquet) knows how to read rows; one engine does the rest, in bounded
memory, in phases whose results stay in a work folder beside the output until all is done:

    1 parse    every input file, once, into integer columns on disk: the store
    2 encode   one column after the other: count values, make the vocabulary, map values to ids,
               write the training rows in their random order, the others in input order
    3 finish   feature_spec.yaml, prepare.json, bad_rows.txt; the folder is renamed into place

The rules that make the result the same bytes for any memory, number of threads, compression of the
input, with or without numba, and however often the run was killed:

- Rows are numbered through all files in input order. A split is a range of row numbers: training
  rows first, then the last day, which is halved.
- The random order of the training rows: row r gets a 40-bit key from (seed, r); rows are sorted by
  key, then by r. So no pass needs to know how many rows there are, and the store can group rows by
  the first bits of their keys while parsing (buckets), so that ordering later touches a bucket at
  a time.
- A vocabulary holds the values that occur at least `threshold` times. Ids go by falling count and
  then by rising value (recipe nvidia), or by the row of the first appearance (torchrec, dlrm).

The store (store.py) is a file per block of consecutive rows. A block holds the labels, the
numerical columns ready for training (float16), and each categorical column either as numbers
(uint32 or uint64) or, where a block has few distinct ones, as codes of 1 or 2 bytes into the
block's own dictionary with counts; most columns need no second look at their rows to be counted.
0 is the missing value; the rows that really hold the number 0 are listed apart. Strings become
numbers by interning: every block has a sorted dictionary, all dictionaries are merged between
phases 1 and 2, and a string's number is its rank, so that ties by number are ties by bytes.

Counting (counting.py) keeps a hash table within its share of the memory. When it is full, the upper
half of the value range is dropped and left to a further pass over the column, so that each pass
gives exact counts for a range of values, the ranges rising. Mapping loads as much of the
vocabulary at a time as fits.

Vocabularies are kept in `vocabulary/cat_i.parquet` (value, id, count; rising values), for
`--vocabulary` and for served requests.

Every finished block and column leaves a line of JSON with sizes and checksums. A run that finds a
work folder of the same settings checks these and continues behind them.

The files:

    prepare ...   criteo.py, csv_data.py, parquet_data.py, npy.py, synthetic.py: options, and a job
                  described.py            what csv and parquet share; description.py: --columns
                  recipes.py, splits.py   the published rules; which rows train, test, validate
                  per_column.py           flags such as 15,C20=3
    sources       source.py, rows.py      what the engine asks of a source, and what it gets
                  criteo_text.py          with criteo_kernel.py (numba) or criteo_arrow.py
                  own_data.py             CSV and Parquet; convert.py makes numbers of their columns
                  text_files.py           pieces of whole lines, compressed or not
    the engine    engine.py               the phases; parse_phase.py is the first
                  store.py, work.py       rows on disk in between; what of it is done
                  column_reader.py        a column of the store, for the second phase
                  counting.py, strings.py, vocabulary.py: counts, strings as numbers, ids
                  shuffle.py, arrange.py, fields.py: the order of rows, and columns written in it
                  limits.py               what it may use of the machine
                  primitives.py           work on whole arrays; kernels.py: the same by numba
    the output    folder.py               appears whole or not at all
                  split_binary.py, checksum.py, summary.py, progress.py
    Spark         spark.py, spark_engine.py, spark_frames.py, spark_encode.py, spark_session.py,
                  hadoop.py               the same bytes, on a cluster
    other forms   npy_files.py, to_npy.py, transcode.py
    scoring       raw_values.py, column_ids.py: single rows by the rules of a prepared dataset
"""
