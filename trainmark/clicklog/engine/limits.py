"""Memory and processes of a preparation. They never change the result."""

import os
import re
from dataclasses import dataclass

import psutil

from trainmark.errors import InputError

LIBRARY_BYTES = 256 << 20
"""What Python and its libraries take when all are loaded."""
WORKER_BYTES = 24 << 20
"""What a process takes besides what it shares with the one that it was forked from."""
MIN_DATA_BYTES = 64 << 20
MIN_WORKER_DATA_BYTES = 24 << 20
MIN_PIECE_BYTES, MAX_PIECE_BYTES = 8 << 20, 64 << 20
PIECES = 4
"""For each process, where there is input enough: those that end early take more of them."""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Limits:
    """Bounds for one run."""

    memory: int
    """Bytes for the data of all processes together."""
    workers: int
    """Processes that share the work."""
    piece_bytes: int
    """Input that is parsed at a time, at most."""

    @classmethod
    def of(cls, memory: str | None) -> "Limits":
        """Limits that keep a run within `memory`; None: a quarter of the machine."""
        total = num_bytes(memory) if memory else psutil.virtual_memory().total // 4
        used = max(psutil.Process().memory_info().rss, LIBRARY_BYTES)
        available = total - used
        if available < MIN_DATA_BYTES:
            needed = used + MIN_DATA_BYTES
            raise InputError(
                f"--memory is {total >> 20} MiB; at least {needed >> 20} MiB are needed."
            )
        most = available // (WORKER_BYTES + MIN_WORKER_DATA_BYTES)
        workers = max(min(len(os.sched_getaffinity(0)), most), 1)
        if workers > 1:
            available -= workers * WORKER_BYTES
        return cls(available, workers, min(available // (8 * workers), MAX_PIECE_BYTES))

    def piece_bytes_of(self, whole: int) -> int:
        """What is parsed at a time of an input of so many bytes, all processes having a share."""
        share = max(whole // (PIECES * self.workers), MIN_PIECE_BYTES)
        return min(share, self.piece_bytes)


def num_bytes(text: str) -> int:
    """Bytes of a size such as 512M or 1.5G."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise InputError(f"--memory is {text!r}; a size such as 512M or 4G is expected.")
    return int(float(match[1]) * _UNITS[match[2].upper()])
