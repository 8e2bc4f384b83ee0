"""Checkpoints: every tensor returns bit for bit, on any number of ranks; what cannot is named."""

import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests import rank_processes
from tests.checkpoint_tensors import (
    STATE,
    assert_same_bits,
    bits,
    random_bits,
    save_checkpoint,
    some_tensors,
    zeros_like,
)
from trainmark.checkpoint import checkpoints, folders
from trainmark.checkpoint import writer as checkpoint_writer
from trainmark.checkpoint.storage import DTYPE_CODES
from trainmark.errors import InputError

SHAPES = [(), (0,), (1,), (7,), (0, 3), (5, 0, 2), (3, 5), (2, 3, 5, 7)]


# --- round trips


@pytest.mark.parametrize("dtype", DTYPE_CODES, ids=str)
def test_every_dtype_and_shape_returns_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {f"t{shape}": random_bits(dtype, shape) for shape in SHAPES}
    path = save_checkpoint(tmp_path, 7, tensors, STATE, keep=1)
    loaded = zeros_like(tensors)
    assert checkpoints.load(path, loaded, exact=True) == STATE
    assert_same_bits(loaded, tensors)


def test_the_safetensors_library_reads_the_files(tmp_path: Path, small_chunks: int) -> None:
    tensors = {
        f"{dtype}.{shape}": random_bits(dtype, shape) for dtype in DTYPE_CODES for shape in SHAPES
    }
    path = save_checkpoint(tmp_path, 1, tensors, {}, keep=1)
    assert_same_bits(load_file(path / "rank-00000.safetensors"), tensors)


def test_views_parameters_and_strides(tmp_path: Path, small_chunks: int) -> None:
    transposed, strided = torch.rand(40, 30).T, torch.rand(100, 8)[::3, 1:5]
    parameter = torch.nn.Parameter(torch.rand(9, 9))
    path = save_checkpoint(tmp_path, 1, {"t": transposed, "s": strided, "p": parameter}, {}, keep=1)
    into = {
        "t": torch.zeros(40, 30).T,
        "s": torch.zeros(100, 8)[::3, 1:5],
        "p": torch.nn.Parameter(torch.zeros(9, 9)),
    }
    checkpoints.load(path, into)
    assert_same_bits(into, {"t": transposed, "s": strided, "p": parameter})


def test_no_tensors_at_all(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, {}, STATE, keep=1)
    assert checkpoints.load(path, {}, exact=True) == STATE


def test_saving_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = save_checkpoint(tmp_path, 1, some_tensors(), {}, keep=1)
        checkpoints.load(path, some_tensors())
        with pytest.raises(InputError):
            checkpoints.load(path, {"unknown": torch.zeros(1)})
    assert capfd.readouterr() == ("", "")


@pytest.mark.gpu
def test_device_tensors(tmp_path: Path) -> None:
    tensors = {f"{dtype}": random_bits(dtype, (1000, 64)).cuda() for dtype in DTYPE_CODES}
    path = save_checkpoint(tmp_path, 1, tensors, {}, keep=1)
    on_device = zeros_like(tensors)
    on_host = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in tensors.items()}
    for into in (on_device, on_host):
        checkpoints.load(path, into)
        assert_same_bits(into, tensors)


# --- chunks


@pytest.mark.parametrize("shape", [(1000,), (100, 7), (3, 50, 9), (1, 1, 999), (2, 3, 5, 40)])
def test_chunks_are_bounded_and_in_row_major_order(
    tmp_path: Path, small_chunks: int, shape: tuple[int, ...]
) -> None:
    tensors = {"x": torch.rand(shape)}
    path = save_checkpoint(tmp_path, 1, tensors, {}, keep=1)
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
    checkpoints.load(path, loaded)
    assert_same_bits(loaded, tensors)


def test_a_chunk_of_a_real_table_is_small() -> None:
    pieces = list(checkpoint_writer._split((40_000_000, 128), checkpoint_writer.CHUNK_BYTES // 4))
    rows = [sizes[0] for _, sizes in pieces]
    assert sum(rows) == 40_000_000
    assert max(rows) * 128 * 4 <= 16 * 2**20


# --- what is asked for and what is there


def test_only_the_given_names_are_loaded(tmp_path: Path) -> None:
    tensors = some_tensors()
    path = save_checkpoint(tmp_path, 1, tensors, STATE, keep=1)
    assert checkpoints.names(path) == sorted(tensors)
    assert folders.read_state(path) == STATE
    into = {"table": torch.zeros(50, 4)}
    checkpoints.load(path, into)
    assert_same_bits(into, {"table": tensors["table"]})


def test_all_mismatches_are_named_at_once(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, some_tensors(), STATE, keep=1)
    asked = {
        "table": torch.zeros(4, 50),
        "weight": torch.zeros(3, 5),
        "rng": torch.zeros(100, dtype=torch.uint8),
        "bias": torch.zeros(3),
        "other": torch.zeros(3),
    }
    with pytest.raises(InputError) as caught:
        checkpoints.load(path, asked, exact=True)
    for part in [
        "not in the checkpoint: bias, other",
        "only in the checkpoint: count",
        "'table' is torch.float32 [50, 4] there and torch.float32 [4, 50] here",
        "'weight' is torch.bfloat16 [3, 5] there and torch.float32 [3, 5] here",
    ]:
        assert part in str(caught.value)


def test_meta_tensors_cannot_be_filled(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, some_tensors(), STATE, keep=1)
    with pytest.raises(ValueError, match=r"meta device: \['table'\]"):
        checkpoints.load(path, {"table": torch.zeros(50, 4, device="meta")})


def test_no_checkpoint_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no checkpoint at"):
        checkpoints.load(tmp_path / "step-00000001", {})


@pytest.mark.parametrize("state", [{"a": (1, 2)}, {1: 2}, {"a": float("nan")}])
def test_a_state_that_json_would_change_is_refused(tmp_path: Path, state: dict) -> None:
    with pytest.raises(ValueError, match="JSON"):
        save_checkpoint(tmp_path, 1, {}, state, keep=1)


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
        save_checkpoint(tmp_path, 1, {"odd": tensor}, {}, keep=1)


# --- several ranks


def global_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.rand(*shape, generator=generator)  # noqa: E731
    return {"rows": rand(37, 6), "columns": rand(10, 8), "same": rand(5), "few": rand(1, 3)}


def two_ranks(rank: int, root: Path) -> None:
    """Save with one sharding and load with another, on both ranks."""
    checkpoint_writer.CHUNK_BYTES = 256
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))

    def sharded(placements: dict[str, Shard | Replicate], fill: float | None) -> dict[str, DTensor]:
        return {
            name: distribute_tensor(
                tensor if fill is None else torch.full_like(tensor, fill), mesh, [placements[name]]
            )
            for name, tensor in global_tensors().items()
        }

    by_rows: dict[str, Shard | Replicate] = {
        "rows": Shard(0),
        "columns": Shard(1),
        "same": Replicate(),
        "few": Shard(0),
    }
    other_way: dict[str, Shard | Replicate] = {
        "rows": Shard(1),
        "columns": Replicate(),
        "same": Shard(0),
        "few": Shard(1),
    }
    own = {f"table-{rank}": torch.full((9, 4), float(rank)), "step": torch.tensor(3)}
    path = save_checkpoint(root / "two", 3, sharded(by_rows, None) | own, {"samples": 8}, keep=1)

    for placements in (by_rows, other_way):
        into = sharded(placements, 0.0)
        mine = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
        assert checkpoints.load(path, into | mine, exact=True) == {"samples": 8}
        assert_same_bits(mine, own)
        assert_same_bits({n: t.full_tensor() for n, t in into.items()}, global_tensors())

    into = sharded(other_way, 0.0)
    checkpoints.load(root / "one" / "step-00000001", {**into}, exact=True)
    assert_same_bits({n: t.full_tensor() for n, t in into.items()}, global_tensors())

    # An error of one rank reaches both, and nobody is left waiting.
    with pytest.raises(InputError, match="not in the checkpoint: unknown"):
        checkpoints.load(path, into | ({"unknown": torch.zeros(1)} if rank == 1 else {}))
    dist.destroy_process_group()


def test_two_ranks_save_and_load_any_sharding(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "one", 1, global_tensors(), {}, keep=1)
    rank_processes.run(two_ranks, tmp_path, world=2)
    path = folders.latest(tmp_path / "two")
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
    assert checkpoints.load(path, loaded, exact=True) == {"samples": 8}
    assert_same_bits(loaded, expected)
    with safe_open(path / "rank-00001.safetensors", "pt") as file:
        assert "rows[19:37,0:6]" in file.keys()  # noqa: SIM118  (not a dictionary)
