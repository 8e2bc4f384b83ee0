"""What a process looks at before it trains as a rank; no process group is needed to see it."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.small import config, train
from trainmark import workloads
from trainmark.errors import InputError
from trainmark.hardware import backends, devices
from trainmark.hardware.devices import Cluster
from trainmark.run import process
from trainmark.workloads import resolve
from trainmark.workloads.dlrm.runs import Sharding


def test_a_ranks_current_device_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(backends, "here", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    cfg = dataclasses.replace(workloads.named_run("dlrm-demo"), device="cuda")
    with process.joined(cfg) as mesh:
        assert mesh.device == torch.device("cuda", 3)
    assert chosen == [mesh.device]
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    with pytest.raises(InputError, match="for device 3 of this machine, which has 3"):
        process.joined(cfg).__enter__()


@pytest.mark.parametrize("name", ["dlrm-demo", "distilbert-demo", "llama3-demo"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_demo_runs_on_any_number_of_ranks(name: str, ranks: int) -> None:
    """Only the launch line changes: the batch is shared, and not a rank's part of it fixed."""
    named = workloads.named_run(name)
    run = resolve(dataclasses.replace(named, device="cpu"), Cluster("cpu", 1, ranks))
    assert run.global_batch == named.global_batch
    assert (run.micro_batch, run.accumulate) == (named.global_batch // ranks, 1)


def test_tables_in_host_memory_must_fit_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free = 64 * 2**20
    monkeypatch.setattr(devices, "host_memory_bytes", lambda: free)
    table_bytes = 2 * 8 * 4  # of a row: 8 numbers of weights, and as many of Adagrad's state
    rows = free // table_bytes + 1
    words = ("--model.table-rows", str(rows), "7", "3", "--host-tables", "0")
    assert train(tmp_path / "run", *words) == 2
    assert "tables in host memory need 64.0 MiB on this machine" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("engine", ["native", "torchrec"])
def test_a_group_for_the_exchange_with_oneself_goes_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    if engine == "torchrec":
        pytest.importorskip("torchrec")
    made: list[int] = []
    init = dist.init_process_group
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **k: made.append(1) or init(*a, **k))
    words = ("--force-exchange",) if engine == "native" else ("--engine", "torchrec")
    assert train(tmp_path / "run", *words, "--max-steps", "2") == 0
    assert made
    assert not dist.is_initialized()


def test_host_bytes_are_those_of_each_devices_own_tables() -> None:
    sharding = Sharding(placement="round_robin", host_tables=(0, 1))
    run = dataclasses.replace(config(), sharding=sharding, micro_batch=None)
    cfg = resolve(run, Cluster("cpu", 1, 2))
    assert workloads.load("dlrm").host_bytes(cfg) == [50 * 2 * 8 * 4, 7 * 2 * 8 * 4]
