"""`published_results.json` has every figure of the five pages, as they print it.

`published_pages.json` is a copy of the pages' tables in their own order and form.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from trainmark.report import published
from trainmark.report.published import Row
from trainmark.workloads import named_run

PAGES: dict[str, Any] = json.loads((Path(__file__).parent / "published_pages.json").read_text())
NVIDIA = PAGES["dlrm_nvidia_tf2"]
RUN = {"small": "dlrm-small", "large": "dlrm-large", "extra_large": "dlrm-xlarge"}
SPEEDUPS = {
    "time_to_train_min": [1.64, 1.33, 1.15, 3.15, 1.89, 3.15, 1.86, 1.43],
    "train_samples_per_s": [1.67, 1.42, 1.22, 3.18, 2.03, 3.2, 2.06, 1.64],
    "inference_batch_2048": [1.08, 1.37, 1.53],
}
"""The last column of NVIDIA's tables."""


def printed(system: str) -> list[Row]:
    """As printed, without the corrected copies."""
    return [row for row in published.everything().rows if row.system == system]


@pytest.mark.parametrize(
    ("page", "system", "metric"),
    [
        ("dlrm_flagperf", "flagperf-dlrm", "auc"),
        ("distilbert_flagperf", "flagperf-distilbert", "acc"),
    ],
)
def test_flagperf(page: str, system: str, metric: str) -> None:
    rows = printed(system)
    assert len(rows) == len(PAGES[page]["rows"]) in (4, 6)
    for row, theirs in zip(rows, PAGES[page]["rows"], strict=True):
        assert row.case == f"a100-40gx{theirs['case']}"
        assert row.hardware == PAGES[page]["hardware"]
        assert (row.precision or "").startswith(PAGES[page]["precision"])
        for name in ("fix_hp", "e2e_time_s", "p_whole", "p_train", "p_core", "mem_gib"):
            assert getattr(row, name) == theirs.get(name), name
        assert row.mem_total_gib == theirs["mem_total_gib"]
        assert row.quality == theirs.get(metric)
        assert row.target == (PAGES[page]["target"]["value"] if metric in theirs else None)


def test_llama() -> None:
    page = PAGES["llama3_8b_flagperf"]
    ablation = [
        {"hardware": "A100-80GB", "case": "1x8", "precision": "bf16", **row}
        for row in page["ablation_a100_1x8_bf16"]
    ]
    rows = printed("flagperf-llama3")
    assert len(rows) == len(page["rows"]) + len(ablation) == 14
    for row, theirs in zip(rows, page["rows"] + ablation, strict=True):
        assert row.case.endswith(theirs["case"])
        for name in ("hardware", "precision", "parallel", "tokens_per_device_s", "fix_hp"):
            assert getattr(row, name) == theirs.get(name), name
        assert row.aligned == theirs.get("aligned")
        mfu = theirs["mfu"]
        assert row.mfu == (mfu if isinstance(mfu, list) or mfu is None else [mfu])
        if theirs["mem_gib"] == "OOM":
            assert (row.mem_gib, row.note) == (None, "out of memory")
        else:
            assert row.mem_gib == theirs["mem_gib"]


@pytest.mark.parametrize("table", ["time_to_train_min", "train_samples_per_s"])
def test_nvidia_training(table: str) -> None:
    rows = printed("nvidia-tf2-dlrm")
    assert len(NVIDIA[table]) == 8
    for theirs, speedup in zip(NVIDIA[table], SPEEDUPS[table], strict=True):
        found = {
            row.precision: row
            for row in rows
            if (row.run, row.hardware) == (RUN[theirs["size"]], theirs["hardware"])
            and row.case.endswith(f"x1x{theirs['gpus']}")
            and row.precision
        }
        full = "tf32" if "tf32" in theirs else "fp32"
        assert set(found) == {full, "amp (fp16)"}
        for precision, name in ((full, full), ("amp (fp16)", "amp")):
            row = found[precision]
            assert row.global_batch == theirs["batch_per_gpu"] * theirs["gpus"]
            if table == "time_to_train_min":
                assert row.e2e_time_s == pytest.approx(60 * theirs[name], abs=1e-9)
                assert row.quality == theirs["auc_amp" if name == "amp" else "auc_full"]
            else:
                assert row.p_train == theirs[name]
        mixed = found["amp (fp16)"]
        shown = mixed.time_speedup if table == "time_to_train_min" else mixed.throughput_speedup
        assert shown == speedup
        ratio = theirs[full] / theirs["amp"]
        assert speedup == pytest.approx(
            ratio if table == "time_to_train_min" else 1 / ratio, abs=6e-3
        )


def test_nvidia_sizes_and_cpus() -> None:
    models = published.models_of("nvidia-tf2-dlrm")
    assert len(models) == len(NVIDIA["sizes"]) == 3
    for model, theirs in zip(models, NVIDIA["sizes"], strict=True):
        assert model.name == theirs["name"].replace("_", " ")
        assert model.frequency_threshold == theirs["frequency_threshold"]
        assert (model.parameters, model.gib) == (theirs["parameters"], theirs["size_gib"])
    beside = {row.p_train: row.cpu_speedup for row in printed("nvidia-tf2-dlrm") if row.cpu_speedup}
    wanted = [row["samples_per_s"] for row in NVIDIA["extra_large_by_hardware_samples_per_s"]]
    assert beside == dict(zip(wanted, (1, 43, 683), strict=True))


def test_nvidia_inference() -> None:
    rows = published.inference_of("nvidia-tf2-dlrm")
    theirs = NVIDIA["inference_batch_2048"]
    assert len(rows) == 2 * len(theirs) == 6
    for full, mixed, page, speedup in zip(
        rows[::2], rows[1::2], theirs, SPEEDUPS["inference_batch_2048"], strict=True
    ):
        assert full.hardware == mixed.hardware == page["hardware"]
        assert full.batch == mixed.batch == 2048
        name = full.precision
        assert (full.samples_per_s, full.mean_ms) == (
            page[f"{name}_samples_per_s"],
            page[f"{name}_latency_ms"],
        )
        assert (mixed.samples_per_s, mixed.mean_ms) == (
            page["amp_samples_per_s"],
            page["amp_latency_ms"],
        )
        assert mixed.throughput_speedup == speedup


def test_torchrec() -> None:
    page = PAGES["dlrm_torchrec"]
    rows, models = printed("torchrec-dlrm"), published.models_of("torchrec-dlrm")
    assert len(rows) == len(page["rows"]) == 3
    for row, model, theirs in zip(rows, models, page["rows"], strict=False):
        assert (row.quality, row.validation) == (theirs["auroc_test"], theirs["auroc_val"])
        assert (row.p_train, row.global_batch) == (theirs["records_per_s"], theirs["global_batch"])
        nodes, per_node = map(int, row.case.split("x")[1:])
        assert nodes * per_node == theirs["gpus"]
        assert theirs["local_batch"] * theirs["gpus"] == theirs["global_batch"]
        assert (model.name, model.gib) == (theirs["name"], theirs["tables_gib"])
        assert model.table_rows == theirs["num_embeddings_per_feature"]
        assert list(named_run(row.run).model.table_rows) == model.table_rows
    assert models[3].table_rows == page["reproduce_num_embeddings_per_feature"]
    assert [row.e2e_time_s for row in rows] == [
        12 * 60 + 43,
        34 * 60 + 27,
        2 * 3600 + 32 * 60 + 3,
    ]
