"""TorchRec's files: for every day a matrix of numbers, one of ids and one of labels.

    day_0_dense.npy     float32 [rows, numerical columns], the logarithm already taken
    day_0_sparse.npy    int32 or int64 [rows, categorical columns]
    day_0_labels.npy    int32 [rows, 1]

With several ids per feature, the second file is `day_0_sparse_multi_hot.npz` instead: the keys
"0", "1", ... hold int32 [rows, hotness of that feature].

Nothing is read whole: `.npy` is memory-mapped, and the members of an `.npz` (a zip archive, which
numpy would load whole) are read as streams, block by block.
"""

import re
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainmark.errors import InputError, raise_all
from trainmark.files import NPY_ERRORS, reserve

BLOCK_ROWS = 65_536
SPARSE_KINDS = ("sparse", "sparse_multi_hot")


@dataclass(frozen=True)
class NpyRows:
    """Consecutive rows."""

    dense: NDArray[np.float32]
    """[rows, numerical columns]"""
    labels: NDArray[np.integer]
    """[rows]"""
    ids: list[NDArray[np.integer]]
    """For each feature [rows], or [rows, hotness] if the file has several ids per feature."""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Day:
    """The files of one day, checked to have equally many rows."""

    number: int
    rows: int
    num_numerical: int
    hotness: tuple[int, ...]
    """Ids per example, for each categorical feature."""
    dense: Path
    sparse: Path
    labels: Path

    @property
    def is_mapped(self) -> bool:
        """Whether reading may begin at any row without reading those before it."""
        return self.sparse.suffix == ".npy"

    def blocks(self, first: int, end: int) -> Iterator[NpyRows]:
        """The rows from `first` to before `end`, some at a time."""
        dense, labels = _map(self.dense), _map(self.labels)
        with _ids_of(self.sparse) as ids:
            ids.skip(first)
            for start in range(first, end, BLOCK_ROWS):
                stop = min(start + BLOCK_ROWS, end)
                columns = ids.read(stop - start)
                yield NpyRows(dense[start:stop], labels[start:stop].reshape(-1), columns)

    def paths(self) -> list[Path]:
        return [self.dense, self.sparse, self.labels]


def find_days(folder: Path) -> list[Day]:
    """The days in `folder`, by number."""
    if not folder.is_dir():
        raise InputError(f"--input {folder} is not a folder with day_N_dense.npy and so on.")
    pattern = re.compile(r"day_(\d+)_(dense|labels|sparse)\.npy|day_(\d+)_(sparse_multi_hot)\.npz")
    found: dict[int, dict[str, Path]] = {}
    for path in sorted(folder.iterdir()):
        if match := pattern.fullmatch(path.name):
            number, kind = (part for part in match.groups() if part is not None)
            found.setdefault(int(number), {})[kind] = path
    if not found:
        raise InputError(f"{folder} holds no day_N_dense.npy, day_N_sparse.npy, day_N_labels.npy.")
    raise_all(problem for number in sorted(found) for problem in _missing(number, found[number]))
    days = [_open_day(number, found[number]) for number in sorted(found)]
    for day in days[1:]:
        shape, first = (day.num_numerical, day.hotness), (days[0].num_numerical, days[0].hotness)
        if shape != first:
            raise InputError(
                f"{folder}: day {day.number} has {_shape(*shape)}, "
                f"but day {days[0].number} has {_shape(*first)}."
            )
    return days


def _missing(number: int, files: dict[str, Path]) -> Iterator[str]:
    for kind in ("dense", "labels"):
        if kind not in files:
            yield f"day_{number}_{kind}.npy is missing; day {number} has {_names(files)}."
    if not any(kind in files for kind in SPARSE_KINDS):
        yield f"day_{number}_sparse.npy is missing; day {number} has {_names(files)}."
    elif all(kind in files for kind in SPARSE_KINDS):
        yield f"day {number} has both sparse.npy and sparse_multi_hot.npz; keep one of them."


def _names(files: dict[str, Path]) -> str:
    return ", ".join(path.name for path in files.values())


def _shape(num_numerical: int, hotness: tuple[int, ...]) -> str:
    ids = f" with {hotness} ids" if max(hotness, default=1) > 1 else ""
    return f"{num_numerical} numerical and {len(hotness)} categorical columns{ids}"


def _open_day(number: int, files: dict[str, Path]) -> Day:
    dense, labels = _map(files["dense"]), _map(files["labels"])
    sparse = files.get("sparse") or files["sparse_multi_hot"]
    with _ids_of(sparse) as ids:
        id_rows, hotness = ids.rows, ids.hotness
    raise_all(
        f"{files[kind]} holds {array.dtype} {list(array.shape)}; {expected} is expected."
        for kind, array, expected, fits in (
            ("dense", dense, "a matrix of floats", dense.ndim == 2 and dense.dtype.kind == "f"),
            (
                "labels",
                labels,
                "integers [rows, 1]",
                labels.dtype.kind in "biu" and labels.size == len(labels),
            ),
        )
        if not fits
    )
    rows = {files["dense"]: len(dense), files["labels"]: len(labels), sparse: id_rows}
    if len(set(rows.values())) != 1:
        lengths = ", ".join(f"{path.name} {count:,}" for path, count in rows.items())
        raise InputError(f"The files of day {number} differ in rows: {lengths}.")
    return Day(number, id_rows, dense.shape[1], hotness, files["dense"], sparse, files["labels"])


def _map(path: Path) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r")
    except NPY_ERRORS as error:
        raise InputError(f"{path} is not readable as a numpy file: {error}.") from None
    if array.ndim == 0:
        raise InputError(f"{path} holds a single value; a matrix is expected.")
    return array


# --- the ids of a day, one or several per feature


def _ids_of(path: Path) -> "_OneId | _SeveralIds":
    return _SeveralIds(path) if path.suffix == ".npz" else _OneId(path)


class _OneId:
    """`day_N_sparse.npy`."""

    def __init__(self, path: Path) -> None:
        self._ids = _map(path)
        if self._ids.ndim != 2 or self._ids.dtype.kind not in "iu":
            raise InputError(
                f"{path} holds {self._ids.dtype} {list(self._ids.shape)}; "
                "a matrix of integers is expected."
            )
        self.rows = len(self._ids)
        self.hotness = (1,) * self._ids.shape[1]
        self._next = 0

    def __enter__(self) -> "_OneId":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def skip(self, rows: int) -> None:
        self._next += rows

    def read(self, rows: int) -> list[NDArray[np.integer]]:
        """The next rows of every feature."""
        block = self._ids[self._next : self._next + rows]
        self._next += rows
        return list(block.T)


class _SeveralIds:
    """`day_N_sparse_multi_hot.npz`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open = ExitStack()
        try:
            archive = self._open.enter_context(zipfile.ZipFile(path))
            self._members = [self._member(archive, name) for name in self._keys(archive)]
        except (*NPY_ERRORS, zipfile.BadZipFile) as error:
            self._open.close()
            raise InputError(f"{path} is not readable as a numpy archive: {error}.") from None
        lengths = sorted({rows for _, rows, _, _ in self._members})
        if len(lengths) != 1:
            self._open.close()
            raise InputError(f"The keys of {path} differ in rows: {lengths}.")
        self.rows = lengths[0]
        self.hotness = tuple(hotness for _, _, hotness, _ in self._members)

    def _keys(self, archive: zipfile.ZipFile) -> list[str]:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        expected = [str(number) for number in range(len(names))]
        if not names or sorted(names) != sorted(expected):
            raise ValueError(f'its keys are {names[:30]}; "0", "1", ... are expected')
        return [f"{name}.npy" for name in expected]

    def _member(self, archive: zipfile.ZipFile, name: str) -> tuple[Any, int, int, np.dtype[Any]]:
        """A stream behind its header, with its rows, its ids per row and their type."""
        stream = self._open.enter_context(archive.open(name))
        version = np.lib.format.read_magic(stream)
        if version != (1, 0):
            raise ValueError(f"{name} has numpy's file version {version}; (1, 0) is expected")
        shape, in_columns, dtype = np.lib.format.read_array_header_1_0(stream)
        if len(shape) != 2 or in_columns or dtype.kind not in "iu" or shape[1] < 1:
            order = " in column order" if in_columns else ""
            raise ValueError(
                f"{name} is {dtype} {list(shape)}{order}; integers [rows, hotness] are expected"
            )
        return stream, shape[0], shape[1], dtype

    def __enter__(self) -> "_SeveralIds":
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def skip(self, rows: int) -> None:
        for start in range(0, rows, BLOCK_ROWS):
            self.read(min(BLOCK_ROWS, rows - start))

    def read(self, rows: int) -> list[NDArray[np.integer]]:
        """The next rows of every feature."""
        return [
            self._read(stream, rows, hotness, dtype) for stream, _, hotness, dtype in self._members
        ]

    def _read(
        self, stream: Any, rows: int, hotness: int, dtype: np.dtype[Any]
    ) -> NDArray[np.integer]:
        size = rows * hotness * dtype.itemsize
        try:
            data = stream.read(size)
        except (OSError, zipfile.BadZipFile) as error:
            raise InputError(f"{self._path} is damaged: {error}.") from None
        if len(data) != size:
            raise InputError(f"{self._path} is truncated.")
        ids = np.frombuffer(data, dtype)
        return ids if hotness == 1 else ids.reshape(rows, hotness)


# --- writing


class DayWriter:
    """Writes the three files of one day, whose number of rows is known before.

    Ids stay integers throughout, so that those above 2**24 survive (TorchRec's own shuffling goes
    through float32, which rounds them).

    Args:
        first_row: of files that there are, where to write; without one, new files are made.
    """

    def __init__(
        self,
        folder: Path,
        day: int,
        rows: int,
        num_numerical: int,
        num_categorical: int,
        first_row: int | None = None,
    ) -> None:
        def opened(kind: str, dtype: str, width: int) -> NDArray[Any]:
            path, mode = folder / f"day_{day}_{kind}.npy", "w+" if first_row is None else "r+"
            array = np.lib.format.open_memmap(path, mode, dtype, (rows, width), version=(1, 0))
            if first_row is None:
                reserve(path)
            return array

        self._dense = opened("dense", "<f4", num_numerical)
        self._sparse = opened("sparse", "<i4", num_categorical)
        self._labels = opened("labels", "<i4", 1)
        self._done = first_row or 0

    def append(
        self,
        labels: NDArray[Any],
        dense: NDArray[np.floating],
        ids: Iterable[NDArray[np.integer]],
    ) -> None:
        """Write rows: `labels` [rows], `dense` [rows, columns], `ids` per column [rows]."""
        here = slice(self._done, self._done + len(labels))
        self._dense[here] = dense
        self._labels[here, 0] = labels
        for number, column in enumerate(ids):
            self._sparse[here, number] = column
        self._done = here.stop
