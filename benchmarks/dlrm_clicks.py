"""Clicks for the DLRM benchmarks, drawn on the device: ids alone, or ids with a planted signal.

Power-law ids: row k of a table with C rows (k from 0) is drawn with the probability of the interval
from k + 1 to k + 2 under the density x^-s between 1 and C + 1. So rows are numbered by falling
frequency, as preparation does it; s = 0 is uniform.

A draw is a function of (seed, purpose, number), so that any part of a stream can be made again.
PyTorch's generator is counter-based on a GPU, and gives other numbers there than on a CPU.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainmark.training.seeding import generator

Ids = Literal["uniform", "power_law"]
EXPONENTS: dict[Ids, float] = {"uniform": 0.0, "power_law": 1.0}
"""s, for measurements of speed; with 1, a row's frequency is near 1 / (k ln C)."""
LARGEST_BIAS = 20.0


def draw_ids(
    table_rows: Sequence[int], samples: int, exponent: float, random: torch.Generator
) -> Tensor:
    """[F, samples] int32 rows of each feature's table."""
    # In float64: with the 24 bits of a float32, most rows of a large table could not be drawn.
    u_FB = torch.rand(
        len(table_rows), samples, dtype=torch.float64, device=random.device, generator=random
    )
    rows_F1 = torch.tensor(table_rows, dtype=torch.float64, device=random.device)[:, None]
    end_F1, power = torch.log1p(rows_F1), 1 - exponent
    if power:
        u_FB.mul_((power * end_F1).expm1()).log1p_().div_(power)
    else:
        u_FB.mul_(end_F1)
    return u_FB.expm1_().clamp_(max=rows_F1 - 1).to(torch.int32)  # rounding may reach the end


def chances(rows: int, exponent: float, device: torch.device) -> Tensor:
    """[rows] float64: how likely each row is to be drawn."""
    edges = torch.arange(1, rows + 2, dtype=torch.float64, device=device).log()
    power = 1 - exponent
    if power:
        edges = (power * edges).expm1()
    return torch.diff(edges / edges[-1])


@dataclass(frozen=True)
class Clicks:
    """Samples on the device, in the types that they are stored in."""

    numerical_BN: Tensor
    """float16"""
    ids_FB: Tensor
    """int32"""
    labels_B: Tensor
    """bool"""
    logits_B: Tensor
    """The true ones: no model ranks better."""

    def part(self, start: int, stop: int) -> "Clicks":
        return Clicks(
            self.numerical_BN[start:stop],
            self.ids_FB[:, start:stop].contiguous(),
            self.labels_B[start:stop],
            self.logits_B[start:stop],
        )


@dataclass(frozen=True, kw_only=True)
class Signal:
    """What a hidden model's logits are made of: shares of their variance."""

    table_rows: tuple[int, ...]
    """Rows of each categorical feature's table."""
    large_tables: int
    """The first ones: their rows carry `large_values`."""
    interacting: tuple[int, ...]
    """Features whose hidden vectors are multiplied, each with each."""
    numerical_features: int = 8
    exponent: float = 1.2
    """Of the power law of the ids."""
    large_values: float = 0.25
    other_values: float = 0.1
    interactions: float = 0.5
    numerical: float = 0.15
    rank: int = 3
    """Length of the hidden vectors."""
    logit_std: float = 1.4
    click_rate: float = 0.25


class PlantedStream:
    """A stream of clicks from a hidden model, by number of the block.

    A model must know the rows of the large tables one by one to rank well: each has a term of its
    own, and where its feature interacts, a vector.
    """

    def __init__(self, signal: Signal, device: torch.device, seed: int = 0) -> None:
        self.signal, self.device, self._seed = signal, device, seed
        self._starts_F1 = torch.tensor(
            [0, *torch.tensor(signal.table_rows).cumsum(0)[:-1].tolist()], device=device
        )[:, None]
        total_rows = sum(signal.table_rows)
        random = generator(device, seed, "hidden model")
        self._values = torch.randn(total_rows, device=device, generator=random)
        self._vectors = {
            feature: self._centred_vectors(signal.table_rows[feature], random)
            for feature in signal.interacting
        }
        self._slopes_N = torch.randn(signal.numerical_features, device=device, generator=random)
        self._scales: Sequence[float] = (1.0, 1.0, 1.0, 1.0)
        self._bias = 0.0
        self._calibrate()

    def block(self, split: str, number: int, samples: int) -> Clicks:
        """Block `number` of a split; another size is another block."""
        random = generator(self.device, self._seed, split, number)
        numerical_BN, ids_FB = self._features(samples, random)
        logits_B = self._logits(self._terms(numerical_BN, ids_FB))
        clicks_B = torch.rand(samples, device=self.device, generator=random) < logits_B.sigmoid()
        return Clicks(numerical_BN, ids_FB, clicks_B, logits_B)

    def _features(self, samples: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
        ids_FB = draw_ids(self.signal.table_rows, samples, self.signal.exponent, random)
        shape = (samples, self.signal.numerical_features)
        return torch.randn(shape, device=self.device, generator=random).half(), ids_FB

    def _centred_vectors(self, rows: int, random: torch.Generator) -> Tensor:
        """[rows, rank], mean 0 over the ids drawn: alone, a feature says nothing by them."""
        vectors = torch.randn(rows, self.signal.rank, device=self.device, generator=random)
        chance = chances(rows, self.signal.exponent, self.device).float()
        vectors -= chance @ vectors
        return vectors / (chance @ vectors.square()).sqrt()

    def _terms(self, numerical_BN: Tensor, ids_FB: Tensor) -> list[Tensor]:
        values_FB = self._values[ids_FB + self._starts_F1]
        large = self.signal.large_tables
        total_BR = squares_BR = values_FB.new_zeros(())
        for feature, vectors in self._vectors.items():
            vector_BR = vectors[ids_FB[feature]]
            total_BR = total_BR + vector_BR
            squares_BR = squares_BR + vector_BR.square()
        # The sum over all pairs of features of their dot products.
        interactions_B = (total_BR.square() - squares_BR).sum(1) / 2
        return [
            values_FB[:large].sum(0),
            values_FB[large:].sum(0),
            interactions_B,
            numerical_BN.float() @ self._slopes_N,
        ]

    def _logits(self, terms: Sequence[Tensor]) -> Tensor:
        scaled = [scale * term for scale, term in zip(self._scales, terms, strict=True)]
        return torch.stack(scaled).sum(0) + self._bias

    def _calibrate(self) -> None:
        """Give each term its share of the variance, then find the bias by bisection."""
        signal = self.signal
        random = generator(self.device, self._seed, "calibration")
        terms = self._terms(*self._features(1 << 18, random))
        shares = (
            signal.large_values, signal.other_values, signal.interactions, signal.numerical
        )  # fmt: skip
        self._scales = [
            signal.logit_std * math.sqrt(share / sum(shares)) / term.std().item()
            for share, term in zip(shares, terms, strict=True)
        ]
        logits = self._logits(terms)
        low, high = -LARGEST_BIAS, LARGEST_BIAS
        for _ in range(40):
            middle = (low + high) / 2
            rate = (logits + middle).sigmoid().mean().item()
            low, high = (low, middle) if rate > signal.click_rate else (middle, high)
        self._bias = middle
