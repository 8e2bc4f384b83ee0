"""Writing files so that a reader sees the old content or the new one, never half of it; sizes."""

import contextlib
import errno
import os
from pathlib import Path
from typing import Any


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text`, durably."""
    temporary = path.with_name(f".{path.name}.writing")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # where nothing can be written, nothing was
            temporary.unlink()
        error.filename, error.filename2 = str(path), None  # the one that the user knows
        raise


def write_tensors(path: Path, tensors: dict[str, Any]) -> None:
    """A safetensors file as Hugging Face's software expects it; a failure is an `OSError`."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(path)) from error
    # safetensors leaves the file to its owner alone; like any other it should be as umask says.
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def fsync_folder(folder: Path) -> None:
    """Make a rename inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def readable_size(num_bytes: int) -> str:
    """Bytes as people read them: 10 bytes, 1.50 MiB, 421.77 GiB."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 2**power:
            return f"{num_bytes / 2**power:.2f} {unit}"
    return f"{num_bytes} bytes"
