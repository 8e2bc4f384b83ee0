"""A dataset of clicks for the benchmark's rows from disk, written by many processes at once.

It says nothing: ids by a power law or uniform, clicks and numbers at random. Only its size, its
types and how often its ids repeat matter here.
"""

import multiprocessing
import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.dlrm_clicks import EXPONENTS, Ids, draw_ids
from trainmark.clickdata import feature_spec
from trainmark.training.seeding import generator

BLOCK_ROWS = 1 << 20
TEST_ROWS = 1 << 17
CLICK_RATE = 0.2


def write_dataset(
    folder: Path, table_rows: Sequence[int], num_numerical: int, rows: int, ids: Ids
) -> int:
    """Replace `folder` by a dataset of `rows` training rows. Returns its bytes.

    Nothing of it is left in the page cache: whoever reads it reads the disk.
    """
    shutil.rmtree(folder, ignore_errors=True)
    spec = feature_spec.default_spec(table_rows, num_numerical)
    splits = {"train": rows, "test": min(rows, TEST_ROWS)}
    blocks = [
        (split, start, min(start + BLOCK_ROWS, count))
        for split, count in splits.items()
        for start in range(0, count, BLOCK_ROWS)
    ]
    for split in splits:
        (folder / split).mkdir(parents=True)
        for file in spec.files(split).values():
            (folder / file).touch()
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        pool.starmap(partial(_write_block, folder, spec, ids), blocks, chunksize=1)
        files = [folder / file for split in splits for file in set(spec.files(split).values())]
        written = sum(pool.map(_leave_cache, files, chunksize=1))
    feature_spec.write(spec, feature_spec.path_of(folder))
    return written


def _write_block(
    folder: Path, spec: feature_spec.FeatureSpec, ids: Ids, split: str, start: int, stop: int
) -> None:
    torch.set_num_threads(1)
    random = generator(torch.device("cpu"), split, start)
    count, files = stop - start, spec.files(split)
    ids_FB = draw_ids(spec.cardinalities, count, EXPONENTS[ids], random).numpy()
    columns = dict(zip(spec.categorical, ids_FB, strict=True))
    columns[spec.label] = (torch.rand(count, generator=random) < CLICK_RATE).numpy()
    for name, column in columns.items():
        _write_at(folder / files[name], start, column.astype(spec.feature_spec[name].dtype))
    if spec.numerical:
        numerical = torch.randn(count, len(spec.numerical), generator=random).half().numpy()
        _write_at(folder / files[spec.numerical[0]], start, numerical)


def _write_at(path: Path, first_row: int, rows: np.ndarray) -> None:
    with path.open("r+b") as file:
        file.seek(first_row * rows.nbytes // len(rows))
        file.write(rows.data)


def _leave_cache(path: Path) -> int:
    """Bring a file to the disk and out of memory. Returns its bytes."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return os.fstat(file.fileno()).st_size
