"""Room on disk for a checkpoint."""

import re
import shutil
from pathlib import Path

import torch.distributed as dist

from trainmark.distributed.mesh import agreed, is_distributed
from trainmark.errors import InputError
from trainmark.formatting import readable_size

_LEFTOVER = re.compile(r"\.(writing|removing)-step-.*")


def check_room(root: Path, needed_bytes: int) -> None:
    """Refuse a disk without room for a checkpoint, on all ranks alike.

    Only rank 0 looks, because all ranks see the same folder.
    """

    def look() -> None:
        if not is_distributed() or dist.get_rank() == 0:
            make_room(root, needed_bytes)

    agreed(look)


def make_room(root: Path, needed_bytes: int) -> None:
    """Remove what killed processes were writing or deleting, then look at the free space."""
    root.mkdir(parents=True, exist_ok=True)
    for path in root.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path)
    free_bytes = shutil.disk_usage(root).free
    if needed_bytes > free_bytes:
        raise InputError(
            f"A checkpoint in {root} needs {readable_size(needed_bytes)} and the disk has "
            f"{readable_size(free_bytes)} free. Free some space, or write to another disk."
        )
