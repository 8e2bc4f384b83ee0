"""Where click rows come from: a dataset on disk, or a generator in memory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainmark import feature_spec
from trainmark.errors import InputError
from trainmark.numerical import log_transform
from trainmark.planted import BLOCK_ROWS
from trainmark.workloads.dlrm.runs import DlrmRun, planted_clicks, synthetic_range


@dataclass(frozen=True)
class Columns:
    """Rows in the types they are stored in: numerical [n, N], labels [n], ids one [n] a feature."""

    numerical: NDArray[np.float16]
    labels: NDArray[np.bool_]
    ids: list[NDArray[Any]]

    def take(self, rows: NDArray[np.int64] | slice) -> "Columns":
        return Columns(self.numerical[rows], self.labels[rows], [c[rows] for c in self.ids])

    @staticmethod
    def join(parts: list["Columns"]) -> "Columns":
        if len(parts) == 1:
            return parts[0]
        return Columns(
            np.concatenate([p.numerical for p in parts]),
            np.concatenate([p.labels for p in parts]),
            [np.concatenate(columns) for columns in zip(*(p.ids for p in parts), strict=True)],
        )


class RowSource(Protocol):
    """Anything that has rows: files, or a generator."""

    num_rows: int

    def read(self, start: int, stop: int) -> Columns: ...


class SplitBinary:
    """A split on disk, memory-mapped."""

    def __init__(self, folder: Path, split: str) -> None:
        path = feature_spec.path_of(folder, split)
        self._spec = feature_spec.read(path)
        feature_spec.check(self._spec, mappings=_mappings(split), source=str(path))
        self.num_rows = feature_spec.count_rows(self._spec, folder, split)
        self._split = split
        self._folder = folder
        files = self._spec.files(split)
        self._labels = self._open(files[self._spec.label], "uint8")
        self._ids = [
            self._open(files[name], str(self._spec.feature_spec[name].dtype))
            for name in self._spec.categorical
        ]
        names = self._spec.numerical
        self._numerical = (
            self._open(files[names[0]], "float16").reshape(-1, len(names))
            if names
            else np.empty((self.num_rows, 0), np.float16)
        )

    def _open(self, file: str, dtype: str) -> NDArray[Any]:
        return np.memmap(self._folder / file, dtype=np.dtype(dtype), mode="r")

    def read(self, start: int, stop: int) -> Columns:
        labels = np.asarray(self._labels[start:stop])
        if labels.size and labels.max() > 1:
            bad = int(np.argmax(labels > 1))
            raise InputError(
                f"{self._path(self._spec.label)}: row {start + bad} has label {labels[bad]}; "
                "0 or 1 is expected."
            )
        columns = Columns(
            np.asarray(self._numerical[start:stop]),
            labels.view(np.bool_),
            [np.asarray(column[start:stop]) for column in self._ids],
        )
        self._check_ids(columns, start)
        return columns

    def _path(self, feature: str) -> Path:
        return self._folder / self._spec.files(self._split)[feature]

    def _check_ids(self, columns: Columns, start: int) -> None:
        """An id outside its table would read, and later write, another table's rows."""
        for name, rows, ids in zip(
            self._spec.categorical, self._spec.cardinalities, columns.ids, strict=True
        ):
            if ids.size and (ids.min() < 0 or ids.max() >= rows):
                bad = int(np.argmax((ids < 0) | (ids >= rows)))
                raise InputError(
                    f"{self._path(name)}: row {start + bad} has id {int(ids[bad])}; {name} has "
                    f"ids 0 to {rows - 1} in feature_spec.yaml. "
                    "Prepare the data again, or correct the cardinality."
                )


def _mappings(split: str) -> tuple[str, ...]:
    return ("validation",) if split == "validation" else ("train", "test")


class SyntheticRows:
    """Rows made in memory, a function of (seed, row).

    `planted` rows have power-law ids and a hidden signal. `uniform` ids say nothing; the clicks
    follow the first numerical feature, so that a loss can fall. Rows repeat after
    `DISTINCT_ROWS`, so that a long run costs no more memory or time to make than a short one.
    """

    DISTINCT_ROWS = 1 << 21

    def __init__(self, cfg: DlrmRun, split: str) -> None:
        self._first, last = synthetic_range(cfg, split)
        self.num_rows = last - self._first
        self._cfg = cfg
        self._planted = planted_clicks(cfg) if cfg.synthetic_ids == "planted" else None
        self._dtypes = [np.dtype(feature_spec.dtype_for(rows)) for rows in cfg.model.table_rows]
        self._blocks: dict[int, Columns] = {}

    def read(self, start: int, stop: int) -> Columns:
        parts: list[Columns] = []
        while start < stop or not parts:
            row = self._first + start % self.DISTINCT_ROWS
            block, offset = divmod(row, BLOCK_ROWS)
            size = min(stop - start, BLOCK_ROWS - offset, self._until_repeat(start))
            parts.append(self._block(block).take(slice(offset, offset + size)))
            start += size
        return Columns.join(parts)

    def _until_repeat(self, start: int) -> int:
        return self.DISTINCT_ROWS - start % self.DISTINCT_ROWS

    def _block(self, number: int) -> Columns:
        if number not in self._blocks:
            self._blocks[number] = self._make_block(number)
        return self._blocks[number]

    def _make_block(self, number: int) -> Columns:
        if self._planted is None:
            return self._uniform_block(number)
        rows = self._planted.rows(number * BLOCK_ROWS, (number + 1) * BLOCK_ROWS)
        ids = [c.astype(d) for c, d in zip(rows.categorical, self._dtypes, strict=True)]
        return Columns(log_transform(rows.numerical), rows.labels, ids)

    def _uniform_block(self, number: int) -> Columns:
        model = self._cfg.model
        random = np.random.default_rng((self._cfg.seed, number))
        dense = random.standard_normal((BLOCK_ROWS, model.numerical_features), np.float32)
        signal = dense[:, 0] if model.numerical_features else np.zeros(BLOCK_ROWS, np.float32)
        clicks = random.random(BLOCK_ROWS, np.float32) < 1 / (1 + np.exp(1.5 - signal))
        ids = [
            random.integers(0, rows, BLOCK_ROWS, dtype)
            for rows, dtype in zip(model.table_rows, self._dtypes, strict=True)
        ]
        return Columns(dense.astype(np.float16), clicks, ids)
