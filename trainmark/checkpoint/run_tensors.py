"""The names of a run's tensors in its checkpoints: `model.NAME` for weights, `trainer.NAME` for the
optimiser's state and the like."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from trainmark.checkpoint import checkpoints
from trainmark.contract import Trainer

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


def weight_shapes(path: Path) -> dict[str, Tensor]:
    """Every weight in a checkpoint by its own name, on the meta device."""
    stored = checkpoints.shapes(path).items()
    return {own_name(name): tensor for name, tensor in stored if name.startswith(_MODEL)}


def read_weights(path: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Whole weights of a checkpoint by their own names, in host memory; by default all of them."""
    wanted = weight_shapes(path) if names is None else names
    read = checkpoints.read(path, [f"{_MODEL}{name}" for name in wanted])
    return {own_name(name): tensor for name, tensor in read.items()}
