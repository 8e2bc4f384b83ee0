"""Embedding engines on a CPU, trained for a few steps by tests that compare one with another."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

from trainmark.embeddings.engine import EmbeddingEngine
from trainmark.embeddings.tables.batch import IdGroup

SAMPLES = 40
Engine = TypeVar("Engine", bound=nn.Module)


def ready(engine: Engine) -> Engine:
    """With its tables filled, and the optimiser's state."""
    tables: EmbeddingEngine = engine.to_empty(device="cpu")  # type: ignore[assignment]
    tables.init_weights(3)
    tables.create_state()
    return engine


def train(
    engine: EmbeddingEngine,
    groups: Callable[[int], list[IdGroup]],
    steps: Iterable[int],
    *,
    dim: int,
    micro_batches: int = 1,
    way: str = "lookup_and_interact",
) -> list[Tensor]:
    """Steps towards a target; the outputs of each.

    Args:
        groups: the ids of `SAMPLES` samples in each step.
        way: which of the engine's lookups is trained through.
    """
    outputs = []
    for step in steps:
        batch = groups(step)
        for part in torch.arange(SAMPLES).chunk(micro_batches):
            piece = slice(int(part[0]), int(part[-1]) + 1)
            x = torch.linspace(-1, 1, len(part) * dim).view(-1, dim).requires_grad_()
            lookup = engine.prepare([group.part(piece) for group in batch], [len(part)])
            engine.begin(lookup)
            output = getattr(engine, way)(lookup, x)
            (output.sin().sum() / 10).backward()
            outputs.append(output.detach())
        assert all(gradient.isfinite().all() for gradient in engine.gradients())
        engine.apply_gradients(0.1, torch.ones(()))
    return outputs
