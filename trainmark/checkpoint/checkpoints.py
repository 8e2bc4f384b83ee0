"""Checkpoints: folders that appear whole or not at all, with every byte checked when read.

    checkpoints/
      step-00000100/
        manifest.json            names, shapes, dtypes, where the chunks lie, checksums, the state
        rank-00000.safetensors   what this rank wrote
      .writing-step-00000200/    a save under way, or killed: the next save removes it

    path = checkpoints.plan(root, step, {"weight": weight}, {"samples": 4096}, keep=2).write()
    state = checkpoints.load(folders.latest(root), {"weight": weight})

PyTorch's distributed-checkpoint (DCP) planners decide which rank writes and reads what; writer.py
and reader.py do it, and saver.py lets training go on meanwhile. Names and offsets are global: a
checkpoint does not say how many ranks wrote it or how they sharded the tensors, and any number of
ranks may load it.
"""

import dataclasses
import json
import shutil
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from trainmark.checkpoint.data_files import fill_arrays, read_all
from trainmark.checkpoint.folders import all_checkpoints, explained, folder_of
from trainmark.checkpoint.local_shards import LoadPlanner
from trainmark.checkpoint.manifest import read_manifest, replace_manifest
from trainmark.checkpoint.reader import Reader
from trainmark.checkpoint.room import make_room
from trainmark.checkpoint.storage import DTYPE_CODES, DTYPES
from trainmark.checkpoint.writer import Share, Written, complete, plan_share, write_share
from trainmark.distributed.mesh import agreed, is_distributed
from trainmark.errors import InputError
from trainmark.files import fsync_folder


def plan(
    root: Path,
    step: int,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    keep: int,
    best: int | None = None,
    group: Any = None,
) -> "Unwritten":
    """Agree with all ranks on what each of them writes; `write` makes it `root/step-<step>`.

    With torch.distributed initialised, every rank calls this with its own tensors. A DTensor and
    `LocalShards` are written shard by shard; a plain tensor that several ranks name is written
    once; `state` is rank 0's.

    Args:
        root: the folder of the checkpoints, which all ranks see.
        step: the number of optimiser steps done.
        tensors: by global name, on any device.
        state: whatever else is needed to continue, as plain JSON.
        keep: how many checkpoints stay, this one included; `write` removes older ones.
        best: the step of another one that stays.
        group: the ranks; by default, all there are.
    """
    if keep < 1:
        raise InputError(f"A run keeps at least 1 checkpoint; received keep = {keep}.")
    _refuse_what_cannot_be_saved(tensors, state)
    _wait_for_devices(tensors)
    return Unwritten(
        target=folder_of(root, step),
        step=step,
        state=json.loads(json.dumps(state)),  # as it is now
        keep=keep,
        best=folder_of(root, step if best is None else best),
        share=plan_share(tensors, group),
        group=group,
    )


@dataclass(frozen=True, kw_only=True)
class Unwritten:
    """A checkpoint before it is written: each rank has its share of it."""

    target: Path
    step: int
    state: dict[str, Any]
    keep: int
    best: Path
    share: Share
    group: Any

    def write(self) -> Path:
        """Write it. All ranks call this, and return when the checkpoint is on disk."""
        is_first = self.share.rank == 0
        folder = self.target.with_name(f".writing-{self.target.name}")
        try:
            agreed(lambda: self._make(folder) if is_first else None, self.group)
            written = agreed(lambda: write_share(folder, self.share), self.group)
            agreed(lambda: self._finish(folder, written) if is_first else None, self.group)
        except OSError as error:
            raise InputError(
                f"Cannot write checkpoint {self.target}: {error}. The ones before it are untouched."
            ) from error
        finally:
            if is_first:  # there is something left only after an exception
                shutil.rmtree(folder, ignore_errors=True)
        return self.target

    def _make(self, folder: Path) -> None:
        make_room(folder.parent, self.share.all_bytes)
        folder.mkdir()

    def _finish(self, folder: Path, written: Sequence[Written]) -> None:
        complete(folder, self.share, written, self.step, self.state)
        _publish(folder, self.target, self.keep, self.best)


def load(path: Path, tensors: dict[str, Tensor], *, exact: bool = False) -> dict[str, Any]:
    """Fill `tensors` in place from the checkpoint at `path` and return its state.

    Only the given names are read; with `exact`, a checkpoint that holds more is an error. Ranks,
    devices and shardings may differ from those that saved it. Every byte that is read is checked
    against its checksum; after an error the contents of `tensors` are undefined.
    """
    if on_meta := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise ValueError(f"Allocate before loading; still on the meta device: {on_meta}.")
    with explained(path):
        reader = Reader(path, read_manifest(path), tensors, exact)
        _load(tensors, reader)
    return reader.manifest.state


def read(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Whole tensors of a checkpoint, by name, in host memory."""
    stored = shapes(path)
    tensors = {name: torch.empty_like(stored[name], device="cpu") for name in names}
    with explained(path):
        fill_arrays(path, read_manifest(path), {name: _bits(t) for name, t in tensors.items()})
    return tensors


def _bits(tensor: Tensor) -> Any:
    """A tensor's memory as an array of integers: numpy lacks some types."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.element_size()]).numpy()


def shapes(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by its name, on the meta device."""
    with explained(path):
        entries = read_manifest(path).tensors
    return {
        name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")
        for name, entry in entries.items()
    }


def update_state(path: Path, changes: dict[str, Any]) -> None:
    """Replace some of the state that it was saved with; one process calls this."""
    manifest = read_manifest(path)
    replace_manifest(path, dataclasses.replace(manifest, state=manifest.state | changes))


def names(path: Path) -> list[str]:
    """The names of the tensors in a checkpoint."""
    with explained(path):
        return list(read_manifest(path).tensors)


def verify(path: Path) -> None:
    """Read a whole checkpoint; an `InputError` names the damage, if there is any."""
    with explained(path):
        read_all(path)


# --- around DCP


def _refuse_what_cannot_be_saved(tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_CODES or tensor.is_meta or tensor.layout != torch.strided:
            kind = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
            raise ValueError(f"Tensor {name!r} ({kind}) cannot be stored as safetensors.")
    if "__metadata__" in tensors:
        raise ValueError("A tensor cannot be called '__metadata__': safetensors reserves the name.")
    if json.loads(json.dumps(state, allow_nan=False)) != state:
        raise ValueError("The state must be plain JSON: lists, no tuples; keys that are strings.")


def _load(tensors: dict[str, Tensor], reader: Reader) -> None:
    """Run DCP's load; its errors are raised without DCP's wrapping."""
    _wait_for_devices(tensors)
    # Detached tensors share memory with the originals, and worker threads may write to them.
    detached: dict[str, Any] = {name: tensor.detach() for name, tensor in tensors.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(
                detached,
                storage_reader=reader,
                planner=LoadPlanner(),
                no_dist=not is_distributed(),
            )
        except dcp.CheckpointException as error:
            first, _ = next(iter(error.failures.values()))
            raise first from None
    _wait_for_devices(tensors)


def _wait_for_devices(tensors: dict[str, Tensor]) -> None:
    """Wait for all streams: worker threads copy tensors on other streams than the caller's."""
    for device in {tensor.device for tensor in tensors.values()}:
        if device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)


# --- folders: at every moment, the last complete checkpoint has its name and all its files


def _publish(finished: Path, target: Path, keep: int, best: Path) -> None:
    """Give a finished folder its name, then remove the oldest checkpoints."""
    replaced = target.with_suffix(".old")  # still found as a checkpoint, until the new one is
    if target.exists():
        _remove(replaced)
        target.rename(replaced)
    finished.rename(target)
    fsync_folder(target.parent)
    _remove(replaced)
    for path in all_checkpoints(target.parent)[:-keep]:
        if path not in (target, best):  # whatever its number: one was just written
            _remove(path)


def _remove(path: Path) -> None:
    """Hide a checkpoint before deleting it, so that half of one is never found."""
    if path.exists():
        hidden = path.with_name(f".removing-{path.name}")
        path.rename(hidden)
        shutil.rmtree(hidden)
