"""benchmarks/dlrm_dcnv2.py at tiny sizes on the CPU: ours beside FBGEMM's tables."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import common, dlrm_dcnv2, dlrm_peers, dlrm_systems, timing
from trainmark.workloads.dlrm.runs import Optimizer

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlrm_dcnv2, "POOL", 2)
    monkeypatch.setattr(timing, "WINDOW", 1)
    monkeypatch.setattr(timing, "WARMUP", 1)

    def here(work: Callable[[], None]) -> bool:
        """Not in a process, which a test's threads would not survive."""
        try:
            work()
        except Exception as error:
            print(error)
            return False
        return True

    monkeypatch.setattr(common, "in_a_process", here)


def measured(folder: Path, *flags: str) -> list[dict[str, Any]]:
    words = ["--tiny", "--batch", "32", "--seconds", "0", "--output", str(folder)]
    dlrm_dcnv2.main([*words, *flags])
    return common.read_rows("dlrm_dcnv2_h200_tiny", folder)


def test_rows_of_both_systems(tmp_path: Path) -> None:
    if reason := dlrm_peers.missing("fbgemm"):
        pytest.skip(reason)
    rows = measured(tmp_path)
    assert [(row["system"], row["mlp_precision"], row["indices"]) for row in rows] == [
        ("trainmark", "bf16", "uniform"), ("trainmark", "bf16", "power_law"),
        ("trainmark", "fp8", "uniform"), ("trainmark", "fp8", "power_law"),
        ("fbgemm", "bf16", "uniform"), ("fbgemm", "bf16", "power_law"),
    ]  # fmt: skip
    for row in rows:
        assert row["samples_per_s"] * row["step_ms"] == pytest.approx(32 * 1000)
        assert 0.5 < row["loss"] < 1
    ours, peer = rows[0], rows[4]
    assert ours["ratio"] == {"fbgemm": ours["samples_per_s"] / peer["samples_per_s"]}
    assert (ours["tables_precision"], ours["optimizer"]) == ("bf16", "adagrad")
    assert (peer["tables_precision"], peer["optimizer"]) == ("fp16", "rowwise_adagrad")
    assert "one sum for each row" in peer["note"]


def test_an_error_of_one_system_ends_its_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(dlrm_dcnv2, "fbgemm_rows", fails)
    assert len(measured(tmp_path, "--ids", "uniform", "--mlps", "bf16")) == 1
    assert "fbgemm: failed" in capsys.readouterr().out
    monkeypatch.setattr(dlrm_dcnv2, "trainmark_rows", fails)
    rows = measured(
        tmp_path, "--ids", "uniform", "--mlps", "bf16"
    )  # what was measured before stays
    assert [row["system"] for row in rows] == ["trainmark"]
    assert "trainmark bf16 bf16: failed" in capsys.readouterr().out


def test_the_peer_trains_as_we_do() -> None:
    """In fp32, and with our row-wise Adagrad."""
    if reason := dlrm_peers.missing("fbgemm"):
        pytest.skip(reason)
    lr, small = 0.05, {"table_rows": (30, 200, 7)}
    run = dlrm_systems.with_changes(dlrm_dcnv2.dlrm_dcnv2(), {"model": dlrm_dcnv2.TINY | small})
    changes = {"data": "synthetic", "global_batch": 64, "precision": "fp32"}
    changes |= {"optimizer": Optimizer(name="rowwise_adagrad", eps=1e-3), "multi_hot": "uniform"}
    cfg = dlrm_systems.resolved(run, changes, CPU)
    cfg = dlrm_systems.with_changes(cfg, {"multi_hot": "data"})
    ours = dlrm_systems.trainer_for(cfg, CPU)
    setting = dlrm_peers.Setting(
        model=cfg.model, lr=lr, device=CPU, precision="fp32", compile=False
    )
    peer = dlrm_dcnv2.Fbgemm(setting, cfg, "FP32")
    weights = ours.weights()
    with torch.no_grad():
        for i, table in enumerate(peer.tables):
            table.copy_(weights[f"tables.{i}.weight"])
        for name, weight in peer.dense.state_dict().items():
            weight.copy_(weights[name.replace("cross.", "interaction.cross.")])
    # Row-wise Adagrad is for tables alone in FBGEMM: ours uses Adagrad for the rest, as the peer.
    pool = dlrm_dcnv2.batches(cfg, "power_law", CPU) * 2
    theirs = [loss.item() for loss in peer.train([peer.batch(batch) for batch in pool])]
    found = [dlrm_systems.step(ours, ours.prepare(batch), lr).item() for batch in pool]
    assert found == pytest.approx(theirs, rel=1e-5)
    assert found[-1] < found[0]
    for i, table in enumerate(peer.tables):
        expected = ours.weights()[f"tables.{i}.weight"]
        torch.testing.assert_close(table, expected, rtol=1e-4, atol=1e-5)
