"""`--to npy`: a prepared dataset as TorchRec's day files, in the folder `npy` within it.

The training rows, in their random order, fill all days but the last, equally long. The last day
holds the validation rows and then the test rows, which is how TorchRec's loader halves it. Ids stay
integers, so that those above 2**24 are exact; numbers are float32, which holds those of
`split_binary` exactly.
"""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np

from trainmark import files
from trainmark.clickdata import feature_spec
from trainmark.clicklog.npy_files import BLOCK_ROWS, DayWriter
from trainmark.errors import InputError

FOLDER = "npy"
MANIFEST = "npy.json"


def write(dataset: Path, days: int) -> Path:
    """Write the days of a dataset, unless they are there; returns their folder.

    Args:
        dataset: with train, test and validation.
        days: how many days to write, the last one included.
    """
    output = dataset / FOLDER
    settings = {"days": days}
    if not files.is_finished(output, MANIFEST, settings):
        splits = {mapping: _Split(dataset, mapping) for mapping in ("train", "validation", "test")}
        rows = {mapping: split.rows for mapping, split in splits.items()}
        check_halves(rows)
        with files.building(output) as partial:
            train = splits["train"]
            bounds = [train.rows * day // (days - 1) for day in range(days)]
            for day, (start, stop) in enumerate(pairwise(bounds)):
                with_rows = train.writer(partial, day, stop - start)
                train.copy(with_rows, start, stop)
            last = train.writer(partial, days - 1, rows["validation"] + rows["test"])
            for mapping in ("validation", "test"):
                splits[mapping].copy(last, 0, rows[mapping])
            files.write_json(partial / MANIFEST, {"settings": settings, "rows": rows})
    print(f"TorchRec's day files are in {output}")
    return output


def check_halves(rows: Mapping[str, int]) -> None:
    """Refuse held-out rows that TorchRec's loader would divide otherwise."""
    if not rows["test"] <= rows["validation"] <= rows["test"] + 1:
        raise InputError(
            f"--to npy: there are {rows['validation']:,} rows to validate and {rows['test']:,} to "
            "test, but TorchRec's loader cuts its last day in halves, the first (rounded up) to "
            "validate. Leave --to npy out, or give --test-half second."
        )


class _Split:
    """A split on disk, memory-mapped."""

    def __init__(self, dataset: Path, mapping: str) -> None:
        spec = feature_spec.read(feature_spec.path_of(dataset, mapping))
        self.rows = feature_spec.count_rows(spec, dataset, mapping)
        files = spec.files(mapping)

        def column(name: str) -> np.memmap:
            dtype = np.dtype(spec.feature_spec[name].dtype)
            return np.memmap(dataset / files[name], dtype, mode="r")

        self._labels = column(spec.label)
        self._ids = [column(name) for name in spec.categorical]
        self.num_numerical = len(spec.numerical)
        self._numerical = (
            column(spec.numerical[0]).reshape(self.rows, -1)
            if spec.numerical
            else np.empty((self.rows, 0), spec.numerical_dtype)
        )

    def writer(self, output: Path, day: int, rows: int) -> DayWriter:
        return DayWriter(output, day, rows, self.num_numerical, len(self._ids))

    def copy(self, writer: DayWriter, start: int, stop: int) -> None:
        """Append the rows `start` to `stop`."""
        for first in range(start, stop, BLOCK_ROWS):
            here = slice(first, min(first + BLOCK_ROWS, stop))
            writer.append(
                self._labels[here], self._numerical[here], [column[here] for column in self._ids]
            )
