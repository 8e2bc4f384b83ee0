"""A made-up language whose best possible loss is known: every token has four successors.

Which four is a function of (seed, token), their chances are fixed, and so is the entropy of the
next token: a model that has learned the language has that loss, and no model has less.
"""

import math

import numpy as np
from numpy.typing import NDArray

CHANCES = (0.55, 0.25, 0.15, 0.05)
ENTROPY = -sum(p * math.log(p) for p in CHANCES)
TARGET = 1.05
"""Within 5 % of the entropy counts as learned."""


class Chain:
    """Samples of the language, each a function of (seed, sample): any of them can be made alone."""

    def __init__(self, seed: int, vocab: int) -> None:
        self._seed, self._vocab = seed, vocab
        random = np.random.default_rng((seed, 0))
        # A permutation per column, so that every token is equally frequent in the long run.
        self._successors = np.stack([random.permutation(vocab) for _ in CHANCES], axis=1)
        self._bounds = np.cumsum(CHANCES)[:-1]

    def sample(self, index: int, length: int) -> NDArray[np.int64]:
        """[length] token ids."""
        random = np.random.default_rng((self._seed, 1, index))
        choices = np.searchsorted(self._bounds, random.random(length), side="right")
        tokens = np.empty(length, np.int64)
        token = int(random.integers(self._vocab))
        for place, choice in enumerate(choices):
            tokens[place] = token
            token = self._successors[token, choice]
        return tokens
