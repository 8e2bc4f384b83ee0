"""What a process makes of being a rank; no process group is needed to see it."""

import dataclasses

import pytest
import torch

from trainmark import runner, workloads


def test_a_ranks_current_device_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    cfg = dataclasses.replace(workloads.named_run("dlrm-demo"), device="cuda")
    with runner._joined(cfg) as mesh:
        assert mesh.device == torch.device("cuda", 3)
    assert chosen == [mesh.device]
