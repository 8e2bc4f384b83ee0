"""Writes the `split_binary` layout: one headerless little-endian file per feature.

`numerical.bin` holds rows of float16 or float32, `label.bin` one byte per row, `cat_i.bin` one
integer per row in the narrowest type that the column's cardinality allows. Row k of every file is
the same example.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainmark.clickdata import feature_spec, spec_rules
from trainmark.clickdata.feature_spec import FeatureSpec


class Writer:
    """Appends rows to the files of one mapping.

    Args:
        spec: their features (`feature_spec.default_spec`).
        first_row: of files that there are, where to write; without one, new files are made.

    Example:
        with Writer(folder, "train", spec) as train:
            train.append(labels, numerical, categorical)
    """

    def __init__(
        self, folder: Path, mapping: str, spec: FeatureSpec, first_row: int | None = None
    ) -> None:
        self.rows = 0
        self._numerical_dtype = np.dtype(spec.numerical_dtype).newbyteorder("<")
        self._dtypes = [feature_spec.dtype_for(cardinality) for cardinality in spec.cardinalities]
        if first_row is None:
            (folder / mapping).mkdir()
        self._files = ExitStack()

        def opened(name: str, row_bytes: int) -> Any:
            mode = "wb" if first_row is None else "r+b"
            file = self._files.enter_context((folder / mapping / name).open(mode))
            file.seek((first_row or 0) * row_bytes)
            return file

        width = len(spec.numerical) * self._numerical_dtype.itemsize
        self._label = opened("label.bin", 1)
        self._numerical = opened("numerical.bin", width) if spec.numerical else None
        self._categorical = [
            opened(name, np.dtype(dtype).itemsize * ids)
            for name, dtype, ids in zip(spec.categorical, self._dtypes, spec.hotness, strict=True)
        ]

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._files.close()

    def append(
        self,
        labels: NDArray[np.bool_],
        numerical: NDArray[np.floating],
        categorical: Iterable[NDArray[np.integer]],
    ) -> None:
        """Write rows: `labels` [rows], `numerical` [rows, columns], `categorical` per column.

        A feature with several ids per example has [rows, hotness] of them.
        """
        self.rows += len(labels)
        _write(self._label, labels, "bool")
        if self._numerical is not None:
            _write(self._numerical, numerical, self._numerical_dtype)
        for file, ids, dtype in zip(self._categorical, categorical, self._dtypes, strict=True):
            _write(file, ids, np.dtype(dtype).newbyteorder("<"))


def _write(file: Any, values: NDArray[Any], dtype: Any) -> None:
    file.write(np.ascontiguousarray(values, dtype=dtype).data)


def write_specs(folder: Path, spec: FeatureSpec, validation: bool = True) -> None:
    """Write `feature_spec.yaml` (train, test) and `feature_spec_validation.yaml` (validation)."""
    for mappings in (("train", "test"), ("validation",))[: 1 + validation]:
        written = feature_spec.of_mappings(spec, mappings)
        spec_rules.check(written, mappings)
        feature_spec.write(written, feature_spec.path_of(folder, mappings[0]))
