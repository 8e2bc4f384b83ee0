"""Checkpoints of a GPU's tensors, by way of pinned memory: the bytes of those that training waits
for."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint_tensors import STATE, save_checkpoint
from tests.small import snapshot
from tests.unit.test_saver import all_kinds
from trainmark.checkpoint import saver as savers
from trainmark.checkpoint import writer as checkpoint_writer
from trainmark.checkpoint.saver import HostMemory, Saver, copy_bytes
from trainmark.checkpoint.writer import plan_share

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)


def test_pinned_copies_have_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writer, "CHUNK_BYTES", 2**16)
    monkeypatch.setattr(savers, "BLOCK_BYTES", 2**20)  # some of which are pinned in one call
    tensors: dict[str, Any] = {name: tensor.to(GPU) for name, tensor in all_kinds().items()}
    tensors |= {"table": torch.rand(50_000, 128, device=GPU), "step": torch.tensor(3)}
    expected = snapshot(save_checkpoint(tmp_path / "waited for", 7, tensors, STATE, keep=1))
    memory = HostMemory(copy_bytes(plan_share(tensors)), GPU)
    with Saver(tmp_path / "beside", memory) as saver:
        for _ in range(2):
            saver.save(7, tensors, STATE, keep=1)
            before = {name: tensor.clone() for name, tensor in tensors.items()}
            for tensor in tensors.values():
                tensor.zero_()
            written = saver.wait()
            assert written is not None
            assert snapshot(written.path) == expected
            for name, tensor in tensors.items():
                tensor.copy_(before[name])
        assert len(memory._pinned) == -(-len(memory._bytes) // 2**20)
    assert not memory._pinned
