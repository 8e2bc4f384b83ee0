"""Checkpoints that are written while training goes on: the same bytes, the same errors."""

import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import rank_processes
from tests.checkpoint_tensors import STATE, random_bits, save_checkpoint, some_tensors
from tests.distributed.joining import join
from tests.small import newest, result, saved, snapshot, train
from tests.unit.test_checkpoint_room import tensors_of
from tests.unit.test_run_outputs import perf_events
from tests.waiting import PATIENCE_S
from trainmark.checkpoint import checkpoints, folders
from trainmark.checkpoint import saver as savers
from trainmark.checkpoint.local_shards import LocalShards
from trainmark.checkpoint.saver import HostMemory, Saver, copy_bytes
from trainmark.checkpoint.storage import DTYPE_CODES
from trainmark.checkpoint.writer import plan_share
from trainmark.errors import InputError
from trainmark.run import memory as run_memory
from trainmark.run.loop import Training

CPU = torch.device("cpu")


def saver_for(root: Path, tensors: dict[str, Any], group: Any = None) -> Saver:
    return Saver(root, HostMemory(copy_bytes(plan_share(tensors, group)), CPU), group)


def held(tensor: Any) -> list[torch.Tensor]:
    return (
        [shard.tensor for shard in tensor.shards] if isinstance(tensor, LocalShards) else [tensor]
    )


def all_kinds() -> dict[str, torch.Tensor]:
    """Of every type, empty ones, scalars, and such as are no run of memory."""
    found = {str(dtype): random_bits(dtype, (7, 5)) for dtype in DTYPE_CODES}
    found |= {"columns": torch.rand(40, 9)[:, 2:5], "turned": torch.rand(6, 50).t()}
    return found | some_tensors() | {"none": torch.empty(0, 4)}


@pytest.mark.usefixtures("small_chunks")
def test_the_bytes_are_those_of_a_save_that_training_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(savers, "BLOCK_BYTES", 192)  # a chunk and a half
    tensors = all_kinds()
    expected = snapshot(save_checkpoint(tmp_path / "waited for", 7, tensors, STATE, keep=1))
    assert len(plan_share(tensors).pieces) > 50
    state = {**STATE, "list": [1]}
    with saver_for(tmp_path / "beside", tensors) as saver:
        for attempt in range(2):
            saver.save(7, tensors, STATE if attempt else state, keep=1)
            state["list"].append(2)  # type: ignore[attr-defined]
            if attempt:
                for tensor in tensors.values():
                    tensor.zero_()
            written = saver.wait()
            assert saver.wait() is None
    assert written is not None
    assert snapshot(written.path) == expected
    assert written.background_s > 0


def test_copies_lie_in_one_block_each() -> None:
    sizes = [1, 100, 64, 128, 2, 127, 3]

    class Sized:
        def __init__(self, nbytes: int) -> None:
            self.tensor = torch.empty(nbytes, dtype=torch.uint8)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(savers, "BLOCK_BYTES", 128)
        begins, end = savers._layout([Sized(n) for n in sizes])  # type: ignore[misc]
    spans = list(zip(begins, sizes, strict=True))
    assert all(begin // 128 == (begin + size - 1) // 128 for begin, size in spans)
    for (begin, size), (following, _) in itertools.pairwise(spans):
        assert begin + size <= following
    assert end == spans[-1][0] + 3
    assert all(begin % 64 == 0 for begin in begins)


def _two_ranks(rank: int, folder: Path) -> None:
    join(rank, 2, folder / "store")
    group = dist.new_group(backend="gloo")
    tensors = tensors_of(rank)
    save_checkpoint(folder / "waited for", 7, tensors, STATE, keep=1)
    with saver_for(folder / "beside", tensors, group) as saver:
        saver.save(7, tensors, STATE, keep=1)
        for parts in map(held, tensors.values()):
            for part in parts:
                part.zero_()
        for _ in range(20):  # the training's own collectives go on
            ones = torch.ones(1000)
            dist.all_reduce(ones)
            assert ones[0] == 2
        assert saver.wait() is not None

        # What one rank cannot write, none has written.
        def no_space(*_: object) -> int:
            raise OSError(28, "No space left on device")

        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(os, "pwrite", no_space)
            saver.save(8, tensors, STATE, keep=1)
            with pytest.raises(InputError, match=r"step-00000008: .*No space left on device"):
                saver.wait()
        saver.save(9, tensors, STATE, keep=2)
    dist.barrier()
    assert [path.name for path in folders.all_checkpoints(folder / "beside")] == [
        "step-00000007",
        "step-00000009",
    ]
    assert len(list((folder / "beside").iterdir())) == 2
    dist.destroy_process_group()


def test_two_ranks_write_the_same_bytes(tmp_path: Path) -> None:
    rank_processes.run(_two_ranks, tmp_path, world=2)
    (expected,) = folders.all_checkpoints(tmp_path / "waited for")
    found = snapshot(tmp_path / "beside" / "step-00000007")
    assert len(found) == 3
    assert found == snapshot(expected)


# --- a run


def blocked_until(
    monkeypatch: pytest.MonkeyPatch, step: int, then: Callable[[], object] = lambda: None
) -> list[int]:
    """Let no checkpoint be written before `step` is done; the steps at which one was."""
    done, now, written, count = threading.Event(), [0], checkpoints.write_share, Training._count

    def counted(self: Training, *args: Any) -> None:
        count(self, *args)
        now[0] = self.progress.step
        if now[0] >= step:
            done.set()

    found: list[int] = []

    def late(*args: Any) -> Any:
        assert done.wait(PATIENCE_S), "training does not go on"
        found.append(now[0])
        then()
        return written(*args)

    monkeypatch.setattr(Training, "_count", counted)
    monkeypatch.setattr(checkpoints, "write_share", late)
    return found


FLAGS = ("--checkpoint-every", "3 steps", "--log-every", "1")


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(tmp_path / "undisturbed", *FLAGS) == 0
    with monkeypatch.context() as patch:
        steps = blocked_until(patch, 5)
        assert train(tmp_path / "run", *FLAGS) == 0
    assert steps[0] >= 5  # of the checkpoint of step 3
    assert len(steps) == 3
    assert saved(newest(tmp_path / "run")) == saved(newest(tmp_path / "undisturbed"))
    at_6 = [saved(path / "checkpoints" / "step-00000006") for path in tmp_path.iterdir()]
    assert at_6[0] == at_6[1]
    names = [Path(e["value"]["path"]).name for e in perf_events(tmp_path / "run")
             if e["event"] == "CHECKPOINT"]  # fmt: skip
    assert names == ["step-00000003", "step-00000006", "step-00000008"]
    time_s, notes = result(tmp_path / "run")["time_s"], result(tmp_path / "run")["notes"]
    assert time_s["checkpoint_background"] > 0
    assert not any("stood still" in note for note in notes)


def test_a_disk_that_is_full_ends_the_run_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"

    def fill() -> None:
        if folders.latest(output / "checkpoints"):
            raise OSError(28, "No space left on device")

    blocked_until(monkeypatch, 1, fill)
    assert train(output, *FLAGS) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "Cannot write checkpoint" in said
    assert "step-00000006: " in said
    assert "No space left on device" in said
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["step-00000003"]
    checkpoints.verify(newest(output))
    assert not (output / "result.json").exists()


def test_what_fails_beside_a_save_does_not_lose_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last evaluation fails before the last checkpoint is on disk."""
    failed = threading.Event()

    def fails(*_: Any) -> None:
        failed.set()
        raise InputError("a bad row")

    monkeypatch.setattr(Training, "_evaluate", fails)
    blocked_until(monkeypatch, 0, lambda: failed.wait(PATIENCE_S))
    assert train(tmp_path / "run", "--evals-per-epoch", "0") == 2
    assert newest(tmp_path / "run").name == "step-00000008"


def test_without_host_memory_for_a_copy_training_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_memory, "_SHARE_FOR_COPIES", 0)
    assert train(tmp_path / "run", *FLAGS) == 0
    found = result(tmp_path / "run")
    assert found["time_s"]["checkpoint_background"] == 0
    assert found["time_s"]["checkpoint"] > 0
    assert any(note.startswith("Training stood still") for note in found["notes"])
    monkeypatch.undo()
    assert train(tmp_path / "other", *FLAGS) == 0
    assert saved(newest(tmp_path / "run")) == saved(newest(tmp_path / "other"))
