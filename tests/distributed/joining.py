"""How a test's process becomes a rank: of gloo on CPUs, or of NCCL, with all ranks on one GPU."""

import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from trainmark.hardware import devices
from trainmark.hardware.devices import Cluster

ONE_GPU = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
}


MPS = Path(tempfile.gettempdir()) / "trainmark-tests-mps"
"""Where NVIDIA's Multi-Process Service listens, if `python -m tests.gpu` has started it. Without
it, ranks on one GPU take turns of some milliseconds, which each of them spends waiting for the
others; with it, they run at once. One that is killed can break it, so `broken_rank` is without."""


def share_the_gpu(rank: int) -> None:
    """Let this rank of NCCL use the GPU that other ranks use.

    NCCL refuses two ranks of one host on one device. So each is a host of its own, and they talk
    over sockets: slowly, but by the collectives, streams and graphs of any cluster.
    """
    os.environ.update(ONE_GPU, NCCL_HOSTID=f"host{rank}")


def device_of(kind: str) -> torch.device:
    """The one device of a kind that all ranks use."""
    return torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")


def join(rank: int, world: int, store: Path, kind: str = "cpu") -> torch.device:
    """Make this process a rank that meets the others in a file; its device."""
    torch.set_num_threads(1)
    device = device_of(kind)
    if kind == "cuda":
        share_the_gpu(rank)
        os.environ["CUDA_MPS_PIPE_DIRECTORY"] = str(MPS)
        torch.accelerator.set_device_index(0)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, f"file://{store}", rank=rank, world_size=world)
    return device


def cluster(device: torch.device, world: int) -> Cluster:
    """What such ranks resolve their runs for."""
    return Cluster(devices.identify(device).key, 1, world)


def add_up(rank: int, world: int, store: Path, kind: str) -> None:
    """A hundred sums over ranks: whether they can be made, and how long they take, is printed."""
    device = join(rank, world, store, kind)
    sums = torch.ones(1, dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    began = time.monotonic()
    for _ in range(100):
        dist.all_reduce(sums)
    assert sums.item() == float(world) ** 101
    if rank == 0:
        print(f"100 sums over {world} ranks took {time.monotonic() - began:.2f} s", flush=True)
    dist.destroy_process_group()
