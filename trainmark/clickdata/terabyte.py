"""The planted Terabyte: a click log of the size and shape of Criteo's, as a function of the row.

4.4 billion rows of 13 integers, 26 categorical values and a label. Nothing is stored: a row is
made from its number by counter-based random numbers and integer arithmetic alone, so that a CPU
(here, in numpy) and a GPU (`kernels/terabyte_rows.py`) make the same bits, in any order.

    ids        a random number chooses a bucket of a table, and a place in the bucket: the buckets
               are equally likely and follow the column's power law, id 1 being the most frequent
    integers   a random number chooses one of 4,096 equally likely counts
    level      the hidden model: a sum of small integers, some for every value, some for pairs
    label      a click, if a random number lies below the level's threshold

The vocabularies of frequency threshold 0, 3 and 15, and those cut at a number of rows, are views:
ids are sorted by falling frequency, and one that a table has no row for becomes 0, the rare id.
docs/terabyte.md says what is like Criteo's log, and what is not.
"""

import functools
import itertools
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from trainmark.clickdata.counters import random_bits
from trainmark.clickdata.numerical import MISSING, log_transform

THRESHOLD_15 = (
    7912889, 33823, 17139, 7339, 20046, 4, 7105, 1382, 63, 5554114, 582469, 245828, 11,
    2209, 10667, 104, 4, 968, 15, 8165896, 2675940, 7156453, 302516, 12022, 97, 35,
)  # fmt: skip
THRESHOLD_3 = (
    45833188, 36746, 17245, 7413, 20243, 3, 7114, 1441, 62, 29275261, 1572176, 345138, 10,
    2209, 11267, 128, 4, 974, 14, 48937457, 11316796, 40094537, 452104, 12606, 104, 35,
)  # fmt: skip
THRESHOLD_0 = (
    227605432, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 130229467, 3067956, 405282, 10,
    2209, 11938, 155, 4, 976, 14, 292775614, 40790948, 187188510, 590152, 12973, 108, 36,
)  # fmt: skip
"""Ids of Criteo's columns by frequency threshold, as the published systems give them."""

VOCABULARY = tuple(map(max, THRESHOLD_0, THRESHOLD_3, THRESHOLD_15))
"""Ids of the log's columns, 0 for a missing value included."""
TRAIN_ROWS, TEST_ROWS, VALIDATION_ROWS = 4_195_197_692, 89_137_319, 89_137_318
ROWS = TRAIN_ROWS + TEST_ROWS + VALIDATION_ROWS
NUM_NUMERICAL = 13

# --- the shape of the log; another value of any of these gives another log

BUCKET_BITS = 12
BUCKETS = 1 << BUCKET_BITS
"""Equally likely buckets of a column. The last one is cut into as many again, for the tail."""
HEAD_SLOPE = 0.6
"""Of a column's power law, at its most frequent value; the tail is steeper."""
MISSING_SHARES = (0.0, 0.02, 0.0, 0.05)
"""Of the categorical columns, in turn."""
QUARTILES = (
    (0, 1, 3), (0, 3, 35), (2, 6, 18), (2, 4, 10), (326, 2814, 10106), (8, 32, 102), (1, 3, 11),
    (2, 8, 19), (10, 38, 110), (0, 1, 1), (1, 1, 3), (0, 0, 1), (2, 4, 10),
)  # fmt: skip
MISSING_COUNTS = (45, 0, 21, 22, 3, 22, 4, 0, 4, 45, 4, 76, 22)
"""The integer columns: lower quartile, median and upper quartile; how many of 100 are missing."""
MAX_COUNT = 999_999

LEVELS = 1 << 13
ZERO = 6144
"""The level of a logit of 0."""
LEVELS_PER_LOGIT = 512
STRENGTH = 1.315
"""Standard deviation of the hidden model's logit, about: it fixes how well clicks can be told."""
SHARES = {"interactions": 0.15, "values": 0.7, "numerical": 0.15}
"""What part of the logit's variance each term makes."""
INTERACTING = (2, 3, 4, 6, 7, 13, 17, 23)
"""Columns whose values interact in pairs: mid-sized ones."""
RANK = 4
"""Length of the hidden vectors, of signs, whose dot products the interactions are."""
CLICK_RATE = 0.033
BIAS = -2889
"""Of the level, for that click rate."""
SEED = 20140101

_TEST, _VALIDATION = TRAIN_ROWS, TRAIN_ROWS + TEST_ROWS
BEST_AUC = {(_TEST, _VALIDATION): 0.0, (_VALIDATION, ROWS): 0.0}
"""By the range of rows: what `LevelCounts` says of the test and the validation split."""
MAX_COUNTED = 1 << 20
_CHUNK_ROWS = 1 << 15


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A range of rows."""

    labels: NDArray[np.bool_]
    numerical: NDArray[np.int32]
    """[rows, 13], `numerical.MISSING` where there is none."""
    categorical: NDArray[np.int32]
    """[26, rows]"""
    level: NDArray[np.int32]
    """[rows], of the hidden model."""
    bins: NDArray[np.int32]
    """[13, rows], which of its column's counts each integer is."""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, kw_only=True)
class Tables:
    """All that rows are made of besides their number."""

    starts: NDArray[np.int32]
    widths: NDArray[np.int32]
    """[26, 2 x BUCKETS], ids of each bucket; the second half divides the first half's last one."""
    counts: NDArray[np.int32]
    """[13, BUCKETS], ascending."""
    inputs: NDArray[np.int32]
    """[13, BUCKETS]: what a count adds to the level, and in the lower half the bits of the float16
    that a network sees of it."""
    streams: NDArray[np.uint64]
    """Where the random numbers of each column begin: 26, then 7 for two integers each, the label"""
    salts: NDArray[np.int32]
    """[26], of the hidden values."""
    amplitudes: NDArray[np.int32]
    """[26], of what a column's values add to the level; 256ths."""
    thresholds: NDArray[np.uint32]
    """[LEVELS], 2**32 times the probability of a click."""
    pair_weight: int
    """64ths."""


# --- rows


def rows(start: int, stop: int) -> Rows:
    """Rows `start` to `stop`, the latter not included, with the ids of the whole vocabulary."""
    t = tables()
    numbers = np.arange(start, stop, dtype=np.uint64)
    ids = np.stack([_ids(t, column, numbers) for column in range(len(VOCABULARY))])
    bins = np.stack([_bins(t, column, numbers) for column in range(NUM_NUMERICAL)])
    level = _levels(t, ids, bins)
    draws = random_bits(numbers, t.streams[-1]) >> np.uint64(32)
    return Rows(
        labels=draws < t.thresholds[level],
        numerical=np.stack([t.counts[c][bins[c]] for c in range(NUM_NUMERICAL)], axis=1),
        categorical=ids,
        level=level,
        bins=bins,
    )


def blocks(start: int, stop: int) -> Iterator[Rows]:
    """The same rows piece by piece, made by all cores."""
    starts = range(start, stop, _CHUNK_ROWS)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield from pool.map(lambda first: rows(first, min(first + _CHUNK_ROWS, stop)), starts)


def inputs(made: Rows) -> NDArray[np.float16]:
    """[rows, 13]: the integers as a network sees them, ln(x + 3)."""
    t = tables()
    columns = [t.inputs[c].view(np.float16)[::2][made.bins[c]] for c in range(NUM_NUMERICAL)]
    return np.stack(columns, axis=1)


def _ids(t: Tables, column: int, numbers: NDArray[np.uint64]) -> NDArray[np.int32]:
    random = random_bits(numbers, t.streams[column])
    coarse = (random >> np.uint64(64 - BUCKET_BITS)).astype(np.int64)
    fine = (random >> np.uint64(64 - 2 * BUCKET_BITS)).astype(np.int64) & (BUCKETS - 1)
    bucket = np.where(coarse == BUCKETS - 1, BUCKETS + fine, coarse)
    place = (random & np.uint64(0xFFFFFFFF)) * t.widths[column][bucket].astype(np.uint64)
    return np.asarray(t.starts[column][bucket] + (place >> np.uint64(32)).astype(np.int32))


def _bins(t: Tables, column: int, numbers: NDArray[np.uint64]) -> NDArray[np.int32]:
    """Two columns share a random number: its upper and its lower half."""
    random = random_bits(numbers, t.streams[len(VOCABULARY) + column // 2])
    half = random if column % 2 else random >> np.uint64(32)
    return ((half & np.uint64(0xFFFFFFFF)) >> np.uint64(32 - BUCKET_BITS)).astype(np.int32)


# --- the hidden model


def _levels(t: Tables, ids: NDArray[np.int32], bins: NDArray[np.int32]) -> NDArray[np.int32]:
    level = np.full(ids.shape[1], ZERO + BIAS, np.int32)
    sums = np.zeros((RANK, ids.shape[1]), np.int32)
    for column, of_column in enumerate(ids):
        value = hidden_value(of_column, t.salts[column])
        level += (t.amplitudes[column] * effect(value)) >> 8
        if column in INTERACTING:
            bits = mixed(value)
            for k in range(RANK):
                sums[k] += 1 - 2 * ((bits >> np.uint32(k)) & np.uint32(1)).astype(np.int32)
    for column, of_column in enumerate(bins):
        level += t.inputs[column][of_column] >> 16
    # The square of a sum of signs is that of all their products, in pairs, and a constant.
    level += (np.int32(t.pair_weight) * (sums * sums).sum(axis=0, dtype=np.int32)) >> 6
    return np.clip(level, 0, LEVELS - 1)


def hidden_value(ids: NDArray[np.int32], salt: np.int32) -> NDArray[np.uint32]:
    """32 bits for each value of a column, that its part in the hidden model is read from."""
    return mixed(ids.astype(np.uint32) * np.uint32(0x9E3779B1) + np.uint32(int(salt) & 0xFFFFFFFF))


def mixed(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """MurmurHash3's finaliser."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x85EBCA6B)
    x = x ^ (x >> np.uint32(13))
    x = x * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def effect(value: NDArray[np.uint32]) -> NDArray[np.int32]:
    """The sum of four bytes less its mean: nearly normal, from -510 to 510."""
    total = sum((value >> np.uint32(8 * k)) & np.uint32(255) for k in range(4))
    return np.asarray(total).astype(np.int32) - 510


# --- what the hidden model itself would reach


@dataclass(frozen=True)
class LevelCounts:
    """How many clicks and other rows each level has: all that its AUC and log loss depend on."""

    clicks: NDArray[np.int64]
    others: NDArray[np.int64]

    @staticmethod
    def of(start: int, stop: int) -> "LevelCounts":
        """Of rows `start` to `stop`, counted."""
        counts = np.zeros((2, LEVELS), np.int64)
        for made in blocks(start, stop):
            for kind, chosen in enumerate((made.labels, ~made.labels)):
                counts[kind] += np.bincount(made.level[chosen], minlength=LEVELS)
        return LevelCounts(*counts)

    @property
    def auc(self) -> float:
        """Of the true probabilities, exact: the ratio of two whole numbers, rounded once."""
        half_pairs = below = 0
        for clicks, others in zip(self.clicks.tolist(), self.others.tolist(), strict=True):
            half_pairs += clicks * (2 * below + others)
            below += others
        pairs = sum(self.clicks.tolist()) * below
        return half_pairs / (2 * pairs) if pairs else math.nan

    @property
    def log_loss(self) -> float:
        """Of the true probabilities."""
        chance = tables().thresholds / 2.0**32
        sums = self.clicks * np.log(chance) + self.others * np.log1p(-chance)
        return -math.fsum(sums.tolist()) / int(self.clicks.sum() + self.others.sum())


def best_auc(start: int, stop: int) -> float | None:
    """The AUC of the true probabilities, which no model can beat; None if it takes long to count.

    Of whole splits it was counted once.
    """
    if (start, stop) in BEST_AUC:
        return BEST_AUC[start, stop]
    return LevelCounts.of(start, stop).auc if stop - start <= MAX_COUNTED else None


# --- tables


@functools.cache
def tables() -> Tables:
    """Made once, in a tenth of a second."""
    random = np.random.Generator(np.random.PCG64(SEED))
    streams = random.integers(0, 2**64, len(VOCABULARY) + 8, np.uint64)
    salts = random.integers(-(2**31), 2**31, len(VOCABULARY), np.int64).astype(np.int32)
    bounds = [_buckets(column) for column in range(len(VOCABULARY))]
    starts = np.stack([b[0] for b in bounds])
    widths = np.stack([b[1] for b in bounds])
    counts = np.stack([_counts(column) for column in range(NUM_NUMERICAL)])
    made = Tables(
        starts=starts,
        widths=widths,
        counts=counts,
        inputs=_inputs(counts),
        streams=streams,
        salts=salts,
        amplitudes=_amplitudes(starts, widths, salts),
        thresholds=_thresholds(),
        pair_weight=_pair_weight(),
    )
    return made


def _frequencies(column: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
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


def _buckets(column: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """First id and number of ids of each bucket."""
    ranks, expected = _frequencies(column)
    missing = round(MISSING_SHARES[column % len(MISSING_SHARES)] * BUCKETS)
    below = np.append(0, np.cumsum(expected)) / np.sum(expected)
    below[-1] = 1
    present = BUCKETS - missing
    coarse = np.arange(present) / present
    fine = (present - 1 + np.arange(BUCKETS + 1) / BUCKETS) / present
    first = np.floor(np.interp(np.concatenate([coarse, fine]), below, ranks)).astype(np.int64)
    first[-1] = VOCABULARY[column]
    # The last coarse bucket is never used: its place is taken by the fine ones.
    width = np.maximum(np.diff(first), 1)
    width[present - 1] = 1
    absent = (np.zeros(missing, np.int64), np.ones(missing, np.int64))
    starts, widths = np.append(absent[0], first[:-1]), np.append(absent[1], width)
    return starts.astype(np.int32), widths.astype(np.int32)


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


def _inputs(counts: NDArray[np.int32]) -> NDArray[np.int32]:
    """The columns' effects are lines and parabolas of the logarithm, in turn."""
    seen = log_transform(counts)
    wide = seen.astype(np.float64)
    mean = np.cumsum(wide, axis=1)[:, -1:] / BUCKETS
    spread = np.sqrt(np.cumsum((wide - mean) ** 2, axis=1)[:, -1:] / BUCKETS)
    score = np.clip((wide - mean) / spread, -3, 3)
    score[1::2] = (score[1::2] ** 2 - 1) / np.sqrt(2)
    score[::4] *= -1
    size = STRENGTH * np.sqrt(SHARES["numerical"] / NUM_NUMERICAL) * LEVELS_PER_LOGIT
    added = np.rint(size * score).astype(np.int32)
    return np.asarray((added << 16) | seen.view(np.uint16).astype(np.int32))


def _amplitudes(
    starts: NDArray[np.int32], widths: NDArray[np.int32], salts: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Every column's effects get their share of the variance, whatever its frequent values drew."""
    shares = np.array([1.0 if v < 100_000 else 6.0 for v in VOCABULARY])
    spread = STRENGTH * np.sqrt(SHARES["values"] * shares / np.cumsum(shares)[-1])
    amplitudes = []
    for column, salt in enumerate(salts):
        sample = (starts[column] + widths[column] // 2)[:BUCKETS]
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
