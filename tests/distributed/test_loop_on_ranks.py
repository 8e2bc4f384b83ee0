"""The loop on 1 and 2 ranks: the same samples, weights and ends, pipelined or data parallel."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import rank_processes
from tests.distributed.joining import join
from tests.distributed.toy import ROWS, TOY, ToyRun
from tests.small import curve, newest
from trainmark.checkpoint import checkpoints, folders
from trainmark.distributed import mesh as meshes
from trainmark.distributed.mesh import Mesh
from trainmark.errors import InputError
from trainmark.run.assessment import evaluated
from trainmark.run.clocks import global_counts
from trainmark.run.loop import Interrupted, Training

CPU = torch.device("cpu")
BASE = ToyRun(
    name="toy",
    workload="toy",
    data="synthetic",
    global_batch=24,
    micro_batch=24,
    accumulate=1,
    eval_batch=24,
    lr=0.3,
    epochs=2,
    log_every=4,
    warmup_clock=2,
    evals_per_epoch=2,
    checkpoint_every="never",
)
STEPS = 20  # 230 rows in 10 batches, twice

SCENARIOS: dict[str, tuple[ToyRun, dict[str, int]]] = {
    "alone": (BASE, {}),
    "accumulated": (dataclasses.replace(BASE, micro_batch=5, accumulate=5), {}),
    "pipeline": (dataclasses.replace(BASE, micro_batch=8, accumulate=3), {"pp": 2, "dp": 1}),
    "data parallel": (dataclasses.replace(BASE, micro_batch=6, accumulate=2), {"pp": 1, "dp": 2}),
}

PATIENT: dict[str, Any] = {"patience": 1, "lr": 2.0, "evals_per_epoch": 10}
"""With a rate so high that the error soon rises for good."""
VARIANTS: dict[str, dict[str, Any]] = {
    "": {"checkpoint_every": "20 steps"},
    # 3 and 7 are no multiples of log_every: ranks must still save together.
    ", saving": {"max_steps": 7, "checkpoint_every": "3 steps"},
    ", patient": PATIENT,
    ", poisoned": {"poisoned_row": 71},
    ", signalled": {"signal_at": 5 * 24},
}


def run(cfg: ToyRun, mesh: Mesh, output: Path) -> dict[str, Any]:
    """Train, and tell what happened on this rank."""
    output.mkdir(exist_ok=True, parents=True)
    mesh.barrier()
    training = Training(cfg, TOY, mesh, output, started=time.perf_counter(), host_bytes_left=2**30)
    training.set_up()
    try:
        training.run()
        ended = "finished"
    except Interrupted as stop:
        ended = f"interrupted {stop.exit_code}"
    except InputError as error:
        ended = str(error)
    totals = training.clocks.totals
    at_end, _ = evaluated(training.workload, training.trainer, training._data("test"))
    return {
        "error_at_end": at_end["error"],
        "ended": ended,
        "counts": global_counts(training.clocks.totals, training.mesh),
        "local_samples": totals.samples,
        "partial": totals.steps_partial,
        "step": training.progress.step,
        "evaluations": [(e.at_sample, e.metrics["error"]) for e in training.progress.evaluations],
        "times": [totals.e2e, totals.whole, totals.train],
        "saved": [path.name for path in folders.all_checkpoints(output / "checkpoints")],
    }


def _on_a_rank(rank: int, folder: Path) -> None:
    """Everything that two ranks are needed for, in one process group."""
    join(rank, 2, folder / "store")
    found = {}
    for name in ("pipeline", "data parallel"):
        cfg, axes = SCENARIOS[name]
        mesh = meshes.build(CPU, axes)
        for suffix, changes in VARIANTS.items():
            changed = dataclasses.replace(cfg, **changes)
            found[name + suffix] = run(changed, mesh, folder / (name + suffix))
    profiled = dataclasses.replace(SCENARIOS["data parallel"][0], max_steps=3, profile="1:2")
    run(profiled, mesh, folder / f"profiled on {rank}")
    try:
        meshes.build(CPU, {"pp": 2, "dp": 2})
    except InputError as error:
        found["wrong degrees"] = {"ended": str(error)}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """What each of two ranks saw."""
    rank_processes.run(_on_a_rank, folder, world=2)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    cfg = dataclasses.replace(BASE, checkpoint_every="20 steps")
    return run(cfg, meshes.single(CPU), folder / "alone")


def weights(output: Path) -> dict[str, torch.Tensor]:
    """The newest weights in `output`, whoever wrote them."""
    names = [
        f"{stage}.linear.{kind}" for stage in ("first", "second") for kind in ("weight", "bias")
    ]
    return checkpoints.read(newest(output), [f"model.{name}" for name in names])


def assert_same_course(output: Path, expected: Path) -> None:
    for (*at, loss), (*expected_at, expected_loss) in zip(
        curve(output), curve(expected), strict=True
    ):
        assert at == expected_at
        assert loss == pytest.approx(expected_loss, rel=1e-5)
    reference = weights(expected)
    for name, tensor in weights(output).items():
        torch.testing.assert_close(tensor, reference[name], rtol=1e-4, atol=1e-6)


def test_accumulation_in_one_process(folder: Path, alone: dict[str, Any]) -> None:
    cfg = dataclasses.replace(SCENARIOS["accumulated"][0], checkpoint_every="20 steps")
    found = run(cfg, meshes.single(CPU), folder / "accumulated")
    assert found["counts"] == alone["counts"]
    assert_same_course(folder / "accumulated", folder / "alone")


@pytest.mark.parametrize("name", ["pipeline", "data parallel"])
def test_two_ranks_train_what_one_trains(
    folder: Path, alone: dict[str, Any], ranks: list[dict[str, Any]], name: str
) -> None:
    assert_same_course(folder / name, folder / "alone")
    for found in (rank[name] for rank in ranks):
        assert found["ended"] == "finished"
        assert [at for at, _ in found["evaluations"]] == [at for at, _ in alone["evaluations"]]
        errors = [error for _, error in found["evaluations"]]
        assert errors == pytest.approx([error for _, error in alone["evaluations"]], rel=1e-4)
    first, last = curve(folder / name)[0][2], curve(folder / name)[-1][2]
    assert last < first


@pytest.mark.parametrize("name", ["pipeline", "data parallel"])
def test_two_ranks_count_the_samples_of_one(
    alone: dict[str, Any], ranks: list[dict[str, Any]], name: str
) -> None:
    assert alone["counts"]["samples"] == 2 * ROWS
    assert alone["counts"]["tokens"] == 5 * 2 * ROWS
    local = [rank[name]["local_samples"] for rank in ranks]
    for rank in ranks:
        assert rank[name]["counts"] == alone["counts"]
        assert (rank[name]["step"], rank[name]["partial"]) == (STEPS, alone["partial"])
    # Ranks of one pipeline see the same samples; data-parallel ones share them.
    assert sum(local) == (2 if name == "pipeline" else 1) * 2 * ROWS


@pytest.mark.parametrize("name", ["pipeline", "data parallel"])
def test_ranks_save_together_at_any_step(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        assert rank[f"{name}, saving"]["saved"] == ["step-00000006", "step-00000007"]


@pytest.mark.parametrize("name", ["pipeline", "data parallel"])
def test_ranks_run_out_of_patience_together(
    folder: Path, ranks: list[dict[str, Any]], name: str
) -> None:
    output = folder / f"{name}, patient"
    cfg = dataclasses.replace(BASE, **PATIENT)
    alone = run(cfg, meshes.single(CPU), folder / f"alone, patient, {name}")
    best = min(range(len(alone["evaluations"])), key=lambda i: alone["evaluations"][i][1])
    assert best == len(alone["evaluations"]) - 2
    for rank in ranks:
        found = rank[f"{name}, patient"]
        assert (found["step"], found["saved"]) == (alone["step"], alone["saved"])
        assert found["saved"][-1] == f"step-{found['step'] - 1:08d}"
        expected = [error for _, error in alone["evaluations"]]
        assert [error for _, error in found["evaluations"]] == pytest.approx(expected, rel=1e-3)
        # The weights that the ranks ended with are the best ones.
        assert found["error_at_end"] == pytest.approx(expected[best], rel=1e-3)
    for key, tensor in weights(output).items():
        torch.testing.assert_close(
            tensor, weights(folder / f"alone, patient, {name}")[key], rtol=1e-3, atol=1e-5
        )


@pytest.mark.parametrize("name", ["pipeline", "data parallel"])
def test_one_process_continues_what_two_ranks_saved(
    folder: Path, alone: dict[str, Any], ranks: list[dict[str, Any]], name: str
) -> None:
    output = folder / f"{name}, saving"
    cfg = dataclasses.replace(BASE, checkpoint_every="20 steps")
    found = run(cfg, meshes.single(CPU), output)
    assert found["counts"]["samples"] == alone["counts"]["samples"]
    assert found["step"] == STEPS
    assert_same_course(output, folder / "alone")


@pytest.mark.parametrize("name", ["pipeline", "data parallel"])
def test_all_ranks_stop_at_a_loss_that_is_not_finite(
    ranks: list[dict[str, Any]], name: str
) -> None:
    for rank in ranks:
        ended = rank[f"{name}, poisoned"]["ended"]
        assert "The loss of step 3 is not finite" in ended
        assert "the batch that ends at 72" in ended
        assert rank[f"{name}, poisoned"]["step"] == 4  # the next look


@pytest.mark.parametrize("name", ["pipeline", "data parallel"])
def test_a_signal_to_one_rank_stops_all(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        found = rank[f"{name}, signalled"]
        assert found["ended"] == "interrupted 143"
        assert found["saved"] == ["step-00000008"]  # the look after step 5


def test_degrees_that_do_not_multiply_to_the_ranks(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert (
            "pp 2 x dp 2 must multiply to the number of ranks (2)" in rank["wrong degrees"]["ended"]
        )


@pytest.mark.usefixtures("ranks")
def test_only_the_first_rank_is_profiled(folder: Path) -> None:
    json.loads((folder / "profiled on 0" / "profile.json").read_text())
    assert not (folder / "profiled on 1" / "profile.json").exists()
