"""The names of a run's tensors in its checkpoints: `model.NAME` for weights, `trainer.NAME` for the
optimiser's state and the like."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainmark.checkpoint.data_files import read_arrays
from trainmark.checkpoint.folders import explained
from trainmark.checkpoint.manifest import TensorEntry, read_manifest
from trainmark.contract import Trainer

if TYPE_CHECKING:  # arrays are read without torch
    from numpy.typing import NDArray
    from torch import Tensor

_MODEL, _TRAINER = "model.", "trainer."


def stored_weights(trainer: Trainer[Any, Any]) -> dict[str, Tensor]:
    """The weights by their names in a checkpoint."""
    return {f"{_MODEL}{name}": tensor for name, tensor in trainer.weights().items()}


def stored_tensors(trainer: Trainer[Any, Any]) -> dict[str, Tensor]:
    """Weights and other state by their names in a checkpoint."""
    state = {f"{_TRAINER}{name}": tensor for name, tensor in trainer.state_dict().items()}
    return stored_weights(trainer) | state


def is_of_trainer(stored_name: str) -> bool:
    """Whether it names the trainer's state, not a weight."""
    return stored_name.startswith(_TRAINER)


def own_name(stored_name: str) -> str:
    """The name without its prefix, as the model or the trainer has it."""
    return stored_name.partition(".")[2]


def weight_entries(path: Path) -> dict[str, TensorEntry]:
    """The manifest's entry of every weight in a checkpoint, by its own name."""
    with explained(path):
        stored = read_manifest(path).tensors.items()
    return {own_name(name): entry for name, entry in stored if name.startswith(_MODEL)}


def read_weight_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """All weights of a checkpoint by their own names, without torch."""
    with explained(path):
        read = read_arrays(path, [f"{_MODEL}{name}" for name in weight_entries(path)])
    return {own_name(name): array for name, array in read.items()}


def weight_shapes(path: Path) -> dict[str, Tensor]:
    """Every weight in a checkpoint by its own name, on the meta device."""
    from trainmark.checkpoint import checkpoints

    stored = checkpoints.shapes(path).items()
    return {own_name(name): tensor for name, tensor in stored if name.startswith(_MODEL)}


def read_weights(path: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Whole weights of a checkpoint by their own names, in host memory; by default all of them."""
    from trainmark.checkpoint import checkpoints

    wanted = weight_entries(path) if names is None else names
    read = checkpoints.read(path, [f"{_MODEL}{name}" for name in wanted])
    return {own_name(name): tensor for name, tensor in read.items()}
