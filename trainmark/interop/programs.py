"""Programs of `torch.export`, whose writer in C++ ends the process where a disk is full."""

import io
from pathlib import Path
from typing import IO, Any, cast

import torch


def save_program(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write a program; a full disk is an OSError."""
    with path.open("wb") as file:
        kept = _KeepsErrors(file)
        torch.export.save(program, cast(IO[bytes], kept))
        if kept.error is not None:
            raise kept.error


class _KeepsErrors(io.RawIOBase):
    """A file that takes everything: the writer, whose destructor writes too, must see no error."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        return size

    def flush(self) -> None:
        if self.error is None and not self._file.closed:
            try:
                self._file.flush()
            except OSError as error:
                self.error = error

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return offset  # asked for after the last byte only
