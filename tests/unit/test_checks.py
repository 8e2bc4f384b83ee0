"""`--check-every`: a step that is computed twice is the step; a bit that differs ends the run."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import flips, rank_processes, small
from tests.distributed.joining import join
from tests.distributed.small_dlrm import batches, placed
from tests.distributed.small_dlrm import trainer as trainer_on
from tests.flips import Moments, Trained, flip
from tests.small import newest, train
from trainmark.config import filled
from trainmark.contract import Workload
from trainmark.distributed import mesh as meshes
from trainmark.errors import InputError
from trainmark.run.checks import can_check, check
from trainmark.training.checking import computed_twice, fingerprint, fingerprints

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_every_flipped_bit_changes_the_fingerprint(dtype: torch.dtype) -> None:
    tensor = (torch.rand(3, 5) * 100).to(dtype)
    before = int(fingerprint(tensor))
    assert before == int(fingerprint(tensor.clone()))
    for element in range(tensor.numel()):
        for bit in range(8 * tensor.element_size()):
            flip(tensor, element, bit)
            assert int(fingerprint(tensor)) != before
            flip(tensor, element, bit)
    assert int(fingerprint(tensor.t())) == before
    assert int(fingerprint(tensor, tensor)) == 2 * before


def test_what_differs_is_named() -> None:
    weight, results = torch.ones(2), iter([1.0, 2.0])

    def compute() -> torch.Tensor:
        weight[0] += 1
        return torch.tensor(next(results))

    found, differ = computed_twice(
        compute,
        lambda loss: fingerprints({"loss": loss, "same": torch.zeros(1)}),
        lambda: None,
        lambda: fingerprints({"weight": weight, "other": torch.ones(1)}),
    )
    assert found == 2
    assert {name for name, flag in differ.items() if flag} == {"loss", "weight"}


@pytest.mark.parametrize("name", flips.CONFIGS)
def test_a_checked_step_is_the_step(name: str) -> None:
    """To the last bit: loss, weights and optimiser."""
    trained, found = Trained.of(name), []
    for checked in (True, False):
        trained.put_back()
        trainer = trained.trainer
        for batch in trained.batches:
            prepared = trainer.prepare(batch)
            if checked:
                loss, skipped, differ = filled(trained.workload.checked_step)(
                    trainer, prepared, flips.LR
                )
                assert len(differ) > 10
                assert not any(differ.values())
            else:
                loss, skipped = trainer.step(prepared, flips.LR)
            assert not skipped
        found.append(small.copies(trained.tensors()) | {"loss": loss})
    assert small.same_bits(*found)
    assert not small.same_bits(trained.tensors(), trained.kept)


@pytest.mark.parametrize("name", flips.CONFIGS)
def test_flips_are_found(name: str) -> None:
    assert flips.in_activations(name, 1).found == 1
    assert flips.in_weights(name, 2).found == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", flips.CONFIGS)
@pytest.mark.parametrize("where", [flips.in_activations, flips.in_weights])
def test_99_of_100_flips_that_matter_are_found(name: str, where: Any) -> None:
    counts = where(name, 100)
    assert counts.found >= 99, counts


# --- a run


def test_a_run_on_a_faulty_device_ends_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--checkpoint-every", "2 steps", "--log-every", "1", "--check-every", "3")
    assert train(tmp_path / "good", *flags) == 0
    undisturbed = (tmp_path / "good" / "loss.csv").read_text()
    assert train(tmp_path / "unchecked", *flags[:-2]) == 0
    assert undisturbed == (tmp_path / "unchecked" / "loss.csv").read_text()
    capsys.readouterr()
    with flips.watched("dlrm", Moments(30, lambda result: flip(result, 0, 30))):
        assert train(tmp_path / "bad", *flags) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "Step 3 was computed twice, and not to the same bits: the" in said
    assert "the loss" in said or "gradient" in said
    assert f"the last checkpoint is {newest(tmp_path / 'bad')}" in said
    assert newest(tmp_path / "bad").name == "step-00000002"
    assert len((tmp_path / "bad" / "loss.csv").read_text().splitlines()) == 3
    # On a good device it goes on.
    assert train(tmp_path / "bad", *flags) == 0
    assert undisturbed == (tmp_path / "bad" / "loss.csv").read_text()


def test_who_cannot_be_checked_is_told() -> None:
    cfg = small.config(check_every=5)
    without = dataclasses.replace(_dlrm(), checked_step=None)
    with pytest.raises(InputError, match="check_every: dlrm has no checked steps"):
        can_check(cfg, without)
    can_check(small.config(), without)
    sharding = dataclasses.replace(cfg.sharding, engine="torchrec")
    with pytest.raises(InputError, match="check_every is for --engine native"):
        small.config(check_every=5, sharding=sharding)


def _dlrm() -> Workload[Any, Any, Any, Any, Any]:
    from trainmark import workloads

    return workloads.load("dlrm")


# --- ranks


def _two_ranks(rank: int, folder: Path) -> None:
    join(rank, 2, folder / "store")
    mesh = meshes.build(CPU, {"dp": 2})
    for kind in ("mixture", "mixture_host", "row_wise_host", "data_parallel"):
        losses = []
        for checked in (True, False):
            built = trainer_on(placed(2, "rowwise_adagrad", kind, folder), mesh)
            first, second, third = batches(built)[:3]
            ahead = built.prepare(first), built.prepare(second)
            built.step(ahead[0], 0.1)
            following = built.prepare(third)
            if checked:
                *_, differ = built.checked_step(ahead[1], 0.1)
                check(2, differ, built, mesh, lambda: "")
                assert "the gradients of table rows" in differ
            else:
                built.step(ahead[1], 0.1)
            losses.append(built.step(following, 0.1)[0].item())
        assert losses[0] == losses[1], kind

    # One rank's bits, in what it computes and in what all have alike.
    name = "the loss"
    said = []
    for flag in (rank == 1, False):
        try:
            check(2, {name: torch.tensor(flag)}, built, mesh, lambda: "none is saved")
        except InputError as error:
            said.append(str(error))
        if rank == 1:
            flip(next(iter(built.weights().values())), 0, 3)
    try:
        check(3, {name: torch.tensor(False)}, built, mesh, lambda: "none is saved")
    except InputError as error:
        said.append(str(error))
    (folder / f"said-{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_end_together(tmp_path: Path) -> None:
    rank_processes.run(_two_ranks, tmp_path, world=2)
    said = [json.loads((tmp_path / f"said-{rank}.json").read_text()) for rank in range(2)]
    assert said[0] == said[1]
    assert len(said[0]) == 2
    assert "Step 2 was computed twice, and not to the same bits: on rank 1, the loss." in said[0][0]
    assert "ranks have different bits of what they should have alike: bottom" in said[0][1]
