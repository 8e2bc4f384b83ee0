"""Ranks of NCCL, all on this one GPU, train, evaluate, continue and fail as they should.

They talk over sockets (`tests/distributed/joining.py`): the collectives, streams and graphs are
those of a cluster, the speed is not. A launch of ranks takes seconds, so each walks through many
cases, and the CPU's tests (`tests/distributed`) share the code.
"""

import itertools
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import rank_processes, small, small_distilbert
from tests.distributed import (
    bag_ranks,
    distilbert_ranks,
    dlrm_ranks,
    joining,
    llama3_ranks,
    long_ranks,
    sharded,
    small_dlrm,
)
from tests.distributed.dlrm_ranks import Group
from tests.distributed.launching import ROOT, SHORT, finish, start
from trainmark.checkpoint import checkpoints, folders
from trainmark.cli import main
from trainmark.distributed import mesh as meshes
from trainmark.distributed.launched import LOST_RANK
from trainmark.distributed.mesh import single

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)


# --- every workload


@pytest.mark.gpu_full
def test_dlrm_in_every_placement(tmp_path: Path) -> None:
    found = sharded.check_groups(dlrm_ranks.WITH_A_GPU, tmp_path)
    for group in dlrm_ranks.WITH_A_GPU[:3]:
        formats = found[group]["formats"]
        assert len(formats) == 9 * 4 * 4
        for name, outcome in formats.items():
            kind, optimizer, precision = name.split(", ")
            whole_rows = ["table_wise", "row_wise", *["data_parallel"] * (group.world == 1)]
            if optimizer == "adam":
                assert "Adam needs fp32 tables" in outcome, (name, outcome)
            elif kind in whole_rows:
                changes = small_dlrm.stored(precision)
                near = sharded.one_process("cuda", optimizer, **changes)["losses"]
                assert outcome == pytest.approx(near, rel=sharded.LOW_PRECISION_TOLERANCE), name
            else:
                assert "such tables lie whole on one device" in outcome, (name, outcome)


@pytest.mark.gpu_full
def test_several_ids_per_feature(tmp_path: Path) -> None:
    """Each rank compares with one device itself."""
    bag_ranks.write_data(tmp_path / "data")
    rank_processes.run(bag_ranks.on_ranks, tmp_path, "native", "cuda", world=2)


def llama3(folder: Path, group: str, kind: str) -> dict[str, Any]:
    """What the splits of a group gave."""
    world = llama3_ranks.SPLITS[group][0]
    rank_processes.run(llama3_ranks.main, group, folder, kind, world=world)
    data: dict[str, Any] = json.loads((folder / f"{group}.json").read_text())
    return data


@pytest.mark.gpu_full
def test_llama3_in_every_split(tmp_path: Path) -> None:
    """Ranks of NCCL, of gloo and one device continue one another."""
    alone = {
        device.type: llama3_ranks.train(
            llama3_ranks.config(device=device), single(device), save_to=tmp_path / device.type
        )
        for device in (GPU, llama3_ranks.CPU)
    }
    found = llama3(tmp_path, "two-on-cpus", "cpu")
    found |= llama3(tmp_path, "two-on-a-gpu", "cuda")
    found |= llama3(tmp_path, "four-on-a-gpu", "cuda")
    found |= llama3(tmp_path, "two-on-cpus-again", "cpu")
    assert len(found) == 1 + 8 + 4 + 1
    begun = {name: "cpu" if name == "cpu" or "gloo" in name else "cuda" for name in found}
    begun |= {"cpu": "cpu", "cuda": "cuda"}
    saved_at, stop = llama3_ranks.SAVED_AT, llama3_ranks.SAVED_AT + llama3_ranks.CONTINUED
    for name, losses in found.items():
        near = 0.02 if "8" in name or "16" in name else 1e-4
        assert losses["whole"] == pytest.approx(alone[begun[name]], rel=near), name
        assert len(losses["continued"]) >= 2
        for other, continued in losses["continued"].items():
            near = 0.02 if any(c in name + other for c in ("8", "16")) else 1e-4
            following = alone[begun[other]][saved_at:stop]
            assert continued == pytest.approx(following, rel=near), (other, name)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.gpu_full)])
def test_distilbert(world: int, tmp_path: Path) -> None:
    ranks = distilbert_ranks.start(tmp_path, world, "cuda")
    for mode in distilbert_ranks.MODES:
        distilbert_ranks.check(ranks, mode, GPU)


@pytest.mark.gpu_full
@pytest.mark.parametrize("world", long_ranks.SPLITS)
def test_300_steps(world: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = long_ranks.check(world, tmp_path, "cuda")
    with capsys.disabled():
        print(f"\n| up to step | {' | '.join(map(str, long_ranks.SHOWN))} |", *rows, sep="\n")


# --- commands of NCCL ranks, gloo ranks and one device after each other

FOUR, TWO, GLOO, ONE = Group(4, "cuda"), Group(2, "cuda"), Group(2), Group(1, "cuda")
AFTERWARDS = (ONE, FOUR, GLOO)
"""Who evaluates, and continues, what the others have trained."""
EVERY = ("--checkpoint-every", "2 steps", "--log-every", "1")
LLAMA3 = ("--train-samples", "96", "--warmup-clock", "1", "--evals-per-epoch", "1")
RUNS = {
    "dlrm": ("dlrm-demo", *small.FLAGS),
    "distilbert": (
        "distilbert-demo",
        *small_distilbert.FLAGS,
        "--evals-per-epoch",
        "1",
        "--micro-batch",
        "4",
    ),
    "llama3": ("llama3-demo", *LLAMA3),
}


def _plan(folder: Path) -> list[tuple[Group, list[str]]]:
    """Who does what, in this order."""
    plan = []
    for name, words in RUNS.items():
        run = str(folder / name)

        def train(group: Group, steps: int, to: str, *flags: str, words: Any = words) -> None:
            line = ["train", *words, *EVERY, "--no-compile", "--max-steps", str(steps), *flags]
            plan.append((group, [*line, "--device", group.kind, "--output", to]))

        for group, steps in ((FOUR, 2), (ONE, 4), (TWO, 6)):
            train(group, steps, run)
        for group in AFTERWARDS:
            plan.append((group, ["evaluate", run, "--device", group.kind]))
            begun = f"{run}/checkpoints/step-00000006"
            train(group, 2, f"{run}-from-{group}", "--from", begun, "--with-optimizer")
        train(ONE, 6, f"{run}-alone")
    return plan


def follow_plan(rank: int, group: Group, folder: Path) -> None:
    """A rank's part of it."""
    joining.join(rank, group.world, folder / f"store-{group}", group.kind)
    meshes.local_device = joining.device_of
    meshes.launched_ranks = lambda: group.world
    meshes.is_main_process = lambda: rank == 0
    for number, (whose, words) in enumerate(_plan(folder)):
        while number and not (folder / f"done-{number - 1}").exists():
            time.sleep(0.05)
        if whose == group:
            assert main(words) == 0, words
            dist.barrier()
            if rank == 0 and words[0] == "evaluate":
                shutil.copy(Path(words[1]) / "evaluation.json", f"{words[1]}-{group}.json")
            if rank == 0:
                (folder / f"done-{number}").touch()
    dist.destroy_process_group()


@pytest.mark.gpu_full
def test_commands_continue_and_evaluate_what_others_trained(tmp_path: Path) -> None:
    rank_processes.finish(
        *(
            rank_processes.start(follow_plan, group, tmp_path, world=group.world)
            for group in (FOUR, TWO, GLOO, ONE)
        )
    )
    for name in RUNS:
        found, expected = small.curve(tmp_path / name), small.curve(tmp_path / f"{name}-alone")
        assert [row[:2] for row in found] == [row[:2] for row in expected]
        assert len(found) == 6
        losses, wanted = ([row[2] for row in rows] for rows in (found, expected))
        near = 1e-2 if name == "distilbert" else 1e-4  # which drops out by rank
        assert losses == pytest.approx(wanted, rel=near), name
        began = [small.curve(tmp_path / f"{name}-from-{group}") for group in AFTERWARDS]
        for curve in began[1:]:
            assert [row[2] for row in curve] == pytest.approx(
                [row[2] for row in began[0]], rel=near
            ), name
        evaluations = [
            json.loads((tmp_path / f"{name}-{group}.json").read_text())["splits"]
            for group in AFTERWARDS
        ]
        assert evaluations[0]
        for split, metrics in evaluations[0].items():
            for other in evaluations[1:]:
                assert other[split] == pytest.approx(metrics, rel=1e-4), (name, split)


# --- ranks that fail


def _sentences(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("trainmark: ")]


@pytest.mark.gpu_full
def test_a_rank_that_fails_ends_all_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed, out of memory, or stopped: the last of two ranks, the first of four. Each leaves a
    good checkpoint. All jobs run together; stopped ranks are noticed last."""
    ways = {
        "kill": (137, "was killed by SIGKILL"),
        "memory": (2, "rank {broken} on "),
        "input": (2, "The shard of this rank is damaged"),
        "stop": (LOST_RANK, "rank {broken} has not been heard of"),
    }
    short = [*("cuda" if word == "cpu" else word for word in SHORT), "--no-compile"]
    jobs = {}
    for how, (world, broken) in itertools.product(ways, [(2, 1), (4, 0)]):
        output = tmp_path / f"{how}-{world}"
        line = ["launch", "--on", "torchrun", "-j", f"1x{world}", *short, "--output", str(output)]
        line += ["--micro-batch", str(16 // world)]
        launch = start(line, ROOT, f"tests.distributed.broken_rank {how}:{broken}")
        jobs[how, world, broken] = launch, output
    faults, rows = [], []
    for (how, world, broken), (process, output) in jobs.items():
        done = finish(process)
        code, sentence = ways[how]
        saved = folders.latest(output / "checkpoints")
        if saved is not None:  # just before the rank failed
            after = time.time() - saved.stat().st_mtime
            rows.append(f"| {how}, {world} ranks | all had ended {after:.0f} s later, or before |")
        print(done.stderr)
        if done.returncode != code:
            faults.append(f"{how}, {world}: exit code {done.returncode}")
        if not any(sentence.format(broken=broken) in told for told in _sentences(done.stderr)):
            faults.append(f"{how}, {world}: no sentence")
        if "Traceback" in done.stderr or "terminate called" in done.stderr:
            faults.append(f"{how}, {world}: a traceback")
        if saved is None or saved.name != "step-00000004":
            faults.append(f"{how}, {world}: its checkpoint is {saved}")
        else:
            checkpoints.verify(saved)
    with capsys.disabled():
        print("", *rows, sep="\n")
    assert not faults, faults
