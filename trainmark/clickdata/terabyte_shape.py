"""How the planted Terabyte's tables were made, once: the frequencies of its values, the counts of
its integer columns, the sizes of the hidden model's terms.

    python -m trainmark.clickdata.terabyte_shape

writes `terabyte.npz`, which `terabyte.py` reads. Another value of any constant gives another log.
"""

import itertools
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainmark.clickdata.numerical import MISSING, log_transform
from trainmark.clickdata.terabyte import (
    BUCKETS,
    INTERACTING,
    LEVELS,
    LEVELS_PER_LOGIT,
    NUM_NUMERICAL,
    RANK,
    ROWS,
    SEED,
    TABLES_FILE,
    THRESHOLD_3,
    THRESHOLD_15,
    VOCABULARY,
    ZERO,
    effect,
    hidden_value,
    widths,
)

HEAD_SLOPE = 0.6
"""Slope of a column's power law at its most frequent value; the tail is steeper."""
MISSING_SHARES = (0.0, 0.02, 0.0, 0.05)
"""Shares of missing values, which the categorical columns take in turn."""
QUARTILES = (
    (0, 1, 3), (0, 3, 35), (2, 6, 18), (2, 4, 10), (326, 2814, 10106), (8, 32, 102), (1, 3, 11),
    (2, 8, 19), (10, 38, 110), (0, 1, 1), (1, 1, 3), (0, 0, 1), (2, 4, 10),
)  # fmt: skip
MISSING_COUNTS = (45, 0, 21, 22, 3, 22, 4, 0, 4, 45, 4, 76, 22)
"""The integer columns: lower quartile, median and upper quartile; how many of 100 are missing."""
MAX_COUNT = 999_999

STRENGTH = 1.315
"""Standard deviation of the hidden model's logit, about: it fixes how well clicks can be told."""
SHARES = {"interactions": 0.15, "values": 0.7, "numerical": 0.15}
"""What part of the logit's variance each term makes."""


def made() -> dict[str, NDArray[Any]]:
    """The arrays of the file."""
    random = np.random.Generator(np.random.PCG64(SEED))
    streams = random.integers(0, 2**64, len(VOCABULARY) + 8, np.uint64)
    salts = random.integers(-(2**31), 2**31, len(VOCABULARY), np.int64).astype(np.int32)
    starts = np.stack([_starts(column) for column in range(len(VOCABULARY))])
    counts = np.stack([_counts(column) for column in range(NUM_NUMERICAL)])
    return {
        # Steps from one bucket to the next take an eighth of the room.
        "steps": np.diff(starts, axis=1, prepend=np.int32(0)),
        "counts": counts,
        "effects": _effects(counts),
        "streams": streams,
        "salts": salts,
        "amplitudes": _amplitudes(starts, salts),
        "thresholds": _thresholds(),
        "pair_weight": np.array(_pair_weight()),
    }


def frequencies(column: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Ranks, and how often the values from each rank to the next are expected in the whole log.

    A value's logarithm of frequency is a parabola of its logarithm of rank, down to the rank up to
    which Criteo's values occur 15 times; from there on power laws lead through 3 times to once.
    """
    t15, t3, last = (float(v[column] - 1) for v in (THRESHOLD_15, THRESHOLD_3, VOCABULARY))
    present = ROWS * (1 - MISSING_SHARES[column % len(MISSING_SHARES)])
    has_tail = last > t15 + 1
    lowest = 15.0 if has_tail else present / (100 * t15)
    singles = min(last, 4096)  # then 16 steps an octave
    beyond = np.geomspace(singles + 1, last + 1, int(16 * np.log2(last / singles)) + 2)[1:]
    ranks = np.unique(np.floor(np.append(np.arange(1, singles + 2), beyond)))
    width = np.diff(ranks)
    log_rank = np.log((ranks[:-1] + ranks[1:] - 1) / 2)
    log_15 = np.log(t15)
    tail = np.interp(log_rank, *_tail(t15, t3, last)) if has_tail else np.full_like(log_rank, -50)

    def expected(curvature: float) -> NDArray[np.float64]:
        body = HEAD_SLOPE * (log_15 - log_rank) + curvature * (log_15**2 - log_rank**2)
        logarithm = np.where(log_rank <= log_15, np.log(lowest) + body, tail)
        return np.asarray(width * np.exp(np.minimum(logarithm, 100)))

    low, high = -1.0, 30.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(middle).sum() < present else (low, middle)
    return ranks, expected(low)


def _tail(t15: float, t3: float, last: float) -> tuple[list[float], list[float]]:
    points = [(t15, 15.0), (t3, 3.0), (last, 1.0)]
    kept = [points[0]] + [b for a, b in itertools.pairwise(points) if b[0] > a[0]]
    return [float(np.log(rank)) for rank, _ in kept], [float(np.log(n)) for _, n in kept]


def _starts(column: int) -> NDArray[np.int32]:
    """The first id of each bucket."""
    ranks, expected = frequencies(column)
    missing = round(MISSING_SHARES[column % len(MISSING_SHARES)] * BUCKETS)
    below = np.append(0, np.cumsum(expected)) / np.sum(expected)
    below[-1] = 1
    present = BUCKETS - missing
    coarse = np.arange(present) / present
    fine = (present - 1 + np.arange(BUCKETS) / BUCKETS) / present
    first = np.floor(np.interp(np.append(coarse, fine), below, ranks))
    return np.append(np.zeros(missing), first).astype(np.int32)


def _counts(column: int) -> NDArray[np.int32]:
    """Counts that are log-normal by their quartiles, and then the missing ones."""
    low, middle, high = (q + 1.5 for q in QUARTILES[column])
    missing = round(MISSING_COUNTS[column] / 100 * BUCKETS)
    spread = np.log(high / low) / (2 * NormalDist().inv_cdf(0.75))
    present = BUCKETS - missing
    normal = np.array([NormalDist().inv_cdf((i + 0.5) / present) for i in range(present)])
    counts = np.floor(np.exp(np.log(middle) + spread * normal) - 1)
    absent = np.full(missing, MISSING)
    return np.append(np.minimum(counts, MAX_COUNT), absent).astype(np.int32)


def _effects(counts: NDArray[np.int32]) -> NDArray[np.int16]:
    """What a count adds to the level: lines and parabolas of its logarithm, column by column."""
    wide = log_transform(counts).astype(np.float64)
    mean = np.cumsum(wide, axis=1)[:, -1:] / BUCKETS
    spread = np.sqrt(np.cumsum((wide - mean) ** 2, axis=1)[:, -1:] / BUCKETS)
    score = np.clip((wide - mean) / spread, -3, 3)
    score[1::2] = (score[1::2] ** 2 - 1) / np.sqrt(2)
    score[::4] *= -1
    size = STRENGTH * np.sqrt(SHARES["numerical"] / NUM_NUMERICAL) * LEVELS_PER_LOGIT
    return np.asarray(np.rint(size * score).astype(np.int16))


def _amplitudes(starts: NDArray[np.int32], salts: NDArray[np.int32]) -> NDArray[np.int32]:
    """Every column's effects get their share of the variance, whatever its frequent values drew."""
    shares = np.array([1.0 if v < 100_000 else 6.0 for v in VOCABULARY])
    spread = STRENGTH * np.sqrt(SHARES["values"] * shares / np.cumsum(shares)[-1])
    amplitudes, middle = [], starts + widths(starts) // 2
    for column, salt in enumerate(salts):
        sample = middle[column, :BUCKETS]
        own = effect(hidden_value(sample, salt)).astype(np.float64)
        deviation = np.sqrt(np.cumsum((own - np.cumsum(own)[-1] / BUCKETS) ** 2)[-1] / BUCKETS)
        amplitudes.append(256 * spread[column] * LEVELS_PER_LOGIT / max(deviation, 40))
    return np.rint(amplitudes).astype(np.int32)


def _pair_weight() -> int:
    """A sum of M signs, squared, has a variance of 2 M (M - 1)."""
    count = len(INTERACTING)
    spread = np.sqrt(RANK * 2 * count * (count - 1))
    size = STRENGTH * np.sqrt(SHARES["interactions"]) * LEVELS_PER_LOGIT
    return int(np.rint(64 * size / spread))


def _thresholds() -> NDArray[np.uint32]:
    logits = (np.arange(LEVELS) - ZERO) / LEVELS_PER_LOGIT
    return np.rint(2.0**32 / (1 + np.exp(-logits))).astype(np.uint32)


if __name__ == "__main__":
    arrays: Any = made()
    np.savez_compressed(Path(__file__).with_name(TABLES_FILE), **arrays)
