"""The random order of the training rows.

Row r has the key mix(seed, r), 40 bits; rows are ordered by key, then by r. Nothing else decides
the order, so that it can be found bucket by bucket: bucket b of 2**bits holds the rows whose key
starts with the bits of b, and the buckets one after the other are the whole.
"""

import numpy as np
from numpy.typing import NDArray

from trainmark.clicklog.arrays import primitives

KEY_BITS = 40
BUCKET_ROWS = 1 << 18
"""Rows of a bucket, roughly: its part of a column should stay in the processor's cache."""
MAX_BUCKET_BITS = 10

GOLDEN = 0x9E3779B97F4A7C15

SPLITS, GROUPS, NEGATIVES = 1, 2, 3
"""What else is drawn from the seed: each its own numbers, which say nothing of the others."""


def bucket_bits(rows: int) -> int:
    """How many bits number the buckets of a log of about `rows` rows."""
    return min(max(rows // BUCKET_ROWS, 0).bit_length(), MAX_BUCKET_BITS)


def group(
    seed: int, start: int, stop: int, bits: int
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """The rows of a block in order of their buckets, and in input order within a bucket.

    Returns:
        The order, rows relative to `start` [rows], and where each bucket starts in it
        [2**bits + 1].
    """
    order = np.empty(stop - start, np.uint32)
    if primitives.FAST:
        from trainmark.clicklog.arrays import kernels

        buckets = np.empty(stop - start, np.uint16)
        bounds = np.zeros((1 << bits) + 1, np.int64)
        kernels.group(_origin(seed)[0], start, KEY_BITS, bits, buckets, order, bounds)
        return order, bounds
    in_order = keys(seed, start, np.arange(stop - start))
    buckets = (in_order >> np.uint64(KEY_BITS - bits)).astype(np.uint16)
    # A stable sort of 16-bit numbers is a radix sort.
    order[:] = np.argsort(buckets, kind="stable")
    sizes = np.bincount(buckets, minlength=1 << bits)
    return order, np.concatenate(([0], np.cumsum(sizes)))


def keys(seed: int, start: int, rows: NDArray[np.integer]) -> NDArray[np.uint64]:
    """Keys of rows, counted from `start`: SplitMix64, started at a place that the seed decides."""
    if primitives.FAST:
        from trainmark.clicklog.arrays import kernels

        found = np.empty(len(rows), np.uint64)
        kernels.keys_of(_origin(seed)[0], start, KEY_BITS, rows, found)
        return found
    numbers = rows.astype(np.uint64) + np.uint64(start + 1)
    return _mix(_origin(seed) + numbers * np.uint64(GOLDEN)) >> np.uint64(64 - KEY_BITS)


def hashed(seed: int, stream: int, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64 random bits of each number: different ones of different numbers."""
    origin = _mix(_origin(seed) + np.uint64(stream))
    return _mix(origin + (numbers + np.uint64(1)) * np.uint64(GOLDEN))


def _origin(seed: int) -> NDArray[np.uint64]:
    return _mix(np.array([seed], np.uint64) * np.uint64(GOLDEN) + np.uint64(1))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def order_of(
    keys_in_bucket: NDArray[np.uint64], places: NDArray[np.uint64], bits: int
) -> NDArray[np.uint32]:
    """The places of a bucket's rows, which come in input order, in the order of their keys."""
    # The key's remaining bits above the row's place: one sort of plain numbers.
    place_bits = np.uint64(64 - KEY_BITS + bits)
    words = (keys_in_bucket << place_bits) | places
    words.sort()
    return (words & ((np.uint64(1) << place_bits) - np.uint64(1))).astype(np.uint32)
