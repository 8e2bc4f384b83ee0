"""The formats of `prepare synthetic`: what rows become, and how one of several processes writes
that into files that all of them share.
"""

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainmark.clickdata import feature_spec
from trainmark.clickdata.numerical import MISSING, log_transform
from trainmark.clickdata.planted import MAX_COUNT
from trainmark.clicklog.engine import split_binary
from trainmark.clicklog.engine.splits import Split
from trainmark.clicklog.npy_files import DayWriter
from trainmark.clicklog.synthetic_logs import Log, LogRows


class Format(Protocol):
    """One of them, for a log with columns of given sizes."""

    def __init__(self, log: Log, cardinalities: tuple[int, ...], num_numerical: int) -> None: ...

    def encode(self, rows: LogRows) -> Any:
        """What is written of rows."""
        ...

    def extent(self, block: Any) -> int:
        """Of encoded rows: how far behind them the next ones begin."""
        ...

    def create(self, folder: Path, piece: Split) -> None:
        """The files of a day or a split, to be written into."""
        ...

    def write(self, folder: Path, piece: Split, place: int, block: Any) -> None:
        """Encoded rows, behind others of this extent."""
        ...


# --- raw text


class Raw:
    """Days of tab-separated text.

    Every field gets its widest form in a matrix of characters with one line per row; unused
    characters are 0 and dropped at the end.
    """

    LABEL = np.frombuffer(b"01", np.uint8)
    HEX_PAIRS = np.frombuffer("".join(f"{i:02x}" for i in range(256)).encode(), np.uint16)
    COUNT_WIDTH = len(str(MAX_COUNT))

    def __init__(self, log: Log, cardinalities: tuple[int, ...], num_numerical: int) -> None:
        self._log = log
        # The text of every possible count; the last entry is the empty field.
        counts = np.arange(-2, MAX_COUNT + 1).astype(f"S{self.COUNT_WIDTH}")
        self._count_text = np.append(counts, b"")

    def encode(self, rows: LogRows) -> NDArray[np.uint8]:
        fields = [self.LABEL.take(rows.labels.view(np.uint8))[:, None]]
        fields += [self._counts(column) for column in rows.numerical.T]
        fields += [self._values(number, ids) for number, ids in enumerate(rows.categorical)]
        text = np.empty((len(rows), sum(field.shape[1] + 1 for field in fields)), np.uint8)
        end = 0
        for field in fields:
            start, end = end, end + field.shape[1] + 1
            text[:, start : end - 1] = field
            text[:, end - 1] = ord("\t")
        text[:, -1] = ord("\n")
        return np.asarray(text[text != 0])

    def _counts(self, counts: NDArray[np.int32]) -> NDArray[np.uint8]:
        index = np.where(counts == MISSING, len(self._count_text) - 1, counts + 2)
        return np.asarray(self._count_text.take(index).view(np.uint8).reshape(len(counts), -1))

    def _values(self, column: int, ids: NDArray[np.int32]) -> NDArray[np.uint8]:
        big_endian = self._log.values(column, ids).astype(">u4").view(np.uint8)
        text = self.HEX_PAIRS.take(big_endian).view(np.uint8).reshape(len(ids), -1)
        text[ids == 0] = 0
        return text

    def extent(self, block: NDArray[np.uint8]) -> int:
        return len(block)

    def create(self, folder: Path, piece: Split) -> None:
        (folder / piece.name).touch(exist_ok=False)

    def write(self, folder: Path, piece: Split, place: int, block: NDArray[np.uint8]) -> None:
        with (folder / piece.name).open("r+b") as file:
            file.seek(place)
            file.write(block.data)


# --- arrays

Arrays = tuple[NDArray[np.bool_], NDArray[Any], NDArray[np.int32]]
"""Labels [rows], numbers [rows, columns], ids [columns, rows]."""


class Npy:
    """TorchRec's three arrays per day."""

    def __init__(self, log: Log, cardinalities: tuple[int, ...], num_numerical: int) -> None:
        self._shape = (num_numerical, len(cardinalities))

    def encode(self, rows: LogRows) -> Arrays:
        # TorchRec takes a missing integer for a 0, so that it is ln 3 there, not 0.
        counts = np.where(rows.numerical == MISSING, 0, rows.numerical)
        return rows.labels, np.log(counts + np.float32(3)), rows.categorical

    def extent(self, block: Arrays) -> int:
        return len(block[0])

    def create(self, folder: Path, piece: Split) -> None:
        self._writer(folder, piece, None)

    def write(self, folder: Path, piece: Split, place: int, block: Arrays) -> None:
        self._writer(folder, piece, place).append(*block)

    def _writer(self, folder: Path, piece: Split, first_row: int | None) -> DayWriter:
        day = int(piece.name.removeprefix("day_"))
        return DayWriter(folder, day, piece.stop - piece.start, *self._shape, first_row)


class SplitBinary:
    """The dataset that `trainmark train` reads. The rows need no shuffling."""

    def __init__(self, log: Log, cardinalities: tuple[int, ...], num_numerical: int) -> None:
        self._spec = feature_spec.default_spec(cardinalities, num_numerical)

    def encode(self, rows: LogRows) -> Arrays:
        return rows.labels, log_transform(rows.numerical), rows.categorical

    def extent(self, block: Arrays) -> int:
        return len(block[0])

    def create(self, folder: Path, piece: Split) -> None:
        split_binary.Writer(folder, piece.name, self._spec).close()

    def write(self, folder: Path, piece: Split, place: int, block: Arrays) -> None:
        with split_binary.Writer(folder, piece.name, self._spec, place) as writer:
            writer.append(*block)


FORMATS: dict[str, type[Format]] = {"raw": Raw, "npy": Npy, "split_binary": SplitBinary}
