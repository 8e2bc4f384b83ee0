"""Numbers that FlagPerf's Llama-3 results fix: MFU, batches, learning rates, memory, splits."""

import dataclasses
import json
from pathlib import Path
from typing import Literal

import pytest

from benchmarks.common import read_rows
from trainmark import metrics, workloads
from trainmark.cli import main
from trainmark.distributed import mesh as meshes
from trainmark.formatting import GIB
from trainmark.hardware import devices
from trainmark.hardware.devices import Cluster
from trainmark.hardware.memory import MemoryPlan
from trainmark.report import published
from trainmark.run.memory import plan_memory
from trainmark.workloads import resolve
from trainmark.workloads.llama3 import runs
from trainmark.workloads.llama3.flops import flops

LLAMA3 = workloads.load("llama3")


def mfu(tokens_per_s: float, device: str, precision: str = "bf16") -> float:
    """The published convention for one device."""
    peak = devices.peak_flops(device, precision)
    assert isinstance(peak, devices.Peak)
    needed = flops(runs.llama3_8b(), 0, 1_000_000)["6N"] / 1_000_000
    return 100 * metrics.mfu(needed * tokens_per_s, 1.0, 1, peak.flops)


@pytest.mark.parametrize(
    ("device", "tokens_per_s", "percent"),
    [
        ("a100-80g", 3698.7, 56.90), ("a100-80g", 3409.2, 52.45), ("a100-80g", 3006.1, 46.25),
        ("a100-80g", 2690.3, 41.39), ("a100-80g", 2451.2, 37.71), ("a100-80g", 3042.7, 46.81),
        ("a100-80g", 3306.5, 50.87),  # printed as 50.0
        ("h100", 8103, 39.33), ("h100", 7914, 38.41), ("h100", 7047, 34.20),
    ],
)  # fmt: skip
def test_published_mfu(device: str, tokens_per_s: float, percent: float) -> None:
    assert mfu(tokens_per_s, device) == pytest.approx(percent, abs=0.006)


@pytest.mark.parametrize(
    ("tokens_per_s", "low", "high"), [(10486, 25.43, 50.89), (10280, 24.93, 49.89)]
)
def test_published_mfu_of_fp8_is_a_range(tokens_per_s: float, low: float, high: float) -> None:
    assert mfu(tokens_per_s, "h100", "fp8") == pytest.approx(low, abs=0.006)
    assert mfu(tokens_per_s, "h100") == pytest.approx(high, abs=0.006)


@pytest.mark.parametrize(
    ("precision", "peaks"), [("fp8", (1979e12, 989e12)), ("bf16", (989e12,))], ids=["fp8", "bf16"]
)
def test_result_json_gives_the_range_for_fp8_only(
    precision: str, peaks: tuple[float, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run on this CPU that takes it for an H100."""
    h100 = devices.Device(key="h100", name="NVIDIA H100 80GB HBM3", memory_bytes=80 * GIB)
    monkeypatch.setattr(devices, "identify", lambda device: h100)
    flags = ["--device", "cpu", "--no-compile", "--max-steps", "4", "--warmup-clock", "1"]
    flags += ["--evals-per-epoch", "0", "--checkpoint-every", "never", "--output", str(tmp_path)]
    assert main(["train", "llama3-demo", "--precision", precision, *flags]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    (found,) = (row for row in result["mfu"] if row["convention"] == "6N")
    parameters = runs.llama3_demo().model.parameters
    expected = [result["tokens_per_device_s"] * parameters * 6 / peak for peak in peaks]
    assert (found["value"], found["peak_dtype"]) == (pytest.approx(expected[0]), precision)
    assert found["peak_flops"] == peaks[0]
    ends = pytest.approx(expected) if precision == "fp8" else [None, None]
    assert [found["low"], found["high"]] == ends


def test_palm_counts_matrices_and_attention() -> None:
    per_token = flops(runs.llama3_8b(), 0, 1)
    assert per_token["6N"] == 48e9
    assert per_token["palm"] == pytest.approx(57.9e9, rel=2e-3)  # NeMo until 25.07
    assert per_token["palm-causal"] == pytest.approx(51.5e9, rel=2e-3)  # NeMo since 25.09
    # Any other network is counted as it is, whatever run it started as.
    short = dataclasses.replace(runs.llama3_8b(), model=runs.Model(layers=4))
    for other in (runs.llama3_1b(), short):
        assert flops(other, 0, 1)["6N"] == 6 * other.model.parameters


@pytest.mark.parametrize(
    ("nodes", "parallel", "global_batch", "accumulate"),
    [(1, "PP2DP4TP1", 512, 128), (1, "PP1DP4TP2", 512, 128), (2, "PP1DP8TP2", 512, 64),
     (55, "PP1DP220TP2", 1760, 8)],
)  # fmt: skip
def test_published_batches(nodes: int, parallel: str, global_batch: int, accumulate: int) -> None:
    run = dataclasses.replace(
        runs.llama3_8b(), data="synthetic", parallel=parallel, global_batch=global_batch
    )
    resolved = resolve(run, Cluster("h100", nodes, 8))
    assert (resolved.micro_batch, resolved.accumulate) == (1, accumulate)


def test_published_learning_rates() -> None:
    run = runs.llama3_8b()
    rates = [run.lr * run.schedule.factor(step) for step in (0, 150, 300, 400)]
    assert rates == pytest.approx([1e-5, 5.5e-6, 1e-6, 1e-6])


def test_published_arguments() -> None:
    run = runs.llama3_8b()
    assert (run.seed, run.max_steps, run.global_batch, run.sequence) == (1234, 300, 512, 8192)
    rule = run.optimizer
    assert (rule.beta1, rule.beta2, rule.weight_decay, rule.clip) == (0.9, 0.95, 0.1, 1.0)
    model = run.model
    assert (model.layers, model.hidden, model.ffn, model.heads, model.kv_heads) == (
        32, 4096, 14336, 32, 8,
    )  # fmt: skip
    assert (model.vocab, model.norm_eps, model.init_std) == (128_256, 1e-5, 0.008)


def planned(run: runs.LlamaRun, device: str, count: int) -> MemoryPlan:
    cfg = resolve(run, Cluster(device, 1, count))
    with meshes.fake(runs.mesh_axes(cfg, count)) as mesh:
        return plan_memory(cfg, LLAMA3, mesh)


def test_the_plan_agrees_with_the_published_ablation() -> None:
    """Eight A100 of 80 GiB: what ran fits, what ran out of memory does not."""
    rows = published.for_run("llama3-8b")
    splits = {row.parallel for row in rows if row.parallel and row.case == "a100-80gx1x8"}
    splits.add("PP1DP8TP1")
    assert len(splits) == 8, [row.case for row in rows]
    for split in splits:
        run = dataclasses.replace(runs.llama3_8b(), data="synthetic", parallel=split)
        total = planned(run, "a100-80g", 8).total / GIB
        assert (total > 80) == (split == "PP1DP8TP1"), (split, total)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_the_plan_agrees_with_what_was_measured(precision: Literal["bf16", "fp8"]) -> None:
    """One H200, one micro-batch a step: gradients come as activations go."""
    (measured,) = (
        row
        for row in read_rows("llama3_gpu_h200")
        if (row["system"], row["precision"], row["micro_batch"]) == ("trainmark", precision, 2)
    )
    run = dataclasses.replace(
        runs.llama3_8b(), data="synthetic", optimizer_states="bf16", precision=precision,
        micro_batch=2, global_batch=2,
    )  # fmt: skip
    total = planned(run, "h200", 1).total / GIB
    assert total == pytest.approx(measured["memory_gib"], rel=0.03)
    assert total == pytest.approx(measured["allocated_gib"], rel=0.01)


def test_all_gradients_count_where_they_are_larger_than_activations_or_stay() -> None:
    short = dataclasses.replace(
        runs.llama3_8b(), data="synthetic", sequence=128, global_batch=1, optimizer_states="bf16"
    )
    once = planned(short, "h200", 1)
    of_all = 2 * short.model.parameters
    # The backward pass ends with all gradients and the activations of one block.
    assert once.gradients + once.activations == pytest.approx(
        of_all + once.activations / short.model.layers, abs=2
    )
    # Sums over micro-batches are in fp32, and there from the first to the last.
    twice = planned(dataclasses.replace(short, global_batch=2), "h200", 1)
    assert (twice.gradients, twice.activations) == (2 * of_all, once.activations)


def test_sharing_out_the_weights_makes_room() -> None:
    """What ZeRO-1 cannot hold on eight devices of 80 GiB, FSDP can."""
    run = dataclasses.replace(
        runs.llama3_8b(), data="synthetic", parallel="PP1DP8TP1", data_parallel="fsdp"
    )
    plan = planned(run, "a100-80g", 8)
    ends = run.model.vocab * run.model.hidden  # the embedding, and as many in the head
    assert plan.weights == 2 * 2 * ends
    assert plan.gradients == 4 * run.model.parameters // 8 + 4 * ends
    zero1 = planned(dataclasses.replace(run, data_parallel="zero1"), "a100-80g", 8)
    assert (plan.optimizer, plan.activations) == (zero1.optimizer, zero1.activations)
    assert plan.total < 60 * GIB < 80 * GIB < zero1.total
    # Pipelines keep gathered weights and whole gradients from one micro-batch to the next.
    piped = [
        planned(dataclasses.replace(run, parallel="PP2DP4TP1", data_parallel=kind), "a100-80g", 8)
        for kind in ("fsdp", "zero1")
    ]
    assert piped[0] == piped[1]
