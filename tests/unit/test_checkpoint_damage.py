"""Damaged checkpoints: every flipped byte is noticed and named, and nothing is unpickled."""

import json
import os
import pickle
import random
import re
from pathlib import Path

import pytest
import torch

from tests.checkpoint_tensors import STATE, save_checkpoint, some_tensors, zeros_like
from trainmark.checkpoint import checkpoints, folders
from trainmark.checkpoint import manifest as checkpoint_manifest
from trainmark.errors import InputError


def save_three(root: Path) -> list[Path]:
    return [save_checkpoint(root, step, some_tensors(), STATE, keep=3) for step in (1, 2, 3)]


def flip_byte(file: Path, position: int, mask: int = 0xFF) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= mask
    file.write_bytes(content)


def test_every_flipped_byte_is_named(tmp_path: Path, small_chunks: int) -> None:
    before, path = save_three(tmp_path)[1:]
    into = zeros_like(some_tensors())
    chance = random.Random(0)
    for file in sorted(path.iterdir()):
        size = file.stat().st_size
        ends = [0, 7, 8, size - 1]
        for position in ends + [chance.randrange(size) for _ in range(60)]:
            mask = 1 << chance.randrange(8)
            flip_byte(file, position, mask)
            with pytest.raises(InputError, match=re.escape(str(file))) as caught:
                checkpoints.load(path, into)
            assert f"Remove {path} to continue from {before}" in str(caught.value)
            flip_byte(file, position, mask)
    checkpoints.verify(path)


def test_a_flipped_byte_names_the_tensor(tmp_path: Path) -> None:
    path = save_three(tmp_path)[-1]
    manifest = json.loads((path / "manifest.json").read_text())
    for name, entry in manifest["tensors"].items():
        chunk = entry["chunks"][0]
        flip_byte(path / chunk["file"], chunk["byte_offset"])
        with pytest.raises(InputError, match=f"tensor '{name}'"):
            checkpoints.load(path, some_tensors())
        flip_byte(path / chunk["file"], chunk["byte_offset"])


@pytest.mark.parametrize("file", ["manifest.json", "rank-00000.safetensors"])
@pytest.mark.parametrize("harm", ["missing", "empty", "truncated", "longer"])
def test_missing_and_truncated_files(tmp_path: Path, file: str, harm: str) -> None:
    before, path = save_three(tmp_path)[1:]
    content = (path / file).read_bytes()
    damaged = {"empty": b"", "truncated": content[:-1], "longer": content + b"\n"}
    if harm == "missing":
        (path / file).unlink()
    else:
        (path / file).write_bytes(damaged[harm])
    with pytest.raises(InputError, match=f"{file} is ") as caught:
        checkpoints.load(path, some_tensors())
    assert f"Remove {path} to continue from {before}" in str(caught.value)


def test_the_way_out_passes_over_other_damaged_checkpoints(tmp_path: Path) -> None:
    first, second, third = save_three(tmp_path)
    flip_byte(second / "rank-00000.safetensors", -1)
    flip_byte(third / "manifest.json", 10)
    with pytest.raises(InputError, match=f"Remove {second} and {third} to continue from {first}"):
        folders.read_state(third)
    flip_byte(first / "manifest.json", 10)
    with pytest.raises(InputError, match="no intact checkpoint before it"):
        checkpoints.names(third)


def test_another_schema_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, {}, {}, keep=1)
    manifest = checkpoint_manifest.read_manifest(path)
    object.__setattr__(manifest, "schema", "trainmark.checkpoint/2")
    (path / "manifest.json").unlink()
    checkpoint_manifest.write_manifest(path, manifest)
    with pytest.raises(InputError, match=r"trainmark\.checkpoint/1"):
        folders.read_state(path)


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Bomb:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "exploded"),)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was unpickled")

    payload = pickle.dumps(Bomb())
    for owner, name in [(pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")]:
        monkeypatch.setattr(owner, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    path = save_checkpoint(tmp_path, 1, some_tensors(), STATE, keep=1)
    assert checkpoints.load(path, some_tensors()) == STATE
    for file in list(path.iterdir()):
        content = file.read_bytes()
        file.write_bytes(payload)
        with pytest.raises(InputError):
            checkpoints.load(path, some_tensors())
        file.write_bytes(content)
    (path / ".metadata").write_bytes(payload)  # where PyTorch's own format keeps its pickle
    checkpoints.load(path, some_tensors())
    assert not (tmp_path / "exploded").exists()
