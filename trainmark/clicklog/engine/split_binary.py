"""Writes the `split_binary` layout: one headerless little-endian file per feature.

`numerical.bin` holds rows of float16 or float32, `label.bin` one byte per row, `cat_i.bin` one
integer per row in the narrowest type that the column's cardinality allows. Row k of every file is
the same example.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainmark.clickdata import feature_spec, spec_rules


class Writer:
    """Appends rows to the files of one mapping.

    Example:
        with Writer(folder, "train", cardinalities, num_numerical=13) as train:
            train.append(labels, numerical, categorical)
    """

    def __init__(
        self,
        folder: Path,
        mapping: str,
        cardinalities: Sequence[int],
        num_numerical: int,
        numerical_dtype: str = "float16",
        first_row: int | None = None,
        hotness: Sequence[int] = (),
    ) -> None:
        """
        Args:
            hotness: ids per row of each feature, if not one.
            first_row: of files that there are, where to write; without one, new files are made.
        """
        self.rows = 0
        self._numerical_dtype = np.dtype(numerical_dtype).newbyteorder("<")
        self._dtypes = [feature_spec.dtype_for(cardinality) for cardinality in cardinalities]
        if first_row is None:
            (folder / mapping).mkdir()
        self._files = ExitStack()

        def opened(name: str, row_bytes: int) -> Any:
            mode = "wb" if first_row is None else "r+b"
            file = self._files.enter_context((folder / mapping / name).open(mode))
            file.seek((first_row or 0) * row_bytes)
            return file

        width = num_numerical * self._numerical_dtype.itemsize
        self._label = opened("label.bin", 1)
        self._numerical = opened("numerical.bin", width) if num_numerical else None
        of_rows = zip(self._dtypes, hotness or [1] * len(self._dtypes), strict=True)
        self._categorical = [
            opened(f"cat_{i}.bin", np.dtype(dtype).itemsize * ids)
            for i, (dtype, ids) in enumerate(of_rows)
        ]

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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


def write_specs(
    folder: Path,
    cardinalities: Sequence[int],
    num_numerical: int,
    metadata: Mapping[str, Any],
    hotness: Sequence[int] = (),
    validation: bool = True,
    numerical_dtype: str = "float16",
    varies: Sequence[bool] = (),
) -> None:
    """Write `feature_spec.yaml` (train, test) and `feature_spec_validation.yaml` (validation)."""
    for mappings in (("train", "test"), ("validation",))[: 1 + validation]:
        spec = feature_spec.default_spec(
            cardinalities, num_numerical, metadata, mappings, hotness, numerical_dtype, varies
        )
        spec_rules.check(spec, mappings)
        feature_spec.write(spec, feature_spec.path_of(folder, mappings[0]))
