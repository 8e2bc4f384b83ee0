"""Checkpoints that are written while training goes on.

A step may change the weights as soon as they are copied to host memory; a thread writes the copy.
A GPU copies to pinned memory at the speed of its link, but pinning takes seconds: a thread does it
once, before the first save.

    with Saver(root, HostMemory(copy_bytes(share), device)) as saver:
        saver.save(step, tensors, state, keep=2)  # returns once the tensors may change
        saver.wait()                              # ... once the checkpoint is on disk
"""

import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor

from trainmark.checkpoint import checkpoints
from trainmark.checkpoint.checkpoints import Unwritten
from trainmark.checkpoint.writer import Piece, Share
from trainmark.hardware.allocator import use_huge_pages
from trainmark.hardware.pinned import pin, unpin

BLOCK_BYTES = 2**28
"""Pinned at a time, since CUDA may hold up a step meanwhile; larger than any chunk."""
_ALIGNMENT = 64


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is on disk."""

    path: Path
    background_s: float
    """Seconds that a thread took to write it."""


class Saver:
    """Saves one run's checkpoints, one after the other. With ranks, all call its methods alike.

    Args:
        root: the folder of the checkpoints, which all ranks see.
        memory: for a copy of what this rank writes; without it, `save` returns when all is written.
        group: the ranks; no other thread may use it.
    """

    def __init__(self, root: Path, memory: "HostMemory | None" = None, group: Any = None) -> None:
        self.root = root
        self._memory, self._group = memory, group
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._writing: Future[Saved] | None = None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *exc: object) -> None:
        """Whatever ends the run: what is being written is written."""
        self._thread.shutdown()
        if self._memory is not None:
            self._memory.free()

    def save(
        self,
        step: int,
        tensors: dict[str, Tensor],
        state: dict[str, Any],
        keep: int,
        best: int | None = None,
    ) -> None:
        """Save what `checkpoints.plan` takes; wait for the save before this one first."""
        if self._writing is not None:
            raise RuntimeError("Wait for the checkpoint before.")
        unwritten = checkpoints.plan(self.root, step, tensors, state, keep, best, self._group)
        if self._memory is None:
            self._writing = Future()
            self._writing.set_result(Saved(unwritten.write(), 0.0))
        else:
            copied = replace(unwritten, share=self._memory.copy(unwritten.share))
            self._writing = self._thread.submit(_write, copied)

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._writing is None or self._writing.done()

    @property
    def has_failed(self) -> bool:
        """Whether `wait` would raise at once. Ranks may learn of it at different moments."""
        writing = self._writing
        return writing is not None and writing.done() and writing.exception() is not None

    def finish(self) -> None:
        """Wait for the save under way, whether it succeeds or not."""
        if self._writing is not None:
            wait([self._writing])

    def wait(self) -> Saved | None:
        """Wait for the checkpoint that `save` began; None if there is none to wait for.

        Raises:
            InputError: it could not be written.
        """
        writing, self._writing = self._writing, None
        return writing.result() if writing is not None else None


def _write(unwritten: Unwritten) -> Saved:
    began = time.perf_counter()
    path = unwritten.write()
    return Saved(path, time.perf_counter() - began)


# --- a copy on the host


def copy_bytes(share: Share) -> int:
    """Host memory that a copy of a rank's share takes."""
    return _layout(share.pieces)[1]


class HostMemory:
    """Memory for a copy of what a rank saves, used for one save after the other.

    Args:
        num_bytes: as `copy_bytes` counts them.
        device: where the tensors are; for a GPU, a thread pins the memory.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
        self._device = device
        self._pinned: list[Tensor] = []
        self._stop = Event()
        self._pinning = Thread(target=self._pin, name="pinning", daemon=True)
        if device.type == "cuda":
            self._pinning.start()

    def _pin(self) -> None:
        use_huge_pages(self._bytes)
        for block in self._bytes.split(BLOCK_BYTES):
            # Memory that cannot be pinned only takes more time to copy to.
            if self._stop.is_set() or pin(block, self._device):
                return
            self._pinned.append(block)

    def copy(self, share: Share) -> Share:
        """Copy a share into this memory."""
        self._end_pinning()
        begins, _ = _layout(share.pieces)
        copies = [
            self._copied(piece.tensor, begin)
            for piece, begin in zip(share.pieces, begins, strict=True)
        ]
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        pieces = zip(share.pieces, copies, strict=True)
        return replace(share, pieces=[replace(piece, tensor=copy) for piece, copy in pieces])

    def _copied(self, tensor: Tensor, begin: int) -> Tensor:
        place = self._bytes[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return place.copy_(tensor, non_blocking=True)

    def free(self) -> None:
        """Give the memory back; nothing may be using it."""
        self._stop.set()
        self._end_pinning()
        for block in self._pinned:
            unpin(block)
        self._pinned = []
        self._bytes = self._bytes[:0].clone()

    def _end_pinning(self) -> None:
        if self._pinning.is_alive():
            self._pinning.join()


def _layout(pieces: Iterable[Piece]) -> tuple[list[int], int]:
    """Where each piece's copy begins, and where the last one ends. No copy crosses a border between
    blocks, because CUDA only copies to memory that was pinned in one call."""
    begins, end = [], 0
    for size in (piece.tensor.nbytes for piece in pieces):
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        if begin // BLOCK_BYTES != (begin + size - 1) // BLOCK_BYTES:
            begin = -(-begin // BLOCK_BYTES) * BLOCK_BYTES
        begins.append(begin)
        end = begin + size
    return begins, end
