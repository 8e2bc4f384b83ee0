"""Sentences in a made-up language, with a sentiment that follows a rule. No torch here.

Every word of the vocabulary is good, bad or neutral; the word NOT turns the next word round. A
sentence is positive if its good words outnumber its bad ones; draws are never uttered.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainmark.corpus.sentences import Sentences

PAD, CLS, SEP, NOT, FIRST_WORD = range(5)
HELD_OUT = 2048
_NOT_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class Opinions:
    """The language of a seed and a vocabulary size."""

    seed: int
    vocabulary: int

    def polarity(self) -> NDArray[np.int8]:
        """+1, -1 or 0 for every token id."""
        random = np.random.default_rng((self.seed, 0))
        polarity = random.choice(np.array([1, -1, 0, 0], np.int8), self.vocabulary)
        polarity[:FIRST_WORD] = 0
        return polarity

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
        tokens[random.random(len(tokens)) < _NOT_SHARE] = NOT
        tokens[offsets[:-1]], tokens[offsets[1:] - 1] = CLS, SEP
        turned = np.concatenate([[False], tokens[:-1] == NOT])
        opinions = self.polarity()[tokens] * np.where(turned, -1, 1)
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
