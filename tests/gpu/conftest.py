"""What a test sets for the whole process is set back, whatever runs after it."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    if dist.is_initialized():
        dist.destroy_process_group()
