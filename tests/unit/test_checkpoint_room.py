"""Room for a checkpoint of several ranks: counted as it is written, refused on all of them."""

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests import rank_processes
from tests.checkpoint_tensors import save_checkpoint
from tests.distributed.joining import join
from tests.distributed.test_loop_on_ranks import BASE, CPU, run
from trainmark.checkpoint import folders
from trainmark.checkpoint.local_shards import LocalShard, LocalShards
from trainmark.checkpoint.manifest import read_manifest
from trainmark.checkpoint.room import check_room
from trainmark.checkpoint.writer import plan_share
from trainmark.distributed import mesh as meshes
from trainmark.errors import InputError

BYTES = 4 * (37 * 6 + 11 + 9 + 2 * 5 * 3 + 7 * 3)


def tensors_of(rank: int) -> dict[str, Any]:
    """A tensor in two shards, one that both hold, one that each has, shards of which one is a copy.

    In all 37 x 6, 11, 9 on rank 1 alone, two shards of 5 x 3, and 7 x 3 of which rank 1 has a copy.
    """
    mesh = init_device_mesh("cpu", (2,))
    alone = {"alone": torch.ones(9)} if rank == 1 else {}
    shards = [
        LocalShard(offsets=(5 * rank, 0), tensor=torch.ones(5, 3)),
        LocalShard(offsets=(10, 0), tensor=torch.ones(7, 3), is_copy=rank == 1),
    ]
    return alone | {
        "sharded": distribute_tensor(torch.ones(37, 6), mesh, [Shard(0)]),
        "same": torch.ones(11),
        "table": LocalShards((17, 3), shards),
    }


def with_free(num_bytes: int) -> None:
    """The disk, as this process sees it from now on."""
    shutil.disk_usage = lambda _: SimpleNamespace(free=num_bytes)  # type: ignore


def two_ranks(rank: int, folder: Path) -> None:
    join(rank, 2, folder / "store")
    tensors = tensors_of(rank)
    assert plan_share(tensors).all_bytes == BYTES
    with_free(BYTES)
    check_room(folder / "enough", BYTES)
    save_checkpoint(folder / "enough", 1, tensors, {}, keep=1)

    # Only rank 0's look counts, and both are told.
    with_free(BYTES - 1 if rank == 0 else BYTES)
    with pytest.raises(InputError, match=r"needs 1\.1 KiB and the disk has .* KiB free"):
        check_room(folder / "full", BYTES)
    (folder / "a file").touch()
    with pytest.raises(OSError, match="exists"):
        check_room(folder / "a file", BYTES)

    with_free(10)
    cfg = dataclasses.replace(BASE, checkpoint_every="10 minutes")
    found = run(cfg, meshes.build(CPU, {"pp": 2, "dp": 1}), folder / "run")
    assert "and the disk has 10 bytes free" in found["ended"]
    assert found["step"] == 0
    dist.destroy_process_group()


def test_two_ranks_refuse_a_full_disk_before_the_first_step(tmp_path: Path) -> None:
    rank_processes.run(two_ranks, tmp_path, world=2)
    (path,) = folders.all_checkpoints(tmp_path / "enough")
    chunks = [chunk for entry in read_manifest(path).tensors.values() for chunk in entry.chunks]
    assert sum(chunk.byte_length for chunk in chunks) == BYTES
    assert not any((tmp_path / "full").iterdir())
