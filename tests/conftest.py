"""What all tests share."""

import multiprocessing
import os
from collections.abc import Iterator

# One thread each: two test processes with two threads each on two cores wait for one another.
# Set before torch is imported, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import torch.distributed as dist

from trainmark.hardware.amx import avoid_missing_amx

avoid_missing_amx()

# A skip that is not named in skips.py fails the session; shards.py has `--shard`.
pytest_plugins = ["tests.skips", "tests.shards"]

# Triton reads this when it is imported. Without a GPU, kernels are tested in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What ranks are forked from; torch imports the last when something is first trained.
multiprocessing.set_forkserver_preload(
    ["tests.distributed.dlrm_ranks", "tests.distributed.llama3_ranks", "torch._dynamo"]
)


@pytest.fixture
def no_process_group_is_left() -> Iterator[None]:
    """An exchange with oneself makes one, and so does TorchRec."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
