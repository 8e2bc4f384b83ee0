"""`trainmark plan`: its times beside published ones, its memory beside a dry run's, its words."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.dlrm_systems import with_changes
from tests.small import FLAGS
from tests.unit.without_torch import run_without_torch
from trainmark import workloads
from trainmark.cli import main
from trainmark.embeddings.placement import costs as formulas
from trainmark.errors import InputError
from trainmark.hardware import devices
from trainmark.hardware.devices import Cluster
from trainmark.hardware.machine import ELSEWHERE
from trainmark.hardware.products import COPY_OF_BANDWIDTH
from trainmark.kernels import fp8_mlp, relu_mlp
from trainmark.run import memory
from trainmark.verbs.plan import make_plan
from trainmark.workloads import resolve
from trainmark.workloads.dlrm import gpu_time, sharding
from trainmark.workloads.dlrm.runs import DlrmRun, Model, Optimizer, Sharding
from trainmark.workloads.dlrm.sharding import place, plan_devices
from trainmark.workloads.dlrm.step_time import WITHIN, predict

GIB = 2**30


def resolved(name: str, cluster: str, **changes: Any) -> DlrmRun:
    run = dataclasses.replace(workloads.named_run(name), data="synthetic", **changes)
    return resolve(run, Cluster.parse(cluster))


# --- predicted times


def test_a_reduction_is_hidden_by_the_backward_pass() -> None:
    """Unless the network is so slow that it takes longer."""
    fast, slow, slower = (
        predict(resolved("dlrm-large", "a100-80gx2x8", sharding=Sharding(network_gb_s=speed)))
        for speed in (100.0, 0.01, 0.005)
    )
    exchanges = [found.slowest["exchange"] for found in (fast, slow, slower)]
    dense = sum(fast.slowest[part] for part in ("products", "passes"))
    dense += gpu_time.STEP_S  # what starts without the host's waiting; not stretched
    reduced = 2 * 2_369_921 * 4 / 2 / (0.01e9 * 8) / formulas.LINK_EFFICIENCY
    assert exchanges[2] - exchanges[1] > 0.9 * reduced
    assert exchanges[1] - exchanges[0] > 0.9 * reduced - dense


def test_a_prediction_adds_up() -> None:
    found = predict(resolved("dlrm-large", "a100-80gx1x8"))
    steps = [sum(parts.values()) for parts in found.seconds]
    assert len(steps) == 8
    assert found.step_s == max(steps)


@pytest.mark.parametrize(
    ("cluster", "precision", "published", "factor"),
    [
        ("a100-80gx1x1", "fp16", 4.47e6, 2.1),
        ("a100-80gx1x1", "tf32", 2.68e6, 1.5),
        ("v100-32gx1x1", "fp16", 2.06e6, 2.0),
        ("v100-32gx1x1", "fp32", 0.648e6, 1.05),
    ],
)
def test_one_device_is_predicted_no_slower_than_others_were(
    cluster: str, precision: str, published: float, factor: float
) -> None:
    """NVIDIA's dlrm-small in TensorFlow; ours, from which the constants come, has fused kernels."""
    found = predict(resolved("dlrm-small", cluster, precision=precision))
    assert found.step_s is not None
    assert 0.95 * published < found.batch / found.step_s < factor * published


def test_the_planner_knows_which_layers_the_kernels_take() -> None:
    """It loads no torch, and so cannot ask them."""
    assert gpu_time.LARGE_LAYER == relu_mlp.SMALLEST_FUSED == fp8_mlp.SMALL_LAYER
    assert gpu_time.FP8_STEP == fp8_mlp.WIDTH_STEP


def with_bags(hotness: int) -> DlrmRun:
    model = Model(table_rows=(1_000_000,) * 4, hotness=(hotness,) * 4, pooling="sum")
    return resolved("dlrm-small", "h200x1x1", model=model, multi_hot="uniform")


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"interaction": "dcn"}},
        {"model": {"hotness": (2,) * 26}, "multi_hot": "uniform"},
        {"model": {"dropout": 0.1}},
        {"model": {"interaction_dropout": 0.1}},
        {"model": {"bottom_output": "linear"}},
        {"model": {"embedding_dim": 16, "bottom_mlp": (16,)}},
        {"micro_batch": 32768},
        {"eager": True},
        {"global_batch": 2048},
    ],
    ids=str,
)
def test_only_what_was_measured_has_a_narrow_interval(changes: dict[str, Any]) -> None:
    assert predict(resolved("dlrm-small", "h200x1x1")).off == WITHIN
    run = with_changes(workloads.named_run("dlrm-small"), {"data": "synthetic", **changes})
    assert predict(resolve(run, Cluster.parse("h200x1x1"))).off == ELSEWHERE


@pytest.mark.parametrize(
    ("name", "cluster", "changes", "is_narrow"),
    [
        ("distilbert-sst2", "h200x1x1", {"precision": "bf16"}, True),
        ("distilbert-sst2", "h100x1x1", {"precision": "bf16"}, False),
        ("distilbert-sst2", "h200x1x1", {"precision": "fp32"}, False),
        ("distilbert-demo", "h200x1x1", {"precision": "bf16"}, False),
        ("llama3-8b", "h200x1x1", {"optimizer_states": "bf16"}, True),
        ("llama3-8b", "h200x1x1", {"optimizer_states": "bf16", "recompute": "full"}, False),
        ("llama3-8b", "h200x1x1", {"optimizer_states": "bf16", "sequence": 512}, False),
        ("llama3-8b", "h100x1x8", {"parallel": "PP1DP4TP2"}, False),
        ("llama3-1b", "h200x1x1", {}, False),
        ("llama3-demo", "h200x1x1", {}, False),
    ],
)
def test_only_measured_kinds_of_other_models_have_a_narrow_interval(
    name: str, cluster: str, changes: dict[str, Any], is_narrow: bool
) -> None:
    run = dataclasses.replace(workloads.named_run(name), data="synthetic", **changes)
    found = make_plan(run, Cluster.parse(cluster))
    expected = (0.92, 1.08) if is_narrow else ELSEWHERE
    assert found.step_s is not None
    assert found.interval_s == pytest.approx([share * found.step_s for share in expected])


def test_the_ids_of_bags_are_read_and_updated() -> None:
    """65536 samples, four features of a million rows: 512 bytes a row, at the rate of a copy the
    first time, and from the cache after that."""
    few, many = predict(with_bags(10)), predict(with_bags(20))
    first = [1e6 * (1 - (1 - 1e-6) ** (65536 * ids)) for ids in (10, 20)]
    again = 655_360 - (first[1] - first[0])
    read = 4 * 512 * (first[1] - first[0] + gpu_time.READ_AGAIN * again)
    grown = many.slowest["gather"] - few.slowest["gather"]
    assert grown == pytest.approx(read / (4.8e12 * COPY_OF_BANDWIDTH), rel=1e-6)
    assert many.slowest["update"] > 1.5 * few.slowest["update"]


# --- access counts of prepared data


def test_prepared_data_brings_its_counts(tmp_path: Path) -> None:
    raw, data = tmp_path / "raw", tmp_path / "data"
    assert (
        main(["prepare", "synthetic", "--format", "raw", "--output", str(raw), "--rows", "20000"])
        == 0
    )
    prepare = ["prepare", "criteo", "--input", f"{raw}/day_*", "--output", str(data)]
    assert main([*prepare, "--frequency-threshold", "2"]) == 0
    run = dataclasses.replace(workloads.named_run("dlrm-demo"), data=str(data))
    cfg = resolve(run, Cluster.parse("cpux1x4"))
    assert sharding.counted(cfg)
    found = sharding.profiles(cfg)
    ids = np.fromfile(data / "train" / "cat_0.bin", dtype=np.int16)
    assert found[0].rows == cfg.model.table_rows[0]
    # The counts are those of all days, and so only close to the training days'.
    assert found[0].share((0, 1)) == pytest.approx((ids == 0).mean(), abs=0.01)
    assert found[0].share((1, 9)) == pytest.approx(((ids > 0) & (ids < 9)).mean(), abs=0.01)
    place(cfg)


@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({"model": {"table_widths": "auto"}}, False),
        ({"sharding": {"force_exchange": True}}, False),
        ({"sharding": {"force_exchange": True}, "optimizer": {"name": "adam"}}, True),
        ({"sharding": {"host_tables": (0,)}}, True),
        ({"eager": True}, True),
    ],
)
def test_a_gpu_waits_for_starts_where_there_are_no_graphs(
    changes: dict[str, Any], waits: bool
) -> None:
    run = with_changes(workloads.named_run("dlrm-small"), {"global_batch": 4096} | changes)
    plan = make_plan(dataclasses.replace(run, data="synthetic"), Cluster.parse("h200x1x1"))
    assert (plan.parts["starts"] > 1e-3) is waits  # about 600 starts of 4 microseconds


# --- memory


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_memory_is_a_dry_runs(optimizer: Any, precision: Any) -> None:
    run = dataclasses.replace(
        workloads.named_run("dlrm-small"),
        data="synthetic",
        device="cpu",
        precision=precision,
        optimizer=Optimizer(name=optimizer),
    )
    cfg, built = memory.dry_run(run, Cluster.parse("cpux1x1"))
    assert isinstance(cfg, DlrmRun)
    (planned,) = plan_devices(cfg)
    assert planned == built


def test_all_tables_are_somewhere() -> None:
    cfg = resolved("dlrm-large", "a100-80gx1x8", sharding=Sharding(placement="memory_balanced"))
    tables = sum(cfg.model.table_rows) * 128 * 4
    dense = 2_369_921 * 4
    weights = [plan.weights for plan in plan_devices(cfg)]
    assert sum(weights) - 8 * dense == tables


# --- placements of the published clusters

FIVE_E9 = Sharding(column_slice_threshold=5e9)
WIDE = Model(
    table_rows=workloads.named_run("dlrm-xlarge").model.table_rows,
    embedding_dim=512,
    bottom_mlp=(512, 256, 512),
)
ONE_TABLE = Model(table_rows=(1_171_875_000,))  # 600 GB
CLUSTERS: list[tuple[str, str, dict[str, Any]]] = [
    ("dlrm-mlperf", "a100-40gx1x8", {}),
    ("dlrm-mlperfx2", "a100-40gx2x8", {}),
    ("dlrm-full", "a100-40gx10x8", {}),
    ("dlrm-large", "a100-80gx1x8", {}),
    ("dlrm-xlarge", "a100-80gx1x8", {}),
    ("dlrm-xlarge", "a100-80gx4x8", {"model": WIDE}),
    ("dlrm-large", "v100-32gx1x8", {"sharding": FIVE_E9}),
    ("dlrm-large", "v100-32gx1x16", {"sharding": FIVE_E9}),
    ("dlrm-small", "v100-32gx1x1", {}),
    ("dlrm-xlarge", "a100-80gx1x8", {"model": ONE_TABLE}),
]
IDS = [
    "mlperf",
    "mlperfx2",
    "full",
    "large",
    "xlarge",
    "wide",
    "v100x8",
    "v100x16",
    "small",
    "600gb",
]


@pytest.mark.parametrize(("name", "cluster", "changes"), CLUSTERS, ids=IDS)
def test_published_clusters_fit(name: str, cluster: str, changes: dict[str, Any]) -> None:
    cfg = resolved(name, cluster, **changes)
    plans = plan_devices(cfg)
    card = devices.ACCELERATORS[Cluster.parse(cluster).hardware].memory_bytes
    assert len(plans) == Cluster.parse(cluster).world
    assert max(plan.total for plan in plans) < 0.95 * card
    held = sum(plan.weights for plan in plans)
    assert held >= sum(cfg.model.table_rows) * cfg.model.embedding_dim * 4
    if "sharding" in changes:
        placed = place(cfg)
        # 5.87e9, 6.26e9 and 5.13e9 elements.
        sliced = [t.table for t in placed.tables if t.sharding == "column_wise"]
        assert sliced == [0, 19, 21]


@pytest.mark.parametrize(("name", "cluster", "changes"), CLUSTERS, ids=IDS)
def test_published_clusters_dry_run(name: str, cluster: str, changes: dict[str, Any]) -> None:
    """The model that is built has, on its fullest device, the bytes that the placement says."""
    run = dataclasses.replace(workloads.named_run(name), data="synthetic", device="cpu", **changes)
    cfg, built = memory.dry_run(run, Cluster.parse(cluster))
    assert isinstance(cfg, DlrmRun)
    plans = plan_devices(cfg)
    fullest = max(plans, key=lambda plan: plan.weights + plan.optimizer)
    assert built.weights == fullest.weights
    assert built.gradients == fullest.gradients
    assert built.optimizer == fullest.optimizer
    assert built.activations == max(plan.activations for plan in plans)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize(
    "sharding",
    [
        Sharding(column_slice_threshold=1e8),
        Sharding(placement="greedy", column_slice_threshold=3e8, data_parallel_threshold=1e6),
        Sharding(host_tables=(0, 19)),
    ],
    ids=["auto", "greedy", "host"],
)
def test_a_mixture_of_shardings_dry_runs(optimizer: Any, sharding: Sharding) -> None:
    run = dataclasses.replace(
        workloads.named_run("dlrm-small"),
        data="synthetic",
        device="cpu",
        optimizer=Optimizer(name=optimizer),
        sharding=sharding,
    )
    cfg, built = memory.dry_run(run, Cluster.parse("a100-40gx1x4"))
    assert isinstance(cfg, DlrmRun)
    fullest = max(plan_devices(cfg), key=lambda plan: plan.weights + plan.optimizer)
    assert built.weights == fullest.weights
    assert built.gradients == fullest.gradients
    # Adam's count of steps: one number for each of an engine's stores.
    slack = 32 if optimizer == "adam" else 0
    assert abs(built.optimizer - fullest.optimizer) <= slack
    assert len({table.sharding for table in place(cfg).tables}) == 3


@pytest.mark.parametrize(
    "strategy", ["round_robin", "memory_balanced", "memory_optimized", "greedy"]
)
def test_published_strategies_with_slices_fit(strategy: str) -> None:
    sharding = Sharding(placement=strategy, column_slice_threshold=5e9)
    for cluster in ("v100-32gx1x8", "v100-32gx1x16"):
        plans = plan_devices(resolved("dlrm-large", cluster, sharding=sharding))
        assert max(plan.total for plan in plans) < 0.95 * 32 * GIB


def test_what_does_not_fit_says_what_would() -> None:
    """And that is true."""
    cfg = resolved("dlrm-xlarge", "a100-40gx1x8")
    with pytest.raises(InputError) as error:
        place(cfg)
    message = str(error.value)
    assert "It would fit 12 such devices, or these with --host-tables 19 (140 GiB" in message
    place(resolved("dlrm-xlarge", "a100-40gx1x12", global_batch=12 * 5461))
    on_host = resolved("dlrm-xlarge", "a100-40gx1x8", sharding=Sharding(host_tables=(19,)))
    place(on_host)
    with pytest.raises(InputError, match="does not fit"):
        place(resolved("dlrm-xlarge", "a100-40gx1x11", global_batch=11 * 5958))


def test_rows_on_their_way_count_in_what_would_fit() -> None:
    small = resolved("dlrm-large", "a100-40gx1x4", model=Model())
    each = sharding.room(small)
    rows = int(0.998 * 4 * each / 26 / (128 * 4))  # the tables alone would fit four
    model = Model(table_rows=(rows,) * 26)
    with pytest.raises(InputError, match="It would fit 5 such devices"):
        place(resolved("dlrm-large", "a100-40gx1x4", model=model))
    place(resolved("dlrm-large", "a100-40gx1x5", model=model, global_batch=65535))


def test_a_600_gb_table_on_smaller_cards_says_what_would() -> None:
    cfg = resolved("dlrm-xlarge", "a100-40gx1x8", model=ONE_TABLE)
    with pytest.raises(InputError, match=r"fit 15 such devices, or these with --host-tables 0 \("):
        place(cfg)


# --- configuration


def test_bad_settings_are_named_together() -> None:
    sharding = Sharding(column_slice_threshold=0, host_tables=(26, -1), network_gb_s=0)
    with pytest.raises(InputError) as error:
        resolved("dlrm-small", "a100-80gx1x8", sharding=sharding)
    message = str(error.value)
    assert message.startswith("3 problems:")
    for part in ("column_slice_threshold", "host_tables.1 must be at least 0", "network_gb_s"):
        assert part in message
    sharding = Sharding(placement="automatic", host_tables=(26,))
    with pytest.raises(InputError) as error:
        resolved("dlrm-small", "a100-80gx1x8", sharding=sharding)
    message = str(error.value)
    assert message.startswith("2 problems:")
    assert "Unknown placement 'automatic'. Did you mean 'auto'?" in message
    assert "table 26 does not exist" in message


def test_a_batch_that_does_not_divide_names_those_that_do() -> None:
    with pytest.raises(InputError, match=r"data-parallel size 3. Nearest: 65535 or 65538.$"):
        resolved("dlrm-large", "h100x1x3")
    with pytest.raises(InputError, match=r"Nearest: 48.$"):
        resolved("dlrm-large", "h100x1x3", global_batch=32, micro_batch=16)
    with pytest.raises(InputError, match=r"data-parallel size 3.$"):
        resolved("dlrm-large", "h100x1x3", micro_batch=16, accumulate=2)


# --- the verb


def test_plan_prints_and_its_file_is_a_placement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # of a screen, which this is not
    file = tmp_path / "placement.json"
    words = ["plan", "dlrm-large", "--cluster", "a100-80gx1x8"]
    assert main([*words, "--json", str(file)]) == 0
    first = capsys.readouterr().out
    assert "Predicted, not measured:" in first
    assert "no counts are known (give --data)" in first
    assert "45,833,188" in first
    assert "\N{HORIZONTAL ELLIPSIS}" not in first
    data = json.loads(file.read_text())
    assert data["devices"] == 8
    assert main([*words, "--placement", str(file)]) == 0
    second = capsys.readouterr().out
    assert first.splitlines()[:10] == second.splitlines()[:10]  # the same devices' table
    data["tables"].pop()
    file.write_text(json.dumps(data))
    assert main([*words, "--placement", str(file)]) == 2
    assert "Table 25 must be placed once" in capsys.readouterr().err
    assert main([*words, "--json", str(tmp_path / "missing" / "file.json")]) == 2
    assert "file.json cannot be written: No such file or directory." in capsys.readouterr().err
    assert main([*words, "--json", "."]) == 2
    assert "--json . is a folder; give a file to write." in capsys.readouterr().err


def test_plans_need_no_torch() -> None:
    runs = ("dlrm-large", "distilbert-sst2", "llama3-8b")
    printed = run_without_torch(*(["plan", run, "--cluster", "h200x1x8"] for run in runs))
    assert printed.count("Predicted, not measured") == 3
    told = r"/s and device, .* together; MFU [\d.]+ % .*Bound by \w"
    assert len(re.findall(told, printed)) == 3


def test_plan_without_known_speeds_predicts_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "dlrm-demo", *FLAGS, "--cluster", "cpux1x2"]) == 0
    out = capsys.readouterr().out
    assert "the memory and link bandwidths of 'cpu' are not known (trainmark calibrate" in out
    assert "GiB, activations estimated" in out
    assert "Predicted" not in out


def test_plan_of_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "dlrm-xlarge", "--cluster", "a100-80gx1x8", "--placement", "round_robin"]
    assert main(words) == 2
    captured = capsys.readouterr()
    assert "does not fit a100-80gx1x8 by round_robin. Use --placement auto." in captured.err
    assert main(["plan", "dlrm-large", "--cluster", "a100-80gx1x1"]) == 2
    assert "It would fit 2 such devices, or these with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--cluster", "a100-80gx1x8x2"], "'a100-80gx1x8x2' has more than two numbers"),
        (["--column-slice-threshold", "x"], "must be a number. Received: 'x'"),
        (["--engine", "torchrec", "--host-tables", "0"], "host_tables is for --engine native"),
        (["--engine", "torchrec", "--column-slice-threshold", "9"], "TorchRec's own planner"),
        (["--cluster", "h100x1x3"], "received data-parallel size 3. Nearest: 2046 or 2049."),
    ],
)  # fmt: skip
def test_wrong_words_for_a_plan(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "dlrm-demo", *words]) == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize(
    ("run", "waits"),
    [
        ("distilbert-demo", True),
        ("llama3-demo", True),
        ("distilbert-sst2", False),
        ("dlrm-demo", False),  # whose starts are counted
    ],
)
def test_a_step_that_is_too_short_is_said_to_be(
    run: str, waits: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", run, "--cluster", "h200x1x1"]) == 0
    assert ("waits for the host" in capsys.readouterr().out) == waits


def test_plan_tells_how_long_answers_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "dlrm-small", "--cluster", "h200x1x1"]) == 0
    told = r"([\d.]+) ms for the 65,536 samples of an .*, ([\d.]+) ms for a request of one"
    (found,) = re.findall(told, capsys.readouterr().out)
    assert 0.5 < float(found[0]) < 1.0
    assert 0.05 < float(found[1]) < 0.1
    # Not on several devices, nor where the link to the host is not known.
    file = tmp_path / "hardware.toml"
    file.write_text(
        'name = "X"\nbandwidth = {gb_s = 2000, source = "a"}\n'
        '[peak]\nfp16 = {tflops = 200, source = "b"}\n'
    )
    for words in (["--cluster", "h200x1x8"], ["--cluster", "xx1x1", "--hardware", str(file)]):
        assert main(["plan", "dlrm-small", *words]) == 0
        out = capsys.readouterr().out
        assert "Predicted, not measured" in out
        assert "a request of one" not in out


@pytest.mark.parametrize("run", ["distilbert-sst2", "llama3-1b"])
def test_plan_of_runs_without_tables(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", run, "--cluster", "h100x1x2"]) == 0
    out = capsys.readouterr().out
    assert "/80" in out
    assert re.search(r"Predicted, not measured: [\d.]+ m?s \([\d.]+ to [\d.]+\) for ", out)
    assert re.search(r"^ 0-1 ", out, re.M)  # both devices
    assert main(["plan", run, "--json", "x.json"]) == 2
    assert "has no tables" in capsys.readouterr().err
