"""How the tables of a model are stored, and how their updates are rounded."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainmark.training.seeding import stream_seed

LARGEST_INT32 = 2**31 - 1


@dataclass(frozen=True)
class Rounding:
    """The random bits that a store rounds with: in each update others, and other than a model's
    other stores."""

    key: int
    stores: int
    """Of the model."""

    def bits_of(self, updates: Tensor) -> Tensor:
        return updates * self.stores + self.key


@dataclass(frozen=True, kw_only=True)
class Formats:
    """How the tables of a model are stored."""

    of_tables: Sequence[str]
    """Of each; see `table_formats`."""
    state_dtype: torch.dtype = torch.float32
    """Of the optimiser's state of tables that are not fp32."""
    seed: int | None = None
    """Of stochastic rounding; None: to nearest."""

    @property
    def rounds(self) -> bool:
        return any(kind != "fp32" for kind in self.of_tables)

    def rounding(self, store: int, stores: int) -> Rounding | None:
        """Of one of a model's stores."""
        if self.seed is None:
            return None
        return Rounding(stream_seed(self.seed, "rounding") % LARGEST_INT32 + store, stores)
