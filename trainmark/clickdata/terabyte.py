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
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainmark.clickdata.best_auc import NO_ROWS, BinCounts
from trainmark.clickdata.counters import mixed, random_bits
from trainmark.clickdata.numerical import log_transform

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
LEVELS = 1 << 13
ZERO = 6144
"""The level of a logit of 0."""
LEVELS_PER_LOGIT = 512
INTERACTING = (2, 3, 4, 6, 7, 13, 17, 23)
"""Columns whose values interact in pairs: mid-sized ones."""
RANK = 4
"""Length of the hidden vectors, of signs, whose dot products the interactions are."""
CLICK_RATE = 0.033
BIAS = -2889
"""Added to every level, so that clicks have that rate."""
SEED = 20140101
"""Seed of the streams, of hidden values, and of the numbers that stand for ids in raw text."""

_TEST, _VALIDATION = TRAIN_ROWS, TRAIN_ROWS + TEST_ROWS
BEST_AUC = {
    (_TEST, _VALIDATION): 0.8167590580720389,
    (_VALIDATION, ROWS): 0.816707898176588,
}
"""The AUC that `BinCounts` found for the rows of the test and of the validation split."""
MAX_COUNTED = 1 << 20
_LEAST_ROWS, _MOST_ROWS = 1 << 11, 1 << 15  # of a piece: what pays, and what fits into caches
TABLES_FILE = "terabyte.npz"


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

    @property
    def counts(self) -> BinCounts:
        return BinCounts.of(self.labels, self.level, LEVELS)


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
    cores = len(os.sched_getaffinity(0))
    size = min(max((stop - start) // cores, _LEAST_ROWS), _MOST_ROWS)
    with ThreadPoolExecutor(cores) as pool:
        starts = range(start, stop, size)
        yield from pool.map(lambda first: rows(first, min(first + size, stop)), starts)


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


def effect(value: NDArray[np.uint32]) -> NDArray[np.int32]:
    """The sum of four bytes less its mean: nearly normal, from -510 to 510."""
    total = sum((value >> np.uint32(8 * k)) & np.uint32(255) for k in range(4))
    return np.asarray(total).astype(np.int32) - 510


# --- what the hidden model itself would reach


def counts(start: int, stop: int) -> BinCounts:
    """Clicks and other rows by level, of rows `start` to `stop`: all that the AUC and the log loss
    of the true probabilities depend on."""
    return sum((made.counts for made in blocks(start, stop)), NO_ROWS)


def log_loss(found: BinCounts) -> float:
    """The log loss of the true probabilities."""
    chance = tables().thresholds / 2.0**32
    sums = found.clicks * np.log(chance) + found.others * np.log1p(-chance)
    return -math.fsum(sums.tolist()) / found.rows


def best_auc(start: int, stop: int) -> float | None:
    """The AUC of the true probabilities, which no model can beat; None if it takes long to count.

    Of whole splits it was counted once.
    """
    if (start, stop) in BEST_AUC:
        return BEST_AUC[start, stop]
    return counts(start, stop).auc if stop - start <= MAX_COUNTED else None


# --- tables


@functools.cache
def tables() -> Tables:
    """As `terabyte_shape.py` made them, once and for all: they come from logarithms, which another
    library or processor may round otherwise."""
    with np.load(Path(__file__).with_name(TABLES_FILE)) as file:
        starts = np.cumsum(file["steps"], axis=1, dtype=np.int32)
        return Tables(
            starts=starts,
            widths=widths(starts),
            counts=file["counts"],
            inputs=(file["effects"].astype(np.int32) << 16)
            | log_transform(file["counts"]).view(np.uint16),
            streams=file["streams"],
            salts=file["salts"],
            amplitudes=file["amplitudes"],
            thresholds=file["thresholds"],
            pair_weight=int(file["pair_weight"]),
        )


def widths(starts: NDArray[np.int32]) -> NDArray[np.int32]:
    """Ids of each bucket: up to the next one, but at least one."""
    found = np.diff(starts, axis=1, append=np.array(VOCABULARY, np.int32)[:, None])
    found[:, BUCKETS - 1] = 1  # the last coarse bucket: the fine ones take its place
    return np.maximum(found, 1)
