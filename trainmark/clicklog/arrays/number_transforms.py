"""What becomes of a number: its transform, fitted to numbers of training rows, and its bin.

    plain         the number itself
    log           ln(x + 3), as of Criteo's integers; 0.0 where x is not above -3
    signed_log    sign(x) ln(1 + |x|)
    standard      (x - mean) / standard deviation
    standard_log  the same of the signed logarithm
    quantile      its rank among the training rows, as a normal score (0.0 is the median)

A missing number, a NaN here, becomes 0.0. All is computed in float64, and kept as float32, or as
float16 where that keeps every number exactly. Fitted parameters are plain numbers and lists.
Fitted transforms do not go on far beyond the training rows: a score ends at the largest of theirs
(a standard one at 10 at least, and at a whole number).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Parameters = Mapping[str, Any]

LOG_SHIFT = 3.0
MAX_QUANTILES = 256
FAR = 10.0
"""A standard score that may be reached by other rows, whatever the training rows reach."""
MAX_BINS = 64
MAX_FREQUENT = MAX_BINS // 4
"""Numbers that have bins of their own beside those that others share."""
MAX_FLOAT32 = float(np.finfo(np.float32).max)
DIGITS = 7
"""Significant digits that float32 keeps."""


# --- fitting


def fit(transform: str, sample: Numbers) -> dict[str, Any]:
    """The parameters of a transform, from numbers of training rows, none of them missing."""
    if transform == "standard":
        return _fit_standard(sample)
    if transform == "standard_log":
        return _fit_standard(_signed_log(sample))
    if transform == "quantile":
        return _fit_quantile(sample)
    return {}


def _fit_standard(sample: Numbers) -> dict[str, Any]:
    """Mean, standard deviation (1 for that of a constant, as scikit-learn has it), and limit."""
    if not len(sample):
        return {"mean": 0.0, "deviation": 1.0, "limit": FAR}
    if sample.min() == sample.max():
        return {"mean": float(sample[0]), "deviation": 1.0, "limit": FAR}
    # In a unit in which no square is beyond float64; and to 12 digits, because the order of a sum,
    # and with it the last ones, differ between processors.
    unit = math.ldexp(1.0, math.frexp(float(np.abs(sample).max()))[1] - 1)
    scaled = sample / unit
    deviation = float(f"{scaled.std():.12g}")
    mean = round(float(scaled.mean() / deviation), 12) * deviation
    fitted = {"mean": mean * unit, "deviation": deviation * unit or 1.0}
    largest = float(np.abs(_standard(fitted, sample)).max())
    return fitted | {"limit": max(FAR, float(math.ceil(largest)))}


def _fit_quantile(sample: Numbers) -> dict[str, Any]:
    """Numbers and their scores, between which others are interpolated.

    All distinct numbers, where they are few, else quantiles. Of equal ones the mean rank counts.
    """
    if not len(sample):
        return {"values": [0.0], "scores": [0.0]}
    values, counts = np.unique(sample, return_counts=True)
    if len(values) <= MAX_QUANTILES:
        ranks = (np.cumsum(counts) - counts / 2) / len(sample)
    else:
        places = np.linspace(0, 1, MAX_QUANTILES)
        quantiles = np.quantile(sample, places, method="lower")
        values, counts = np.unique(quantiles, return_counts=True)
        last = np.cumsum(counts) - 1
        ranks = (places[last - counts + 1] + places[last]) / 2
        ranks = np.clip(ranks, 0.5 / MAX_QUANTILES, 1 - 0.5 / MAX_QUANTILES)
    normal = NormalDist()
    return {"values": values.tolist(), "scores": [normal.inv_cdf(rank) for rank in ranks.tolist()]}


def fit_bins(sample: Numbers) -> Numbers:
    """The lower ends of a column's bins, rising.

    A bin for every distinct number, where they are few. Else the most frequent numbers, if they
    would fill a bin, have bins of their own, and the others share the rest by count.
    """
    if not len(sample):
        return np.zeros(1)
    values, counts = np.unique(sample, return_counts=True)
    if len(values) <= MAX_BINS:
        return values
    frequent = _frequent(counts)
    others = np.where(frequent, 0, counts)
    # A frequent number may cut the bin of others that it lies in into two.
    shared = MAX_BINS - 2 * int(frequent.sum())
    bin_of = (np.cumsum(others) - others) * shared // max(int(others.sum()), 1)
    begins = np.ones(len(values), np.bool_)
    begins[1:] = (np.diff(bin_of) > 0) | frequent[1:] | frequent[:-1]
    return values[begins]


def _frequent(counts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which numbers have more than their share of the sample."""
    frequent = np.zeros(len(counts), np.bool_)
    left = int(counts.sum())
    for found, place in enumerate(np.argsort(-counts, kind="stable")[:MAX_FREQUENT].tolist()):
        if counts[place] * (MAX_BINS - 2 * found) <= left:
            break
        frequent[place] = True
        left -= int(counts[place])
    return frequent


# --- applying


def apply(transform: str, parameters: Parameters, numbers: Numbers) -> Numbers:
    """The transformed numbers; 0.0 where one is missing."""
    with np.errstate(over="ignore"):
        transformed = _transformed(transform, parameters, numbers)
    return np.where(np.isnan(numbers), 0.0, transformed)


def _signed_log(numbers: Numbers) -> Numbers:
    return np.copysign(np.log1p(np.abs(numbers)), numbers)


def _standard(parameters: Parameters, numbers: Numbers) -> Numbers:
    # Of halves: float64 holds the difference of any two.
    mean, deviation = float(parameters["mean"]), float(parameters["deviation"])
    return 2 * ((numbers / 2 - mean / 2) / deviation)


def _transformed(transform: str, parameters: Parameters, numbers: Numbers) -> Numbers:
    if transform == "log":
        above = numbers > -LOG_SHIFT
        return np.log(np.where(above, numbers + LOG_SHIFT, 1.0))
    if transform == "signed_log":
        return _signed_log(numbers)
    if transform == "standard":
        return np.clip(_standard(parameters, numbers), -parameters["limit"], parameters["limit"])
    if transform == "standard_log":
        return _transformed("standard", parameters, _signed_log(numbers))
    if transform == "quantile":
        values, scores = (np.asarray(parameters[key], np.float64) for key in ("values", "scores"))
        return np.interp(numbers / 2, values / 2, scores)  # as in `_standard`
    return numbers


def bins(lower_ends: Numbers, numbers: Numbers) -> NDArray[np.int64]:
    """Which bin each number lies in, from 1; those below all in the first. 0: it is missing."""
    found = np.maximum(np.searchsorted(lower_ends, numbers, side="right"), 1)
    return np.where(np.isnan(numbers), 0, found)


def narrowed(numbers: Numbers, dtype: Any) -> NDArray[Any]:
    """Transformed numbers as they are stored; what is too large is cut off."""
    with np.errstate(under="ignore"):
        return np.clip(numbers, -MAX_FLOAT32, MAX_FLOAT32).astype(dtype)


# --- what is lost


@dataclass(frozen=True)
class Losses:
    """How many numbers were cut off, became 0, or lost digits."""

    cut_off: int = 0
    """Beyond the range of float32, or (fitted) too far beyond the training rows."""
    became_zero: int = 0
    """Not above -3 (log), or too small for float32."""
    lost_digits: int = 0
    """Plain numbers of more than seven significant digits that float32 rounds."""

    def __add__(self, other: "Losses") -> "Losses":
        return Losses(
            self.cut_off + other.cut_off,
            self.became_zero + other.became_zero,
            self.lost_digits + other.lost_digits,
        )


def may_lose(transform: str, parameters: Parameters, lowest: float, highest: float) -> bool:
    """Whether any of the numbers from `lowest` to `highest` may be lost."""
    if transform in ("plain", "signed_log"):
        return True
    if transform == "log":
        return lowest <= -LOG_SHIFT
    ends = np.array([lowest, highest])
    return losses(transform, parameters, ends).cut_off > 0


def losses(transform: str, parameters: Parameters, numbers: Numbers) -> Losses:
    """What a transform loses of numbers, none of them missing."""
    if transform == "quantile":
        first, last = parameters["values"][0], parameters["values"][-1]
        return Losses(cut_off=int(np.count_nonzero((numbers < first) | (numbers > last))))
    if transform == "log":
        return Losses(became_zero=int(np.count_nonzero(numbers <= -LOG_SHIFT)))
    if transform in ("standard", "standard_log"):
        numbers = _signed_log(numbers) if transform == "standard_log" else numbers
        with np.errstate(over="ignore"):
            scores = np.abs(_standard(parameters, numbers))
        return Losses(cut_off=int(np.count_nonzero(scores > parameters["limit"])))
    exact = apply(transform, parameters, numbers)
    stored = narrowed(exact, np.float32)
    too_small = (exact != 0) & (stored == 0)
    too_large = np.abs(exact) > MAX_FLOAT32
    rounded = (stored != exact) & ~too_small & ~too_large
    return Losses(
        cut_off=int(np.count_nonzero(too_large)),
        became_zero=int(np.count_nonzero(too_small)),
        lost_digits=_count_long(exact[rounded]) if transform == "plain" else 0,
    )


def _count_long(numbers: Numbers) -> int:
    """How many have more significant digits than float32 keeps, none of them 0."""
    exponents = np.floor(np.log10(np.abs(numbers)))
    digits = numbers * 10.0 ** (DIGITS - 1 - exponents)
    # Noise of binary fractions, such as that of 0.1 + 0.2, is no digit.
    return int(np.count_nonzero(np.abs(digits - np.rint(digits)) > 1e-6))


def exact_in_float16(numbers: Numbers) -> bool:
    """Whether float16 holds each of these, none of them missing."""
    with np.errstate(over="ignore"):
        return bool((numbers.astype(np.float16) == numbers).all())
