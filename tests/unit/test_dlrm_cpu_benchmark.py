"""The two systems of benchmarks/dlrm_cpu.py do the same mathematics."""

from types import ModuleType

import pytest
import torch

from benchmarks import dlrm_cpu
from trainmark.distributed.mesh import Mesh
from trainmark.workloads.dlrm.data import build_data
from trainmark.workloads.dlrm.model import build_model, init_weights
from trainmark.workloads.dlrm.runs import Model
from trainmark.workloads.dlrm.step import build_trainer


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(dlrm_cpu, "BATCH", 256)
    monkeypatch.setattr(dlrm_cpu, "POOL", 4)
    return dlrm_cpu


@pytest.fixture
def shape(benchmark: ModuleType) -> object:
    rows = (300, 200, 150)  # small, so that ids repeat within a batch; one integer type
    model = Model(table_rows=rows, embedding_dim=8, bottom_mlp=(16, 8), top_mlp=(32, 1))
    return benchmark.Shape(about="tiny", model=model, steps=3)


def test_steps_of_ours_and_of_the_peer_agree(benchmark: ModuleType, shape: object) -> None:
    cfg, device = shape.cfg, torch.device("cpu")
    model = build_model(cfg)
    init_weights([model], cfg, device)
    ours, peer = build_trainer([model], Mesh(device), cfg), benchmark.PlainTrainer(cfg)
    with torch.no_grad():
        tables = model.tables.table_weights().values()
        for mine, bag in zip(tables, peer.model.tables, strict=True):
            bag.weight.copy_(mine)
        for name in ("bottom", "top"):
            for mine, plain in zip(
                getattr(model, name).parameters(),
                getattr(peer.model, name).parameters(),
                strict=True,
            ):
                plain.copy_(mine[:, : plain.shape[1]] if mine.dim() == 2 else mine)  # no padding
    for batch in build_data(cfg, "train", 0, 1):
        loss, skipped = ours.step(ours.prepare(batch), benchmark.LR)
        assert not skipped
        torch.testing.assert_close(loss, peer.step(benchmark._ready_made(batch)))
    for mine, bag in zip(tables, peer.model.tables, strict=True):
        torch.testing.assert_close(mine, bag.weight.detach())
    torch.testing.assert_close(model.bottom[0].weight, peer.model.bottom[0].weight)


@pytest.mark.parametrize("system", ["trainmark", "pytorch"])
def test_every_part_is_measured(
    benchmark: ModuleType, shape: object, system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if system == "trainmark":  # the setting would stay on for the other tests of this process
        monkeypatch.setattr(benchmark, "keep_freed_memory", lambda: True)
    found = benchmark.measure(shape, system)
    parts = found["split_s"]
    assert list(parts) == list(benchmark.PARTS)
    assert all(parts[p] > 0 for p in parts if p != "prepare")
    assert (parts["prepare"] > 0) == (system == "trainmark")


def test_ratios_and_rows(benchmark: ModuleType) -> None:
    def rounds(*steps: float) -> list[dict[str, object]]:
        split = dict.fromkeys(benchmark.PARTS, 0.1)
        return [{"step_s": s, "split_s": split, "peak_bytes": 1} for s in steps]

    found = {case: rounds(1.0, 2.0, 4.0) for case in benchmark.CASES}
    found["embeddings", "pytorch"] = rounds(1.2, 3.0, 8.0)  # ratios 1.2, 1.5, 2
    found["rows-10m", "trainmark"] = rounds(1.6, 3.2, 6.4)
    row = benchmark._row("embeddings", "trainmark", found)
    assert row["samples_per_s"] == benchmark.BATCH / 2.0
    (first, second) = row["ratios"]
    assert first["value"] == pytest.approx(1.5)
    assert first["target"] == {"at_least": 1.3}
    assert first["reached"]
    assert second["value"] == 1.0
    (growth,) = benchmark._row("rows-10m", "trainmark", found)["ratios"]
    assert growth["value"] == pytest.approx(1.6)
    assert not growth["reached"]
    assert benchmark._row("embeddings", "pytorch+kept", found)["system"] == "pytorch"
