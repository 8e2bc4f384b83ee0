"""Checkpoints: bit for bit, whole or not at all, and every flipped byte noticed."""

import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests import checkpoint_saver, rank_processes
from trainmark import checkpoint, checkpoint_manifest, checkpoint_storage
from trainmark.checkpoint_manifest import DTYPE_CODES
from trainmark.errors import InputError

STATE = {"step": 7, "lr": 0.1, "data": {"position": 4096, "epochs": [1, 2]}, "name": "é", "n": None}
SHAPES = [(), (0,), (1,), (7,), (0, 3), (5, 0, 2), (3, 5), (2, 3, 5, 7)]


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Every bit pattern, NaNs and all; booleans have two."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, dtype=torch.uint8).bool()
    raw = torch.randint(0, 256, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        assert bits(a[name]) == bits(b[name]), name


def zeros_like(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def some_tensors() -> dict[str, Tensor]:
    return {
        "table": torch.rand(50, 4),
        "weight": torch.rand(3, 5).to(torch.bfloat16),
        "rng": torch.get_rng_state()[:100],
        "count": torch.tensor(12),
    }


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(checkpoint_storage, "CHUNK_BYTES", 128)
    return 128


# --- round trips


@pytest.mark.parametrize("dtype", DTYPE_CODES, ids=str)
def test_every_dtype_and_shape_returns_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {f"t{shape}": random_bits(dtype, shape) for shape in SHAPES}
    path = checkpoint.save(tmp_path, 7, tensors, STATE, keep=1)
    loaded = zeros_like(tensors)
    assert checkpoint.load(path, loaded, exact=True) == STATE
    assert_same_bits(loaded, tensors)


def test_the_safetensors_library_reads_the_files(tmp_path: Path, small_chunks: int) -> None:
    tensors = {
        f"{dtype}.{shape}": random_bits(dtype, shape) for dtype in DTYPE_CODES for shape in SHAPES
    }
    path = checkpoint.save(tmp_path, 1, tensors, {}, keep=1)
    assert_same_bits(load_file(path / "rank-00000.safetensors"), tensors)


def test_views_parameters_and_strides(tmp_path: Path, small_chunks: int) -> None:
    transposed, strided = torch.rand(40, 30).T, torch.rand(100, 8)[::3, 1:5]
    parameter = torch.nn.Parameter(torch.rand(9, 9))
    path = checkpoint.save(tmp_path, 1, {"t": transposed, "s": strided, "p": parameter}, {}, keep=1)
    into = {
        "t": torch.zeros(40, 30).T,
        "s": torch.zeros(100, 8)[::3, 1:5],
        "p": torch.nn.Parameter(torch.zeros(9, 9)),
    }
    checkpoint.load(path, into)
    assert_same_bits(into, {"t": transposed, "s": strided, "p": parameter})


def test_no_tensors_at_all(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, {}, STATE, keep=1)
    assert checkpoint.load(path, {}, exact=True) == STATE


def test_saving_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = checkpoint.save(tmp_path, 1, some_tensors(), {}, keep=1)
        checkpoint.load(path, some_tensors())
        with pytest.raises(InputError):
            checkpoint.load(path, {"unknown": torch.zeros(1)})
    assert capfd.readouterr() == ("", "")


@pytest.mark.gpu
def test_device_tensors(tmp_path: Path) -> None:
    tensors = {f"{dtype}": random_bits(dtype, (1000, 64)).cuda() for dtype in DTYPE_CODES}
    path = checkpoint.save(tmp_path, 1, tensors, {}, keep=1)
    on_device = zeros_like(tensors)
    on_host = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in tensors.items()}
    for into in (on_device, on_host):
        checkpoint.load(path, into)
        assert_same_bits(into, tensors)


# --- chunks


@pytest.mark.parametrize("shape", [(1000,), (100, 7), (3, 50, 9), (1, 1, 999), (2, 3, 5, 40)])
def test_chunks_are_bounded_and_in_row_major_order(
    tmp_path: Path, small_chunks: int, shape: tuple[int, ...]
) -> None:
    tensors = {"x": torch.rand(shape)}
    path = checkpoint.save(tmp_path, 1, tensors, {}, keep=1)
    chunks = json.loads((path / "manifest.json").read_text())["tensors"]["x"]["chunks"]
    assert len(chunks) > 1
    assert max(chunk["byte_length"] for chunk in chunks) <= small_chunks
    flat = tensors["x"].reshape(-1)
    for chunk in chunks:
        box = tuple(slice(o, o + n) for o, n in zip(chunk["offsets"], chunk["sizes"], strict=True))
        data = bits(tensors["x"][box])
        begin = chunk["byte_offset"] - chunks[0]["byte_offset"]
        assert data == bits(flat)[begin : begin + chunk["byte_length"]]
    loaded = zeros_like(tensors)
    checkpoint.load(path, loaded)
    assert_same_bits(loaded, tensors)


def test_a_chunk_of_a_real_table_is_small() -> None:
    pieces = list(checkpoint_storage._split((40_000_000, 128), checkpoint_storage.CHUNK_BYTES // 4))
    rows = [sizes[0] for _, sizes in pieces]
    assert sum(rows) == 40_000_000
    assert max(rows) * 128 * 4 <= 16 * 2**20


# --- damage


def save_three(root: Path) -> list[Path]:
    return [checkpoint.save(root, step, some_tensors(), STATE, keep=3) for step in (1, 2, 3)]


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
                checkpoint.load(path, into)
            assert f"Remove {path} to continue from {before}" in str(caught.value)
            flip_byte(file, position, mask)
    checkpoint.verify(path)


def test_a_flipped_byte_names_the_tensor(tmp_path: Path) -> None:
    path = save_three(tmp_path)[-1]
    manifest = json.loads((path / "manifest.json").read_text())
    for name, entry in manifest["tensors"].items():
        chunk = entry["chunks"][0]
        flip_byte(path / chunk["file"], chunk["byte_offset"])
        with pytest.raises(InputError, match=f"tensor '{name}'"):
            checkpoint.load(path, some_tensors())
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
        checkpoint.load(path, some_tensors())
    assert f"Remove {path} to continue from {before}" in str(caught.value)


def test_the_way_out_passes_over_other_damaged_checkpoints(tmp_path: Path) -> None:
    first, second, third = save_three(tmp_path)
    flip_byte(second / "rank-00000.safetensors", -1)
    flip_byte(third / "manifest.json", 10)
    with pytest.raises(InputError, match=f"Remove {second} and {third} to continue from {first}"):
        checkpoint.read_state(third)
    flip_byte(first / "manifest.json", 10)
    with pytest.raises(InputError, match="no intact checkpoint before it"):
        checkpoint.names(third)


def test_another_schema_is_refused(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, {}, {}, keep=1)
    manifest = checkpoint_manifest.read_manifest(path)
    object.__setattr__(manifest, "schema", "trainmark.checkpoint/2")
    (path / "manifest.json").unlink()
    checkpoint_manifest.write_manifest(path, manifest)
    with pytest.raises(InputError, match=r"trainmark\.checkpoint/1"):
        checkpoint.read_state(path)


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
    path = checkpoint.save(tmp_path, 1, some_tensors(), STATE, keep=1)
    assert checkpoint.load(path, some_tensors()) == STATE
    for file in list(path.iterdir()):
        content = file.read_bytes()
        file.write_bytes(payload)
        with pytest.raises(InputError):
            checkpoint.load(path, some_tensors())
        file.write_bytes(content)
    (path / ".metadata").write_bytes(payload)  # where PyTorch's own format keeps its pickle
    checkpoint.load(path, some_tensors())
    assert not (tmp_path / "exploded").exists()


# --- what is asked for and what is there


def test_only_the_given_names_are_loaded(tmp_path: Path) -> None:
    tensors = some_tensors()
    path = checkpoint.save(tmp_path, 1, tensors, STATE, keep=1)
    assert checkpoint.names(path) == sorted(tensors)
    assert checkpoint.read_state(path) == STATE
    into = {"table": torch.zeros(50, 4)}
    checkpoint.load(path, into)
    assert_same_bits(into, {"table": tensors["table"]})


def test_all_mismatches_are_named_at_once(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, some_tensors(), STATE, keep=1)
    asked = {
        "table": torch.zeros(4, 50),
        "weight": torch.zeros(3, 5),
        "rng": torch.zeros(100, dtype=torch.uint8),
        "bias": torch.zeros(3),
        "other": torch.zeros(3),
    }
    with pytest.raises(InputError) as caught:
        checkpoint.load(path, asked, exact=True)
    for part in [
        "not in the checkpoint: bias, other",
        "only in the checkpoint: count",
        "'table' is torch.float32 [50, 4] there and torch.float32 [4, 50] here",
        "'weight' is torch.bfloat16 [3, 5] there and torch.float32 [3, 5] here",
    ]:
        assert part in str(caught.value)


def test_meta_tensors_cannot_be_filled(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, some_tensors(), STATE, keep=1)
    with pytest.raises(ValueError, match=r"meta device: \['table'\]"):
        checkpoint.load(path, {"table": torch.zeros(50, 4, device="meta")})


def test_no_checkpoint_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no checkpoint at"):
        checkpoint.load(tmp_path / "step-00000001", {})


@pytest.mark.parametrize("state", [{"a": (1, 2)}, {1: 2}, {"a": float("nan")}])
def test_a_state_that_json_would_change_is_refused(tmp_path: Path, state: dict) -> None:
    with pytest.raises(ValueError, match="JSON"):
        checkpoint.save(tmp_path, 1, {}, state, keep=1)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, dtype=torch.complex128),
        torch.zeros(2, device="meta"),
        torch.zeros(2, 2).to_sparse(),
    ],
    ids=["dtype", "meta", "sparse"],
)
def test_a_tensor_that_cannot_be_stored_is_named(tmp_path: Path, tensor: Tensor) -> None:
    with pytest.raises(ValueError, match="'odd'"):
        checkpoint.save(tmp_path, 1, {"odd": tensor}, {}, keep=1)


# --- folders


def test_the_last_k_stay(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "nowhere") is None
    root = tmp_path / "run" / "checkpoints"
    for step in (5, 10, 90, 100_000_000, 100_000_001):
        path = checkpoint.save(root, step, some_tensors(), {"step": step}, keep=3)
        assert checkpoint.latest(root) == path
    assert [checkpoint.read_state(p)["step"] for p in checkpoint.all_checkpoints(root)] == [
        90,
        100_000_000,
        100_000_001,
    ]
    assert len(list(root.iterdir())) == 3


def test_what_was_just_written_is_never_pruned(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 9, {}, {}, keep=1)
    path = checkpoint.save(tmp_path, 5, {}, {}, keep=1)
    assert path.exists()


def test_keep_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="keep = 0"):
        checkpoint.save(tmp_path, 1, {}, {}, keep=0)


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    for attempt in (1, 2):
        path = checkpoint.save(tmp_path, 3, some_tensors(), {"attempt": attempt}, keep=2)
    assert checkpoint.read_state(path) == {"attempt": 2}
    assert list(tmp_path.iterdir()) == [path]


def test_leftovers_are_ignored_and_removed(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 3, {}, {}, keep=2)
    for leftover in (".writing-step-00000004", ".removing-step-00000001"):
        shutil.copytree(path, tmp_path / leftover)
    (tmp_path / "step-notes.txt").touch()
    assert checkpoint.all_checkpoints(tmp_path) == [path]
    newest = checkpoint.save(tmp_path, 4, {}, {}, keep=2)
    assert sorted(tmp_path.iterdir()) == [path, newest, tmp_path / "step-notes.txt"]


def test_a_full_disk_is_noticed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint.save(tmp_path, 1, some_tensors(), {}, keep=1)
    usage = namedtuple("usage", "total used free")(2**40, 2**40 - 2**20, 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InputError, match=r"needs 0\.00195 GiB and the disk has 0\.000977 GiB free"):
        checkpoint.save(tmp_path, 2, {"table": torch.zeros(2**19)}, {}, keep=1)
    assert list(tmp_path.iterdir()) == [path]


def test_a_failing_write_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint.save(tmp_path, 1, some_tensors(), {}, keep=1)

    def no_space(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", no_space)
    with pytest.raises(InputError, match="No space left on device"):
        checkpoint.save(tmp_path, 2, some_tensors(), {}, keep=1)
    assert list(tmp_path.iterdir()) == [path]
    checkpoint.verify(path)


def test_an_interrupt_is_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_storage, "write_manifest", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 1, some_tensors(), {}, keep=1)
    assert list(tmp_path.iterdir()) == []


# --- kills


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

            def counting(*args: object, original=original, **kwargs: object) -> object:
                if next(calls, None) is None:
                    raise Stop
                return original(*args, **kwargs)

            monkeypatch.setattr(owner, name, counting)

    for number in range(10):
        root = tmp_path / str(number)
        checkpoint.save(root, 1, some_tensors(), {"attempt": 1}, keep=1)
        with monkeypatch.context():
            stop_at_call(number)
            try:
                checkpoint.save(root, second_step, some_tensors(), {"attempt": 2}, keep=1)
                stopped = False
            except Stop:
                stopped = True
            monkeypatch.undo()
        newest = checkpoint.latest(root)
        assert newest is not None
        checkpoint.load(newest, some_tensors(), exact=True)
        assert checkpoint.read_state(newest)["attempt"] == 2 or stopped
        last = checkpoint.save(root, 3, some_tensors(), {}, keep=1)
        assert list(root.iterdir()) == [last]
    assert not stopped  # every call has had its turn


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """What is found is one of the states that were saved, to the last bit.

    At least twelve kills, and more where a busy machine leaves the saver little time.
    """
    saver = subprocess.Popen(
        [sys.executable, "-m", "tests.checkpoint_saver", str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert saver.stdin is not None
    assert saver.stdout is not None
    chance, kills, leftovers, last_step = random.Random(0), 0, 0, 0
    while kills < 12 or (not (leftovers and last_step) and kills < 100):
        kills += 1
        saver.stdin.write("\n")
        saver.stdin.flush()
        victim = int(saver.stdout.readline())
        time.sleep(chance.uniform(0.01, 0.4))
        os.kill(victim, signal.SIGKILL)
        wait_until_gone(victim)
        leftovers += any(path.name.startswith(".") for path in tmp_path.iterdir())
        last_step = check_all(tmp_path, last_step)
    saver.stdin.close()
    assert saver.wait(120) == 0
    assert last_step > 0
    assert leftovers > 0


def wait_until_gone(process: int) -> None:
    while Path(f"/proc/{process}").exists():
        time.sleep(0.002)


def check_all(root: Path, last_step: int) -> int:
    found = checkpoint.all_checkpoints(root)
    assert len(found) >= min(last_step, checkpoint_saver.KEEP)
    for path in found:
        step = checkpoint.read_state(path)["step"]
        loaded = zeros_like(checkpoint_saver.tensors_at(0))
        checkpoint.load(path, loaded, exact=True)
        assert_same_bits(loaded, checkpoint_saver.tensors_at(step))
    if not found:
        return 0
    newest = checkpoint.read_state(found[-1])["step"]
    assert newest >= last_step
    return newest


# --- several ranks


def global_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.rand(*shape, generator=generator)  # noqa: E731
    return {"rows": rand(37, 6), "columns": rand(10, 8), "same": rand(5), "few": rand(1, 3)}


def two_ranks(rank: int, root: Path) -> None:
    """Save with one sharding and load with another, on both ranks."""
    checkpoint_storage.CHUNK_BYTES = 256
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))

    def sharded(placements: dict[str, Shard | Replicate], fill: float | None) -> dict[str, Tensor]:
        return {
            name: distribute_tensor(
                tensor if fill is None else torch.full_like(tensor, fill), mesh, [placements[name]]
            )
            for name, tensor in global_tensors().items()
        }

    by_rows = {"rows": Shard(0), "columns": Shard(1), "same": Replicate(), "few": Shard(0)}
    other_way = {"rows": Shard(1), "columns": Replicate(), "same": Shard(0), "few": Shard(1)}
    own = {f"table-{rank}": torch.full((9, 4), float(rank)), "step": torch.tensor(3)}
    path = checkpoint.save(root / "two", 3, sharded(by_rows, None) | own, {"samples": 8}, keep=1)

    for placements in (by_rows, other_way):
        into = sharded(placements, 0.0)
        mine = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
        assert checkpoint.load(path, into | mine, exact=True) == {"samples": 8}
        assert_same_bits(mine, own)
        assert_same_bits({n: t.full_tensor() for n, t in into.items()}, global_tensors())

    into = sharded(other_way, 0.0)
    checkpoint.load(root / "one" / "step-00000001", into, exact=True)
    assert_same_bits({n: t.full_tensor() for n, t in into.items()}, global_tensors())

    # An error of one rank reaches both, and nobody is left waiting.
    with pytest.raises(InputError, match="not in the checkpoint: unknown"):
        checkpoint.load(path, into | ({"unknown": torch.zeros(1)} if rank == 1 else {}))
    dist.destroy_process_group()


def test_two_ranks_save_and_load_any_sharding(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "one", 1, global_tensors(), {}, keep=1)
    rank_processes.run(two_ranks, tmp_path, world=2)
    path = checkpoint.latest(tmp_path / "two")
    assert path is not None
    assert sorted(f.name for f in path.iterdir()) == [
        "manifest.json",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]
    expected = global_tensors() | {
        "table-0": torch.zeros(9, 4),
        "table-1": torch.ones(9, 4),
        "step": torch.tensor(3),
    }
    loaded = zeros_like(expected)
    assert checkpoint.load(path, loaded, exact=True) == {"samples": 8}
    assert_same_bits(loaded, expected)
    with safe_open(path / "rank-00001.safetensors", "pt") as file:
        assert "rows[19:37,0:6]" in file.keys()  # noqa: SIM118  (not a dictionary)
