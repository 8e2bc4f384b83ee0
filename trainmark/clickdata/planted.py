"""A click log with a planted signal: the best possible AUC of every row range is known.

Every row has a true click probability, from a hidden model:

    logit = bias + interactions + per-value terms + a few numerical terms

The interactions are dot products of hidden vectors, one vector per value of a few categorical
columns, summed over all pairs of these columns. The vectors are centred, so that no column says
anything about the interactions alone: a linear model cannot see them, one that multiplies
features (such as DLRM) can. The columns that carry the signal have modest vocabularies, so that
a million rows suffice to learn it; the large ones are there for their size and say little.

Rows come in blocks with a random stream each, so that any range of rows can be made
independently, in any order and process, and is always the same. Used by `prepare synthetic` and by
the in-memory dataset of training; numpy only.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trainmark.clickdata.best_auc import NO_ROWS, BinCounts
from trainmark.clickdata.counters import mixed
from trainmark.clickdata.numerical import MISSING, log_transform

CARDINALITIES = (
    *(20000, 2000, 1000, 500, 2000, 4, 500, 200, 60, 20000, 5000, 3000, 11),
    *(200, 1000, 100, 4, 100, 15, 20000, 10000, 20000, 3000, 1000, 97, 35),
)
"""Ids per categorical column by default: the proportions of Criteo's columns, on a small scale."""
NUM_NUMERICAL = 13
MANIFEST = "synthetic.json"
"""Beside a generated log: its settings and its best possible AUC."""

BLOCK_ROWS = 1 << 16
"""Rows that share a random stream. Part of the format: another value gives other data."""

CLICK_RATE = 0.2
LOGIT_STD = 1.3
"""Spread of the true logits. It fixes the best possible AUC, at about 0.80."""
SHARES = {"interactions": 0.5, "values": 0.3, "numerical": 0.2}
"""What part of the logit's variance each term makes."""
SIGNAL_COLUMNS = 6
"""Categorical columns that interact, chosen near `SIGNAL_CARDINALITY`."""
SIGNAL_CARDINALITY = 60
SIGNAL_NUMERICAL = 4
RANK = 3
"""Length of the hidden vectors."""
MAX_COUNT = 999_999
"""Largest integer in the log."""
WEAK_TERM = 0.1
"""Size of the per-value terms of the other columns, relative to the signal columns."""
MAX_HIDDEN_VALUES = 4096
"""Values of a column beyond this share the hidden parameters of earlier ones."""
FLOAT32_VALUES = 1 << 15
"""Up to so many values of a column, even the rarest is 46 of float32's 2^24 numbers."""

CHANCES = 1 << 16
"""Probabilities that `Rows.counts` tells apart."""

_MODEL_STREAM, _CALIBRATION_STREAM, _ROW_STREAM = range(3)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A range of rows.

    Categorical ids are 0 for a missing value and otherwise 1, 2, ... by falling frequency, as
    preparation numbers them.
    """

    labels: NDArray[np.bool_]
    """[rows]"""
    numerical: NDArray[np.int32]
    """[rows, columns], integers from -2 on, `numerical.MISSING` where there is none."""
    categorical: NDArray[np.int32]
    """[columns, rows]: a column lies in one piece, as the files and the tables want it."""
    probability: NDArray[np.float32]
    """[rows], the true probability of a click."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def counts(self) -> BinCounts:
        """By probabilities rounded to 1 / 65536, which changes an AUC by less than 1e-4."""
        bins = np.minimum((self.probability * CHANCES).astype(np.int64), CHANCES - 1)
        return BinCounts.of(self.labels, bins, CHANCES)


class PlantedClicks:
    """The log, as a function of the row number.

    Args:
        seed: another seed is another hidden model and other rows.
        cardinalities: ids of each categorical column, the missing one included.
        num_numerical: number of integer columns.
        ids: `power_law`, as in real logs, or `uniform`.
        signal: without one, every row has the same click probability.
        click_rate: share of the rows that are clicks.

    Example:
        >>> log = PlantedClicks(seed=1)
        >>> rows = log.rows(1_000_000, 1_002_048)
        >>> rows.categorical.shape
        (26, 2048)
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        cardinalities: tuple[int, ...] = CARDINALITIES,
        num_numerical: int = NUM_NUMERICAL,
        ids: Literal["power_law", "uniform"] = "power_law",
        signal: bool = True,
        click_rate: float = CLICK_RATE,
    ) -> None:
        self.seed = seed
        self.cardinalities = cardinalities
        self.num_numerical = num_numerical
        rng = self._stream(_MODEL_STREAM)
        kind = {"power_law": _Column, "uniform": _UniformColumn}[ids]
        self._columns = [kind(rng, cardinality) for cardinality in cardinalities]
        self._signal_columns = _most_suitable(cardinalities)
        self._vectors = {c: self._columns[c].vectors(rng) for c in self._signal_columns}
        self._terms = [
            column.terms(rng, 1.0 if c in self._vectors else WEAK_TERM)
            for c, column in enumerate(self._columns)
        ]
        self._integers = _Integers(rng, num_numerical)
        self._scales = dict.fromkeys(SHARES, np.float32(signal))
        self._bias = np.float32(0)
        self._calibrate(click_rate)
        self._latest: tuple[int, Rows] | None = None

    def rows(self, start: int, stop: int) -> Rows:
        """Rows `start` to `stop`, the latter not included."""
        blocks = range(start // BLOCK_ROWS, -(-stop // BLOCK_ROWS))
        parts = [
            _slice(self._block(b), max(start - b * BLOCK_ROWS, 0), stop - b * BLOCK_ROWS)
            for b in blocks
        ]
        return parts[0] if len(parts) == 1 else _concatenate(parts)

    def blocks(self, start: int, stop: int) -> Iterator[Rows]:
        """The same rows piece by piece, in bounded memory."""
        while start < stop:
            end = min(stop, (start // BLOCK_ROWS + 1) * BLOCK_ROWS)
            yield self.rows(start, end)
            start = end

    def best_auc(self, start: int, stop: int) -> float:
        """The AUC of the true probabilities on rows `start` to `stop`: no model can do better."""
        return sum((rows.counts for rows in self.blocks(start, stop)), NO_ROWS).auc

    def values(self, column: int, ids: NDArray[np.int32]) -> NDArray[np.uint32]:
        """The 32-bit numbers that stand for `ids` in a raw log (meaningless for missing ones)."""
        return mixed_values(column, ids, self.seed)

    # --- one block

    def _block(self, number: int) -> Rows:
        # Ranges that meet within a block, such as two days of a log, ask for it twice in a row.
        if self._latest is None or self._latest[0] != number:
            self._latest = (number, self._make_block(number))
        return self._latest[1]

    def _make_block(self, number: int) -> Rows:
        rng = self._stream(_ROW_STREAM, number)
        categorical, numerical = self._features(rng)
        probability = _sigmoid(self._logits(self._logit_terms(categorical, numerical)))
        labels = rng.random(BLOCK_ROWS, np.float32) < probability
        return Rows(
            labels=labels, numerical=numerical, categorical=categorical, probability=probability
        )

    def _features(self, rng: np.random.Generator) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        categorical = np.empty((len(self._columns), BLOCK_ROWS), np.int32)
        for ids, column in zip(categorical, self._columns, strict=True):
            column.draw(rng, out=ids)
        return categorical, self._integers.draw(rng)

    def _logit_terms(
        self, categorical: NDArray[np.int32], numerical: NDArray[np.int32]
    ) -> tuple[NDArray[np.float32], ...]:
        """Interactions, per-value terms and numerical terms, in the order of `SHARES`."""
        total = np.zeros((BLOCK_ROWS, RANK), np.float32)
        squares = np.zeros_like(total)
        for column, vectors in self._vectors.items():
            vector = vectors.take(categorical[column], axis=0, mode="wrap")
            total += vector
            squares += vector * vector
        # The sum over all pairs of columns of their dot products.
        interactions = (total * total - squares).sum(axis=1) / 2
        values = np.zeros(BLOCK_ROWS, np.float32)
        for ids, terms in zip(categorical, self._terms, strict=True):
            values += terms.take(ids, mode="wrap")
        return interactions, values, self._integers.logit_term(numerical)

    def _logits(self, terms: tuple[NDArray[np.float32], ...]) -> NDArray[np.float32]:
        logits = np.full_like(terms[0], self._bias)
        for scale, term in zip(self._scales.values(), terms, strict=True):
            logits += scale * term
        return logits

    # --- the hidden model's scale

    def _calibrate(self, click_rate: float) -> None:
        """Give each term its share of the logit's variance, then find the bias.

        On a sample of rows of its own, so that seeds and shapes differ little in how hard they are.
        """
        terms = self._logit_terms(*self._features(self._stream(_CALIBRATION_STREAM)))
        spreads = {name: float(term.std()) for name, term in zip(SHARES, terms, strict=True)}
        total = sum(share for name, share in SHARES.items() if spreads[name] > 0)
        for name, spread in spreads.items():
            if spread > 0:
                self._scales[name] *= np.float32(LOGIT_STD * np.sqrt(SHARES[name] / total) / spread)
        self._bias = _bias_for(self._logits(terms), click_rate)

    def _stream(self, *key: int) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64([self.seed, *key]))


class _Column:
    """A categorical column: the value of popularity rank k has a probability near 1 / k."""

    def __init__(self, rng: np.random.Generator, cardinality: int) -> None:
        self.missing = float(rng.choice([0, 0, 0.02, 0.05]))
        self.cardinality = cardinality
        self.hidden = min(cardinality, MAX_HIDDEN_VALUES)
        self.weights = np.zeros(self.hidden)
        if cardinality > 1:
            self.weights[1:] = (1 - self.missing) * self.shares(np.arange(1, self.hidden))

    def shares(self, ranks: NDArray[np.int64]) -> NDArray[np.float64]:
        """How often the values of these ranks occur among those present."""
        return np.asarray(np.log1p(1 / ranks) / np.log(self.cardinality))

    def draw(self, rng: np.random.Generator, out: NDArray[np.int32]) -> None:
        """Ids by inverting the cumulative distribution: rank = floor(C ** u)."""
        # With a float32's 24 bits, most values of a large column could not be drawn.
        kind = np.float32 if self.cardinality <= FLOAT32_VALUES else np.float64
        u = rng.random(len(out), kind)
        present = u >= self.missing
        u -= kind(self.missing)
        u *= kind(np.log(self.cardinality) / (1 - self.missing))
        np.exp(u, out=u)
        # Rounding can reach C itself; the last id is C - 1.
        np.minimum(u, kind(self.cardinality - 1), out=u)
        np.multiply(u, present, out=out, casting="unsafe")

    def vectors(self, rng: np.random.Generator) -> NDArray[np.float32]:
        """Hidden vectors with mean 0 and equal weight under the column's distribution."""
        vectors = rng.standard_normal((self.hidden, RANK))
        vectors[0] = 0  # a missing value interacts with nothing
        present = self.weights.sum()
        vectors[1:] -= self.weights @ vectors / present
        return (vectors / np.sqrt(self.weights @ vectors**2)).astype(np.float32)

    def terms(self, rng: np.random.Generator, size: float) -> NDArray[np.float32]:
        return (size * rng.standard_normal(self.hidden)).astype(np.float32)


class _UniformColumn(_Column):
    """A categorical column whose values are equally frequent."""

    def shares(self, ranks: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.full(len(ranks), 1 / (self.cardinality - 1))

    def draw(self, rng: np.random.Generator, out: NDArray[np.int32]) -> None:
        out[:] = rng.integers(1, max(self.cardinality, 2), len(out), np.int32)
        out[rng.random(len(out), np.float32) < self.missing] = 0


class _Integers:
    """The integer columns: counts with a long tail, from -2 on, some of them missing."""

    def __init__(self, rng: np.random.Generator, columns: int) -> None:
        self.log_mean = rng.uniform(1, 4, columns).astype(np.float32)
        self.log_std = rng.uniform(0.5, 1.5, columns).astype(np.float32)
        self.missing_in_256 = rng.choice([0, 5, 25, 75], columns).astype(np.uint8)
        self.slope = np.zeros(columns, np.float32)
        self.slope[:SIGNAL_NUMERICAL] = rng.choice([-1, 1], min(SIGNAL_NUMERICAL, columns))

    def draw(self, rng: np.random.Generator) -> NDArray[np.int32]:
        shape = (BLOCK_ROWS, len(self.slope))
        logs = rng.standard_normal(shape, np.float32) * self.log_std + self.log_mean
        counts: NDArray[np.int32] = np.minimum(np.exp(logs), MAX_COUNT).astype(np.int32) - 2
        counts[rng.integers(0, 256, shape, np.uint8) < self.missing_in_256] = MISSING
        return counts

    def logit_term(self, counts: NDArray[np.int32]) -> NDArray[np.float32]:
        used = min(SIGNAL_NUMERICAL, counts.shape[1])
        return log_transform(counts[:, :used]).astype(np.float32) @ self.slope[:used]


def mixed_values(column: int, ids: NDArray[np.int32], seed: int) -> NDArray[np.uint32]:
    """Numbers that stand for ids of a column, distinct as these are."""
    return mixed(ids.astype(np.uint32) + np.uint32((column * 0x9E3779B9 + seed) & 0xFFFFFFFF))


def known_auc(manifest: Mapping[str, Any]) -> dict[str, float]:
    """The best possible AUC as metadata of a dataset; nothing where it is not known."""
    best = manifest.get("best_auc")
    return {} if best is None else {"best_auc": best}


def _most_suitable(cardinalities: tuple[int, ...]) -> list[int]:
    """The columns to carry the interactions: those with a cardinality near the wanted one."""
    distance = np.abs(np.log(np.asarray(cardinalities, float) / SIGNAL_CARDINALITY))
    able = [int(c) for c in np.argsort(distance, kind="stable") if cardinalities[c] > 2]
    return sorted(able[:SIGNAL_COLUMNS])


def _sigmoid(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.float32(1) / (np.float32(1) + np.exp(-logits))


def _bias_for(logits: NDArray[np.float32], click_rate: float) -> np.float32:
    """The bias that gives the wanted click rate, by bisection."""
    low, high = -20.0, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        rate = float(_sigmoid(logits + np.float32(middle)).mean())
        low, high = (low, middle) if rate > click_rate else (middle, high)
    return np.float32(middle)


def _slice(rows: Rows, start: int, stop: int) -> Rows:
    if start == 0 and stop >= len(rows):
        return rows
    return Rows(
        labels=rows.labels[start:stop],
        numerical=rows.numerical[start:stop],
        categorical=rows.categorical[:, start:stop],
        probability=rows.probability[start:stop],
    )


def _concatenate(parts: list[Rows]) -> Rows:
    return Rows(
        labels=np.concatenate([p.labels for p in parts]),
        numerical=np.concatenate([p.numerical for p in parts]),
        categorical=np.concatenate([p.categorical for p in parts], axis=1),
        probability=np.concatenate([p.probability for p in parts]),
    )
