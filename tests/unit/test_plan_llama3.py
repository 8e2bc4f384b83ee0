"""`trainmark plan` of Llama-3: memory beside a dry run's, time beside published splits, search."""

import dataclasses
import itertools
from typing import Any

import pytest

from benchmarks import plan_errors
from benchmarks.common import RESULTS, read_rows
from tests.unit.without_torch import run_without_torch
from trainmark import workloads
from trainmark.cli import main
from trainmark.formatting import GIB
from trainmark.hardware.devices import Cluster
from trainmark.run import memory
from trainmark.verbs.plan_search import choices
from trainmark.workloads import resolve
from trainmark.workloads.llama3 import runs, step_time
from trainmark.workloads.llama3.memory import plan_devices

SMALL = runs.Model(layers=8, hidden=256, ffn=512, heads=8, kv_heads=4, vocab=1000)
EIGHT = Cluster.parse("a100-80gx1x8")


def small(**changes: Any) -> runs.LlamaRun:
    base = dataclasses.replace(
        runs.llama3_8b(), data="synthetic", device="cpu", model=SMALL, sequence=64, eager=True
    )
    return dataclasses.replace(base, **changes)


def on_eight(parallel: str) -> runs.LlamaRun:
    run = dataclasses.replace(runs.llama3_8b(), data="synthetic", parallel=parallel)
    return resolve(run, EIGHT)


# --- memory


@pytest.mark.parametrize("parallel", ["PP1DP8TP1", "PP2DP2TP2", "PP8DP1TP1", "PP1DP2TP4"])
@pytest.mark.parametrize("states", ["fp32", "bf16"])
def test_memory_is_a_dry_runs(parallel: str, states: Any) -> None:
    for precision, shares in itertools.product(("bf16", "fp32"), ("zero1", "fsdp")):
        if states == "bf16" and precision == "fp32":
            continue  # refused
        cfg, built = memory.dry_run(
            small(
                parallel=parallel,
                optimizer_states=states,
                precision=precision,
                data_parallel=shares,
            ),
            EIGHT,
        )
        assert isinstance(cfg, runs.LlamaRun)
        assert plan_devices(cfg)[0] == built, (precision, shares)


def test_memory_of_one_micro_batch_and_of_two_stages_a_rank_is_a_dry_runs() -> None:
    one, two = Cluster.parse("h200x1x1"), Cluster.parse("h200x1x2")
    for run, cluster in (
        (small(global_batch=1), one),
        (small(parallel="PP2DP1TP1", pipeline="interleaved"), two),
    ):
        cfg, built = memory.dry_run(run, cluster)
        assert isinstance(cfg, runs.LlamaRun)
        assert plan_devices(cfg)[0] == built


def test_later_pipeline_ranks_keep_fewer_micro_batches() -> None:
    totals = [rank.activations for rank in plan_devices(on_eight("PP4DP2TP1"))[:3]]
    fixed = 3 * GIB
    assert (totals[0] - fixed) * 3 == pytest.approx((totals[1] - fixed) * 4)
    assert (totals[0] - fixed) * 2 == pytest.approx((totals[2] - fixed) * 4)


# --- time


def test_published_splits_are_predicted_without_their_own_row() -> None:
    rows = {row["case"]: row for row in plan_errors.of_llama3() if row["held_out"]}
    assert len(rows) == 13
    for case, row in rows.items():
        if row["ran_out_of_memory"]:
            assert "PP1DP8TP1" in case
            assert row["predicted_bytes"] > 80 * GIB
            continue
        allowed = 0.15 if "TP4" in case or "TP8" in case else 0.08
        assert row["predicted_s"] == pytest.approx(row["measured_s"], rel=allowed), case
        assert row["predicted_bytes"] < 80 * GIB
        assert abs(row["predicted_bytes"] - row["measured_bytes"]) < 0.055 * 80 * GIB, case
    ran = [row for case, row in rows.items() if "a100" in case and row["measured_s"]]
    by_time = sorted(ran, key=lambda row: row["measured_s"])
    assert by_time == sorted(ran, key=lambda row: row["predicted_s"])


def test_published_memory_is_within_five_percent_of_the_card() -> None:
    cases = plan_errors.flagperf()
    constants = plan_errors.fitted_bytes(cases)
    for case in cases:
        if case.measured_bytes:
            error = plan_errors.megatron_bytes(case, constants) - case.measured_bytes
            assert abs(error) < 0.05 * 80 * GIB, case.name


def test_the_constants_are_those_of_the_fit_and_the_file_is_todays() -> None:
    cases = [*plan_errors.flagperf(), *plan_errors.own()]
    for hardware in ("a100-80g", "h100", "h200"):
        found, kept = (
            plan_errors.rates_from(cases, hardware),
            step_time.rates_of(Cluster(hardware, 1, 1)),
        )
        for name in ("matmul", "fp8", "link"):
            assert getattr(kept, name) == pytest.approx(getattr(found, name), abs=6e-4)
    written = read_rows("plan_errors")
    for row, today in zip(written, plan_errors.all_rows(), strict=True):
        assert row["case"] == today["case"]
        assert row["predicted_s"] == pytest.approx(today["predicted_s"])
        assert row["predicted_bytes"] == pytest.approx(today["predicted_bytes"])
        assert row["held_out"] == today["held_out"]


def test_a_pipeline_takes_what_a_simulation_of_1f1b_takes() -> None:
    """Each rank does its forward and backward passes in order, when its neighbours are done."""
    cfg = resolve(
        dataclasses.replace(
            runs.llama3_8b(), data="synthetic", parallel="PP4DP2TP1", global_batch=16
        ),
        EIGHT,
    )
    layers = [8, 8, 8, 8]
    found = step_time.predict(cfg, EIGHT, layers=layers)
    batches = 8
    slots = [rank.compute / batches for rank in found.ranks]
    simulated = _one_f_one_b(slots, batches)
    step = step_time._Step(cfg, EIGHT, found.rates, layers)
    passing = step.passing_s() * batches
    assert found.step_s is not None
    rest = found.ranks[0].data + found.ranks[0].update + passing
    assert found.step_s - rest == pytest.approx(simulated, rel=0.01)


def _one_f_one_b(slots: list[float], batches: int) -> float:
    """Seconds until the last backward pass, which takes twice as long as a forward pass."""
    ranks = len(slots)
    orders = [_order(ranks - rank, batches) for rank in range(ranks)]
    done: dict[tuple[str, int, int], float] = {}
    clocks, position = [0.0] * ranks, [0] * ranks
    while any(position[rank] < len(orders[rank]) for rank in range(ranks)):
        for rank in range(ranks):
            if position[rank] == len(orders[rank]):
                continue
            kind, batch = orders[rank][position[rank]]
            before = rank - 1 if kind == "F" else rank + 1
            ready = 0.0 if before in (-1, ranks) else done.get((kind, batch, before))
            if ready is None:
                continue
            share = 1 / 3 if kind == "F" else 2 / 3
            clocks[rank] = max(clocks[rank], ready) + share * slots[rank]
            done[kind, batch, rank] = clocks[rank]
            position[rank] += 1
    return max(clocks)


def _order(ahead: int, batches: int) -> list[tuple[str, int]]:
    forward, backward = (iter([(kind, i) for i in range(batches)]) for kind in "FB")
    order = list(itertools.islice(forward, ahead - 1))
    for following in forward:
        order += [following, next(backward)]
    return order + list(backward)


def test_tensor_parallel_ranks_pay_by_their_link() -> None:
    fast, slow = (
        step_time.predict(
            resolve(
                dataclasses.replace(runs.llama3_8b(), data="synthetic", parallel="PP1DP1TP8"),
                Cluster.parse(f"{hardware}x1x8"),
            ),
            Cluster.parse(f"{hardware}x1x8"),
        )
        for hardware in ("a100-80g", "a800-80g")
    )  # an A800 is an A100 with two thirds of its links
    assert slow.ranks[0].compute == fast.ranks[0].compute
    assert slow.ranks[0].tensor == pytest.approx(1.5 * fast.ranks[0].tensor)


# --- what is printed


def test_the_first_choice_is_the_published_best() -> None:
    found, _ = choices(runs.llama3_8b(), EIGHT)
    best = next(choice for choice in found if choice.fits)
    assert best.flags == "--parallel PP2DP4TP1 --micro-batch 1 --recompute none"
    faster = [choice for choice in found if choice.step_s < best.step_s]
    assert faster
    assert all("PP1DP8TP1" in choice.flags and not choice.fits for choice in faster)


def test_what_search_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama3-8b", "--search", "--cluster", "a100-80gx1x8"]) == 0
    printed = capsys.readouterr().out
    assert printed.index("PP2DP4TP1") < printed.index("faster, but too large")
    assert printed.index("faster, but too large") < printed.index("PP1DP8TP1")
    assert main(["plan", "llama3-8b", "--search", "--cluster", "h100x55x8"]) == 2
    assert "can run on h100x55x8. --parallel" in capsys.readouterr().err  # 512 sequences
    assert main(["plan", "llama3-8b", "--search"]) == 2  # a CPU has no predicted time
    assert "--search needs predicted times" in capsys.readouterr().err


def test_a_plan_says_what_binds_and_needs_no_torch() -> None:
    words = ["plan", "llama3-8b", "--cluster", "h100x2x8", "--parallel", "PP1DP8TP2"]
    printed = run_without_torch(words)
    assert "Bound by compute" in printed
    assert "MFU 38." in printed  # published: 38.4
    assert "FlagPerf" in printed


def test_hardware_that_was_never_measured_is_told_so() -> None:
    cfg = workloads.resolve(small(parallel="PP1DP1TP1"), Cluster.parse("b200x1x1"))
    plan = workloads.definition(cfg).plan
    assert plan is not None
    sources = plan(cfg, Cluster.parse("b200x1x1")).sources
    assert "of b200 nothing was measured" in " ".join(sources)


def test_the_page_gives_the_files_errors() -> None:
    """docs/predictions.md: predicted and measured seconds of every timed row of FlagPerf."""
    page = (RESULTS.parents[1] / "docs" / "predictions.md").read_text()
    for row in read_rows("plan_errors"):
        if row["workload"] == "llama3" and row["held_out"] and row["measured_s"]:
            assert f"| {row['measured_s']:.2f} | {row['predicted_s']:.2f} |" in page, row["case"]
