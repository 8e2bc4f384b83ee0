"""benchmarks/dlrm_gpu.py, dlrm_quality.py and what they are made of, at tiny sizes on the CPU."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import (
    dlrm_clicks,
    dlrm_dataset,
    dlrm_gpu,
    dlrm_peers,
    dlrm_quality,
    dlrm_systems,
    timing,
)
from trainmark import metrics
from trainmark.workloads.dlrm.rows import SplitBinary
from trainmark.workloads.dlrm.runs import dlrm_small

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlrm_systems, "POOL", 2)
    monkeypatch.setattr(timing, "WINDOW", 1)
    monkeypatch.setattr(timing, "WARMUP", 1)


@pytest.fixture
def options(tmp_path: Path) -> dlrm_gpu.Options:
    return dlrm_gpu.Options(
        device=CPU,
        tiny=True,
        seconds=0.0,
        disk_rows=2048,
        scratch=tmp_path / "scratch",
        output=tmp_path,
    )


# --- peers


@pytest.mark.usefixtures("no_process_group_is_left")
@pytest.mark.parametrize("name", ["pytorch", "fbgemm", "torchrec", "torchrec-compiled"])
def test_a_peer_trains_as_we_do(name: str) -> None:
    if reason := dlrm_peers.missing(name):
        pytest.skip(reason)
    # Small tables, so that ids repeat within a batch; dots and zeros to pad in the interaction.
    shape = {"table_rows": (300, 200, 150, 7), "embedding_dim": 8}
    mlps = {"bottom_mlp": (16, 8), "top_mlp": (32, 1)}
    changes = {"data": "synthetic", "model": shape | mlps, "precision": "fp32"}
    cfg = dlrm_systems.resolved(dlrm_small(), changes | {"global_batch": 256}, CPU)
    ours = dlrm_systems.trainer_for(cfg, CPU)
    lr = 0.5
    peer = dlrm_peers.PEERS[name](
        dlrm_peers.Setting(model=cfg.model, lr=lr, device=CPU, precision="fp32", compile=False)
    )
    give_weights(peer, ours.weights())
    clicks = dlrm_systems.random_clicks(cfg.model, 256, "power_law", CPU) * 2
    theirs = peer.train(
        [
            peer.batch(dlrm_peers.Clicks(numerical.float(), ids.long(), labels.float()))
            for numerical, ids, labels in clicks
        ]
    )
    losses = []
    for parts, their_loss in zip(clicks, theirs, strict=True):
        prepared = ours.prepare(dlrm_systems.click_batch(cfg.model.table_rows, *parts))
        losses.append(dlrm_systems.step(ours, prepared, lr).item())
        assert their_loss.item() == pytest.approx(losses[-1], rel=1e-5)
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    for i, table in enumerate(peer.tables):
        torch.testing.assert_close(table, ours.weights()[f"tables.{i}.weight"])


@torch.no_grad()
def give_weights(peer: Any, weights: dict[str, torch.Tensor]) -> None:
    for i, table in enumerate(peer.tables):
        table.copy_(weights[f"tables.{i}.weight"])
    if hasattr(peer, "dense"):
        for key, weight in peer.dense.state_dict().items():
            weight.copy_(weights[key])
        return
    # TorchRec's own network lists the pairs of vectors by the first of them, and pads nothing.
    pairs = [b * (b - 1) // 2 + a for a, b in itertools.combinations(range(5), 2)]
    columns = [*range(8), *(8 + pair for pair in pairs)]
    ours = {name: w for name, w in weights.items() if not name.startswith("tables")}
    ours["top.0.weight"] = ours["top.0.weight"][:, columns]
    for theirs, mine in zip(peer.mlps.values(), ours.values(), strict=True):
        theirs.copy_(mine)


# --- clicks


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.2])
def test_ids_have_the_stated_frequencies(exponent: float) -> None:
    rows, draws = 50, 200_000
    random = torch.Generator().manual_seed(1)
    ids = dlrm_clicks.draw_ids((rows, 3), draws, exponent, random)
    assert ids.dtype == torch.int32
    assert ids[1].max() == 2
    x = np.linspace(1, rows + 1, 1000 * rows + 1)  # the density, integrated from row to row
    density = ((x[1:] + x[:-1]) / 2) ** -exponent
    share = density.reshape(rows, -1).sum(1) / density.sum()
    found = np.bincount(ids[0], minlength=rows)
    assert len(found) == rows
    assert (np.abs(found - draws * share) < 5 * np.sqrt(draws * share)).all()
    np.testing.assert_allclose(dlrm_clicks.chances(rows, exponent, CPU), share, rtol=1e-5)


def test_every_row_of_a_large_table_can_be_drawn() -> None:
    (ids,) = dlrm_clicks.draw_ids((8_000_000,), 400_000, 1.0, torch.Generator().manual_seed(1))
    tail = ids[ids > 4_000_000]
    assert len(tail) > 10_000
    assert tail.unique().numel() > 0.99 * len(tail)  # at random, not on a grid of floats
    assert (tail % 2).float().mean() == pytest.approx(0.5, abs=0.02)


def test_large_tables_carry_signal() -> None:
    study = dlrm_quality.STUDIES["hundredth"]
    stream = dlrm_clicks.PlantedStream(study.signal, CPU)
    block = stream.block("test", 0, 100_000)
    assert block.labels_B.float().mean() == pytest.approx(study.signal.click_rate, abs=0.01)
    best = metrics.auc(block.logits_B, block.labels_B)
    assert best is not None
    assert 0.75 < best < 0.85
    terms = stream._terms(block.numerical_BN, block.ids_FB)
    for dropped in (0, 2):  # terms of the large tables' rows, and their vectors' products
        scales = [0 if i == dropped else scale for i, scale in enumerate(stream._scales)]
        scaled = [scale * term for scale, term in zip(scales, terms, strict=True)]
        without = torch.stack(scaled).sum(0)
        worse = metrics.auc(without, block.labels_B)
        assert worse is not None
        assert worse < best - 0.03
    again, other = stream.block("test", 0, 100_000), stream.block("test", 1, 100_000)
    torch.testing.assert_close(again.ids_FB, block.ids_FB)
    assert not torch.equal(other.ids_FB, block.ids_FB)


def test_written_dataset_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlrm_dataset, "BLOCK_ROWS", 1000)
    rows = (40_000, 300, 5)
    size = dlrm_dataset.write_dataset(tmp_path / "data", rows, 3, 2500, "uniform")
    assert size == 2 * 2500 * (3 * 2 + 1 + 4 + 2 + 1)  # train and test
    assert SplitBinary(tmp_path / "data", "train").num_rows == 2500
    dtypes: dict[str, Any] = {
        "label": np.bool_,
        "cat_0": np.int32,
        "cat_1": np.int16,
        "cat_2": np.int8,
    }
    columns = {
        name: np.fromfile(tmp_path / f"data/train/{name}.bin", dtype)
        for name, dtype in dtypes.items()
    }
    numerical = np.fromfile(tmp_path / "data/train/numerical.bin", np.float16).reshape(-1, 3)
    for start in range(0, 2500, 500):  # every block was written, each with rows of its own
        part = slice(start, start + 500)
        assert columns["label"][part].mean() == pytest.approx(0.2, abs=0.08)
        assert numerical[part].astype(float).std() == pytest.approx(1, abs=0.1)
        for i, count in enumerate(rows):
            ids = columns[f"cat_{i}"][part]
            assert ids.mean() == pytest.approx(count / 2, rel=0.15, abs=0.6)
            assert ids.min() >= 0
            assert ids.max() < count
    assert len(np.unique(columns["cat_0"])) > 2300


# --- speed

KEYS = {
    "system", "size", "batch", "indices", "source", "tables_precision", "mlp_precision",
    "samples_per_s", "step_ms", "split_ms", "memory_gib",
}  # fmt: skip


def test_rows_of_resident_batches(options: dlrm_gpu.Options) -> None:
    for system in ("trainmark", "pytorch", "pytorch"):  # the second replaces the first
        dlrm_gpu.measure(dlrm_gpu.Case(system=system, size="small", batch=64), options)
    rows = dlrm_gpu.read_rows(options)
    assert len(rows) == 4
    for row in rows:
        assert row.keys() >= KEYS
        assert row["samples_per_s"] * row["step_ms"] == pytest.approx(64 * 1000)
        assert row["split_ms"]["mlp"] > 0
    ours, peer = rows[0], rows[2]
    assert [r["indices"] for r in rows] == ["power_law", "uniform"] * 2
    assert ours["ratio"] == {"pytorch": ours["samples_per_s"] / peer["samples_per_s"]}
    assert "ratio" not in peer
    assert dlrm_gpu.measured_already(
        dlrm_gpu.Case(system="pytorch", size="small", batch=64), options
    )
    assert not dlrm_gpu.measured_already(
        dlrm_gpu.Case(system="pytorch", size="small", batch=32), options
    )
    dlrm_gpu.show(rows)


def test_a_row_from_disk_goes_through_train(options: dlrm_gpu.Options) -> None:
    options.scratch.mkdir()
    case = dlrm_gpu.Case(
        system="trainmark", size="small", batch=256, source="disk", indices=("power_law",)
    )
    dlrm_gpu.measure(case, options)
    (row,) = dlrm_gpu.read_rows(options)
    assert row.keys() >= KEYS
    assert row["source"] == "disk"
    assert row["samples"] == 2048 - 2 * 256  # without the warm-up
    assert row["p_core"] >= row["samples_per_s"] > 0
    assert not (options.scratch / "data").exists()


def test_every_case_says_what_it_cannot_do(options: dlrm_gpu.Options) -> None:
    case = dlrm_gpu.Case(system="trainmark", size="small", batch=64, mlp_precision="fp7")
    assert "fp7" in str(dlrm_gpu.skipped(case, options))
    assert (
        dlrm_gpu.skipped(dlrm_gpu.Case(system="trainmark", size="small", batch=64), options) is None
    )
    named = [(c.size, c.batch, c.source) for c in dlrm_gpu._cases() if c.system == "trainmark"]
    for size in ("small", "large", "xlarge"):
        assert (size, 65536, "resident") in named
        assert (size, 262144, "resident") in named
        assert (size, 65536, "disk") in named
    assert {c.system for c in dlrm_gpu._cases()} == {"trainmark", *dlrm_peers.PEERS}


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NTN", "mlp"),
        ("triton_poi_fused__to_copy_cat_index_select_3", "mlp"),
        ("_masked_gemm_kernel", "mlp"),
        ("_column_sums_kernel", "mlp"),
        ("_quantize_kernel", "mlp"),
        ("_mask_codes_kernel", "mlp"),
        ("_click_loss_kernel", "mlp"),
        ("void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<...>", "sort"),
        ("split_embedding_backward_codegen_sgd_unweighted_kernel_warp_per_row_1", "update"),
        ("split_embedding_codegen_forward_unweighted_v2_kernel", "forward"),
        ("void split_embedding_codegen_forward_kernel<float>(fbgemm_gpu::Args)", "forward"),
        ("void bounds_check_indices_kernel_v1<long, false>(fbgemm_gpu::Args)", "sort"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32", "mlp"),
        ("_update_kernel", "update"),
        ("_forward_kernel", "forward"),
        ("_backward_kernel", "backward"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "exchange"),
        ("_copy_kernel", "exchange"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("void at::native::elementwise_kernel<at::native::direct_copy_kernel_cuda(...)>", "copy"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor>", "other"),
    ],
)
def test_kernels_have_their_part(kernel: str, part: str) -> None:
    assert timing.part_of(kernel) == part


# --- quality


def test_variants_are_those_asked_for() -> None:
    variants = [v for seed in range(3) for v in dlrm_quality.variants(seed)]
    three_seeds = [v for v in variants if (v.mlps, v.rounding) == ("bf16", "stochastic")]
    for tables in ("fp32", "bf16", "int8"):
        assert sum(v.tables == tables for v in three_seeds) == 3
    of_fp8 = [v.reference for v in variants if v.mlps == "fp8" and v.tables == "fp32"]
    assert [v.mlps for v in of_fp8 if v] == ["fp32", "bf16", "bf16"]
    assert len({dataclasses.astuple(v) for v in variants}) == len(variants) == 18
    (nearest,) = [v for v in variants if v.rounding == "nearest"]
    stored = {"table_precision": "int8", "table_rounding": "nearest"}
    assert nearest.changes("sgd")["table_format"] == stored
    assert nearest.reference == dlrm_quality.Variant(tables="fp32")


def test_a_second_call_trains_what_is_missing() -> None:
    study, asked = dlrm_quality.STUDIES["tiny"], dlrm_quality.variants(1)
    assert dlrm_quality.unfinished(study, asked, []) == asked
    cut_short = [dlrm_quality._row(study, v, 256) for v in asked]
    assert dlrm_quality.unfinished(study, asked, cut_short) == asked
    rows = [dlrm_quality._row(study, v, study.samples_in_full) for v in asked]
    assert dlrm_quality.unfinished(study, asked, rows) == []
    # Only int8 is missing, but its difference needs fp32 trained beside it.
    without_int8 = [row for row in rows if row["tables_precision"] != "int8"]
    assert [v.tables for v in dlrm_quality.unfinished(study, asked, without_int8)] == [
        "fp32",
        "int8",
    ]


def test_a_study_of_bags_has_more_ids_and_its_own_file(tmp_path: Path) -> None:
    full, tiny = dlrm_quality.STUDIES["bags"], dlrm_quality.STUDIES["tiny"]
    assert len(full.network["hotness"]) == len(full.signal.table_rows)
    study = dataclasses.replace(
        full, **{name: getattr(tiny, name) for name in ("signal", "samples", "test_rows", "batch")},
        block_rows=tiny.block_rows, milestones=1, lr=0.1, embedding_dim=8, bottom_mlp=(16, 8),
        top_mlp=(16, 1), network=dict(full.network) | {"hotness": (3, 2, 1, 1), "cross_rank": 8},
    )  # fmt: skip
    stored = dlrm_quality.Variant(tables="bf16").changes(study.optimizer)["table_format"]
    assert (stored["table_precision"], stored["state_precision"]) == ("bf16", "bf16")
    trained: list[Any] = []
    results = dlrm_quality.Results(tmp_path, name=study.result)
    stream = dlrm_clicks.PlantedStream(study.signal, CPU)
    trainers = dlrm_quality.trainers_for(study, [dlrm_quality.Variant()], CPU)
    dlrm_quality.train(study, stream, trainers, lambda made, _: trained.extend(made.values()), 1e9)
    (trainer,) = trained
    assert trainer.cfg.multi_hot == "uniform"
    assert trainer.cfg.model.cross_shape == (3, 8)
    test = dlrm_quality.test_rows(study, stream)
    results.add(dlrm_quality.evaluate(study, trainers, test, study.samples), CPU)
    (row,) = json.loads((tmp_path / "dlrm_dcnv2_quality.json").read_text())["rows"]
    assert row["optimizer"] == "adagrad"
    assert row["auc"] > 0.5


def test_a_row_gives_way_to_one_of_more_samples() -> None:
    study, variant = dlrm_quality.STUDIES["tiny"], dlrm_quality.Variant()

    def row(samples: int, auc: float) -> dict[str, Any]:
        return dlrm_quality._row(study, variant, samples) | {"auc": auc}

    rows = dlrm_quality.merged([], [row(100, 0.6)])
    rows = dlrm_quality.merged(rows, [row(200, 0.7)])
    rows = dlrm_quality.merged(rows, [row(100, 0.5)])
    assert [r["auc"] for r in rows] == [0.7]
    assert rows[0]["curve"] == [[100, 0.6], [200, 0.7]]


def test_another_batch_sees_the_same_stream() -> None:
    study = dlrm_quality.STUDIES["tiny"]
    stream = dlrm_clicks.PlantedStream(study.signal, CPU)
    labels = {}
    for batch in (128, 256):
        cut = dataclasses.replace(study, batch=batch)
        batches = list(dlrm_quality.training_batches(cut, stream, 3))
        assert len(batches) == study.block_rows // batch
        labels[batch] = torch.cat([b.labels for b in batches])
        assert cut.steps * batch == cut.samples_in_full == study.samples_in_full
    assert torch.equal(labels[128], labels[256])


def test_a_study_writes_its_rows(tmp_path: Path) -> None:
    study = dataclasses.replace(dlrm_quality.STUDIES["tiny"], milestones=2, samples=4096)
    wanted = [dlrm_quality.Variant(), dlrm_quality.Variant(mlps="fp32")]
    results = dlrm_quality.Results(tmp_path)
    for seed in (0, 1):
        dlrm_quality.run(study, [dataclasses.replace(v, seed=seed) for v in wanted], CPU, results)
    rows = results.rows()
    assert [(r["mlp_precision"], r["seed"]) for r in rows] == [
        ("bf16", 0), ("fp32", 0), ("bf16", 1), ("fp32", 1),
    ]  # fmt: skip
    for row in rows:
        assert row.keys() >= {"tables_precision", "auc", "best_auc", "rows"}
        assert row["rows"] == sum(study.signal.table_rows)
        assert 0.5 < row["auc"] < row["best_auc"]
        assert [samples for samples, _ in row["curve"]] == [2048, 4096]
    assert rows[0]["best_auc"] == rows[2]["best_auc"]  # the same rows for every seed
    assert rows[0]["difference"] == rows[0]["auc"] - rows[1]["auc"] != 0
    assert rows[0]["difference_standard_error"] < rows[0]["auc_standard_error"]
    assert "difference" not in rows[1]
    json.dumps(rows)
