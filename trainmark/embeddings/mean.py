"""The mean of a bag's rows, around any engine, which gives their sum."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainmark.embeddings.engine import EmbeddingEngine
from trainmark.embeddings.tables.batch import IdGroup
from trainmark.training.transfer import used_here


class MeanEngine(nn.Module):
    """An engine whose rows are divided by how many ids a sample has of the feature.

    What it does not say itself, the engine within does.
    """

    def __init__(self, engine: EmbeddingEngine, features: int) -> None:
        super().__init__()
        self.engine, self._features = engine, features
        self._places: dict[tuple[int, ...], Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_modules", {}):
            return super().__getattr__(name)
        return getattr(self.engine, name)

    def prepare(self, groups: Sequence[IdGroup], samples: Sequence[int]) -> Any:
        """What the engine made of the ids; and of each bag, 1 / the ids in it, or 0."""
        shares_FB = torch.ones(self._features, groups[0].ids.shape[1], device=groups[0].ids.device)
        for group in groups:
            counts = (group.ids >= 0).view(*group.ids.shape[:2], -1).sum(2)
            shares_FB.index_copy_(0, self._places_of(group), 1 / counts.clamp(min=1))
        return self.engine.prepare(groups, samples), shares_FB.t()

    def _places_of(self, group: IdGroup) -> Tensor:
        """Its features, copied to the device only once: a CUDA graph may hold no such copy."""
        key = tuple(group.features)
        if key not in self._places:
            self._places[key] = torch.tensor(group.features, device=group.ids.device)
        return self._places[key]

    def begin(self, prepared: Any) -> None:
        self.engine.begin(prepared[0])

    def lookup(self, prepared: Any) -> Tensor:
        lookup, shares_BF = prepared
        used_here([shares_BF])
        rows_BFD = self.engine.lookup(lookup)
        return rows_BFD * shares_BF[:, :, None].to(rows_BFD.dtype)

    def rows_in_use(self, prepared: Any) -> list[Tensor]:
        return self.engine.rows_in_use(prepared[0])

    lookup_and_interact = EmbeddingEngine.lookup_and_interact
    lookup_beside = EmbeddingEngine.lookup_beside
