"""Folders of checkpoints: the last few stay, and each is whole or not there, whatever happens."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.checkpoint_tensors import save_checkpoint, some_tensors
from trainmark.checkpoint import checkpoints, folders
from trainmark.checkpoint import writer as checkpoint_writer
from trainmark.errors import InputError

# --- which stay


def test_the_last_k_stay(tmp_path: Path) -> None:
    assert folders.latest(tmp_path / "nowhere") is None
    root = tmp_path / "run" / "checkpoints"
    for step in (5, 10, 90, 100_000_000, 100_000_001):
        path = save_checkpoint(root, step, some_tensors(), {"step": step}, keep=3)
        assert folders.latest(root) == path
    assert [folders.read_state(p)["step"] for p in folders.all_checkpoints(root)] == [
        90,
        100_000_000,
        100_000_001,
    ]
    assert len(list(root.iterdir())) == 3


def test_what_was_just_written_is_never_pruned(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 9, {}, {}, keep=1)
    path = save_checkpoint(tmp_path, 5, {}, {}, keep=1)
    assert path.exists()


def test_keep_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="keep = 0"):
        save_checkpoint(tmp_path, 1, {}, {}, keep=0)


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    for attempt in (1, 2):
        path = save_checkpoint(tmp_path, 3, some_tensors(), {"attempt": attempt}, keep=2)
    assert folders.read_state(path) == {"attempt": 2}
    assert list(tmp_path.iterdir()) == [path]


def test_leftovers_are_ignored_and_removed(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 3, {}, {}, keep=2)
    for leftover in (".writing-step-00000004", ".removing-step-00000001"):
        shutil.copytree(path, tmp_path / leftover)
    (tmp_path / "step-notes.txt").touch()
    assert folders.all_checkpoints(tmp_path) == [path]
    newest = save_checkpoint(tmp_path, 4, {}, {}, keep=2)
    assert sorted(tmp_path.iterdir()) == [path, newest, tmp_path / "step-notes.txt"]


# --- writes that fail


def test_a_full_disk_is_noticed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_checkpoint(tmp_path, 1, some_tensors(), {}, keep=1)
    usage = SimpleNamespace(total=2**40, used=2**40 - 2**20, free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InputError, match=r"needs 2\.0 MiB and the disk has 1\.0 MiB free"):
        save_checkpoint(tmp_path, 2, {"table": torch.zeros(2**19)}, {}, keep=1)
    assert list(tmp_path.iterdir()) == [path]


def test_a_failing_write_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_checkpoint(tmp_path, 1, some_tensors(), {}, keep=1)

    def no_space(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", no_space)
    with pytest.raises(InputError, match="No space left on device"):
        save_checkpoint(tmp_path, 2, some_tensors(), {}, keep=1)
    assert list(tmp_path.iterdir()) == [path]
    checkpoints.verify(path)


def test_an_interrupt_is_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_writer, "write_manifest", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 1, some_tensors(), {}, keep=1)
    assert list(tmp_path.iterdir()) == []


# --- stops; `test_kill_and_resume.py` kills


@pytest.mark.parametrize("second_step", [1, 2])
def test_a_stop_between_any_two_renames_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second_step: int
) -> None:
    class Stop(BaseException):
        pass

    def stop_at_call(number: int) -> None:
        calls = iter(range(number))
        for owner, name in [(Path, "rename"), (shutil, "rmtree")]:
            original = getattr(owner, name)

            def counting(
                *args: object, original: Callable[..., object] = original, **kwargs: object
            ) -> object:
                if next(calls, None) is None:
                    raise Stop
                return original(*args, **kwargs)

            monkeypatch.setattr(owner, name, counting)

    for number in range(10):
        root = tmp_path / str(number)
        save_checkpoint(root, 1, some_tensors(), {"attempt": 1}, keep=1)
        with monkeypatch.context():
            stop_at_call(number)
            try:
                save_checkpoint(root, second_step, some_tensors(), {"attempt": 2}, keep=1)
                stopped = False
            except Stop:
                stopped = True
            monkeypatch.undo()
        newest = folders.latest(root)
        assert newest is not None
        checkpoints.load(newest, some_tensors(), exact=True)
        assert folders.read_state(newest)["attempt"] == 2 or stopped
        last = save_checkpoint(root, 3, some_tensors(), {}, keep=1)
        assert list(root.iterdir()) == [last]
    assert not stopped  # every call has had its turn
