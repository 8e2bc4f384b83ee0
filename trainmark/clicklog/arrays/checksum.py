"""A checksum at the speed of memory, against files that a crash left short, torn or zeroed."""

from pathlib import Path
from typing import Any

import numpy as np

_READ_BYTES = 1 << 22


class Checksum:
    """The sum of a file's 64-bit words (the last one filled up with zeros), and its size."""

    def __init__(self) -> None:
        self.size = 0
        self._sum = 0
        self._rest = b""

    def update(self, data: Any) -> None:
        """Add the bytes of an array or buffer."""
        if isinstance(data, np.ndarray):
            data = data.reshape(-1).view(np.uint8)
        data = memoryview(data)
        self.size += len(data)
        if self._rest:
            missing = 8 - len(self._rest)
            self._rest, data = self._rest + bytes(data[:missing]), data[missing:]
            if len(self._rest) < 8:
                return
            self._sum += int.from_bytes(self._rest, "little")
        whole = len(data) // 8 * 8
        self._sum += int(np.frombuffer(data[:whole], "<u8").sum(dtype=np.uint64))
        self._rest = bytes(data[whole:])

    def value(self) -> list[Any]:
        """For a JSON record."""
        total = self._sum + int.from_bytes(self._rest, "little")
        return [self.size, f"{total % 2**64:016x}"]


def matches(path: Path, expected: list[Any]) -> bool:
    """Whether the file is there and has this size and sum."""
    if not path.is_file() or path.stat().st_size != expected[0]:
        return False
    return of_file(path) == expected


def of_file(path: Path) -> list[Any]:
    """For a JSON record."""
    checksum = Checksum()
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            checksum.update(data)
    return checksum.value()
