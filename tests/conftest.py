"""What all tests share."""

import multiprocessing
import os
import signal
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

# Tests send these to processes, which would ignore them if this one does: what a shell starts in
# the background ignores Ctrl-C, and what nohup starts a closed terminal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# Triton reads this when it is imported. Without a GPU, kernels are tested in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What ranks are forked from; torch imports the last when something is first trained.
multiprocessing.set_forkserver_preload(
    ["tests.distributed.dlrm_ranks", "tests.distributed.llama3_ranks", "torch._dynamo"]
)


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup() -> None:
    """Random numbers do not depend on which tests ran before."""
    torch.default_generator.manual_seed(0)


@pytest.fixture
def no_process_group_is_left() -> Iterator[None]:
    """An exchange with oneself makes one, and so does TorchRec."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
