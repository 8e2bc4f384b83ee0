"""Sentences in a made-up language, with a sentiment that follows a rule. No torch here.

Every word of the vocabulary is good, bad or neutral. A sentence is positive if its good words
outnumber its bad ones; draws are never uttered.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainmark.corpus.sentences import Sentences

PAD, CLS, SEP, FIRST_WORD = range(4)
HELD_OUT = 2048


@dataclass(frozen=True, kw_only=True)
class Opinions:
    """The language of a seed and a vocabulary size."""

    seed: int
    vocabulary: int

    def polarity(self) -> NDArray[np.int8]:
        """+1, -1 or 0 for every token id."""
        random = np.random.default_rng((self.seed, 0))
        words = np.resize(np.array([1, -1, 0, 0], np.int8), self.vocabulary - FIRST_WORD)
        return np.concatenate([np.zeros(FIRST_WORD, np.int8), random.permutation(words)])

    def sentences(self, split: str, count: int, *, mean_tokens: int, longest: int) -> Sentences:
        """`count` sentences of [CLS] words [SEP], of `mean_tokens` / 2 to 3/2 of it."""
        random = np.random.default_rng((self.seed, 1 if split == "train" else 2))
        least, most = max(mean_tokens // 2, 3), min(mean_tokens * 3 // 2, longest)
        kept: list[Sentences] = []
        while sum(map(len, kept)) < count:
            drawn = self._draw(random, count, least, max(least, most))
            kept.append(_without_draws(drawn))
        return _first(_join(kept), count)

    def _draw(self, random: np.random.Generator, count: int, least: int, most: int) -> Sentences:
        """Random sentences; the label is the balance of opinions, not yet its sign."""
        lengths = random.integers(least, most + 1, count)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        tokens = random.integers(FIRST_WORD, self.vocabulary, offsets[-1])
        tokens[offsets[:-1]], tokens[offsets[1:] - 1] = CLS, SEP
        opinions = self.polarity()[tokens].astype(np.int64)
        return Sentences(tokens, offsets, np.add.reduceat(opinions, offsets[:-1]))


def _without_draws(drawn: Sentences) -> Sentences:
    decided = drawn.labels != 0
    tokens = drawn.tokens[np.repeat(decided, drawn.lengths)]
    offsets = np.concatenate([[0], np.cumsum(drawn.lengths[decided])])
    return Sentences(tokens, offsets, (drawn.labels[decided] > 0).astype(np.int64))


def _join(parts: list[Sentences]) -> Sentences:
    lengths = np.concatenate([part.lengths for part in parts])
    return Sentences(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([[0], np.cumsum(lengths)]),
        np.concatenate([part.labels for part in parts]),
    )


def _first(sentences: Sentences, count: int) -> Sentences:
    offsets = sentences.offsets[: count + 1]
    return Sentences(sentences.tokens[: offsets[-1]], offsets, sentences.labels[:count])
