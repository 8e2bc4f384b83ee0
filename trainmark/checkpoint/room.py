"""Room on disk for a checkpoint: how much it takes, and whether it is there."""

import re
import shutil
from collections import ChainMap
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from trainmark.checkpoint.boxes import SavePlanner
from trainmark.checkpoint.writer import byte_length
from trainmark.distributed.mesh import is_distributed, of_all_ranks
from trainmark.errors import InputError
from trainmark.formatting import readable_size

_LEFTOVER = re.compile(r"\.(writing|removing)-step-.*")


def check_room(root: Path, tensors: dict[str, Tensor]) -> None:
    """Refuse a disk without room for a checkpoint of `tensors`, on all ranks alike.

    Rank 0 looks: the folder is one that all ranks see.
    """
    needed_bytes = bytes_to_write(tensors)
    refusal: Exception | None = None
    if not is_distributed() or dist.get_rank() == 0:
        try:
            make_room(root, needed_bytes)
        except (InputError, OSError) as error:
            refusal = error
    if (refusal := of_all_ranks(refusal)[0]) is not None:
        raise refusal


def bytes_to_write(tensors: dict[str, Tensor]) -> int:
    """What all ranks together write of their tensors: what several of them hold, once."""
    planner = SavePlanner()
    planner.set_up_planner(tensors)
    own = {item.index: byte_length(item) for item in planner.create_local_plan().items}
    return sum(ChainMap(*of_all_ranks(own)).values())


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
