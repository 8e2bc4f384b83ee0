"""Transforms of numbers, against numpy, scipy and scikit-learn."""

import math
from statistics import NormalDist

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.preprocessing import QuantileTransformer, StandardScaler

from trainmark.clicklog.arrays import number_choice, number_transforms
from trainmark.clicklog.arrays.number_transforms import Losses, apply, fit, fit_bins, losses

HUGE = 1.7e308
RANDOM = np.random.default_rng(0)
SKEWED = RANDOM.lognormal(3, 2, 5000)


def test_log_is_ln_of_x_plus_3_for_every_number() -> None:
    numbers = np.array([-2.999, -2.5, -2.0, -1.0, 0.0, 0.1, 7.0, 1e9, HUGE])
    expected = [math.log(x + 3) for x in numbers]
    np.testing.assert_allclose(apply("log", {}, numbers), expected, rtol=1e-14)
    assert apply("log", {}, np.array([-3.0, -3.5, -HUGE, np.nan])).tolist() == [0, 0, 0, 0]
    # A millionth above -3 is no 0, either.
    assert apply("log", {}, np.array([-3 + 1e-6])) == pytest.approx(math.log(1e-6), rel=1e-9)


def test_signed_log() -> None:
    numbers = np.array([-HUGE, -5.0, -1e-9, 0.0, 1e-9, 5.0, HUGE])
    expected = [math.copysign(math.log1p(abs(x)), x) for x in numbers]
    np.testing.assert_allclose(apply("signed_log", {}, numbers), expected, rtol=1e-14)


@pytest.mark.parametrize("sample", [SKEWED, np.arange(10.0), -SKEWED * 1e12, SKEWED * 1e-100])
def test_standard_is_scikit_learns(sample: NDArray[np.float64]) -> None:
    parameters = fit("standard", sample)
    expected = StandardScaler().fit_transform(sample[:, None])[:, 0]
    np.testing.assert_allclose(apply("standard", parameters, sample), expected, atol=1e-9)


def test_standard_of_logarithms() -> None:
    numbers = np.concatenate([SKEWED, -SKEWED[:100]])
    logs = np.sign(numbers) * np.log1p(np.abs(numbers))
    expected = StandardScaler().fit_transform(logs[:, None])[:, 0]
    found = apply("standard_log", fit("standard_log", numbers), numbers)
    np.testing.assert_allclose(found, expected, atol=1e-9)


def test_scores_end_where_those_of_the_training_rows_do() -> None:
    sample = np.append(np.zeros(9_999), 1.0)
    parameters = fit("standard", sample)
    assert apply("standard", parameters, sample).max() == pytest.approx(math.sqrt(9_999))
    assert apply("standard", parameters, np.array([2.0])) == 100
    assert apply("standard", fit("standard", np.array([0.0, 2.0])), np.array([9.0])) == 8


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (RANDOM.normal(50, 10, 5000), "standard"),
        (RANDOM.normal(50, 10, 5000).round(), "standard+bins"),
        (RANDOM.integers(0, 1_000_000_000, 5000).astype(float), "standard"),
        (SKEWED, "standard_log"),
        (SKEWED.round(-1), "standard_log+bins"),
        (np.repeat([0.0, 5000.0, 99_999.0], [9200, 790, 10]), "standard_log+bins"),
        (RANDOM.standard_cauchy(5000), "standard_log"),
        (np.array([0.0, 1.0] * 4), "standard+bins"),
        (np.array([-HUGE, 1.0, HUGE]), "standard"),
        (np.full(9, 7.0), "standard"),
        (np.empty(0), "standard"),
    ],
)
def test_auto_takes_logarithms_where_tails_are_heavy_and_bins_where_numbers_repeat(
    sample: NDArray[np.float64], expected: str
) -> None:
    assert number_choice.choose(sample, has_missing=False) == expected
    assert number_choice.choose(sample, has_missing=True) == f"{expected}+missing"


def test_standard_of_constants_and_of_the_largest_numbers() -> None:
    assert apply("standard", fit("standard", np.full(5, 7e9)), np.array([7e9])).tolist() == [0]
    assert fit("standard", np.empty(0)) == {"mean": 0.0, "deviation": 1.0, "limit": 10.0}
    ends = np.array([-HUGE, HUGE])
    np.testing.assert_allclose(apply("standard", fit("standard", ends), ends), [-1, 1])
    smallest = np.array([0.0, 5e-324])
    assert np.isfinite(apply("standard", fit("standard", smallest), smallest)).all()
    tiny = np.array([1.0, 1.0 + 2**-52])
    np.testing.assert_allclose(apply("standard", fit("standard", tiny), tiny), [-1, 1], atol=1)


def test_quantiles_are_those_of_scikit_learn_within() -> None:
    parameters = fit("quantile", SKEWED)
    assert len(parameters["values"]) == number_transforms.MAX_QUANTILES
    sorted_sample = np.sort(SKEWED)
    assert set(parameters["values"]) <= set(sorted_sample)
    expected = QuantileTransformer(
        n_quantiles=256, output_distribution="normal", subsample=10**9
    ).fit_transform(SKEWED[:, None])[:, 0]
    found = apply("quantile", parameters, SKEWED)
    first, last = np.quantile(SKEWED, [0.02, 0.98])
    inner = (first < SKEWED) & (last > SKEWED)
    np.testing.assert_allclose(found[inner], expected[inner], atol=0.02)
    # Order is kept; beyond the ends it ends there.
    assert (np.diff(apply("quantile", parameters, sorted_sample)) >= 0).all()
    ends = apply("quantile", parameters, np.array([-HUGE, HUGE]))
    np.testing.assert_allclose(ends, [found.min(), found.max()])
    assert abs(ends).max() < 3


def test_few_distinct_numbers_have_the_scores_of_their_ranks() -> None:
    sample = np.repeat([5.0, -1.0, 1e300], [50, 30, 20])
    parameters = fit("quantile", sample)
    normal = NormalDist()
    expected = [normal.inv_cdf(rank) for rank in (0.15, 0.55, 0.9)]
    np.testing.assert_allclose(
        apply("quantile", parameters, np.array([-1.0, 5.0, 1e300])), expected, rtol=1e-12
    )
    between = apply("quantile", parameters, np.array([2.0]))
    assert between == pytest.approx((expected[0] + expected[1]) / 2)
    assert fit("quantile", np.empty(0)) == {"values": [0.0], "scores": [0.0]}


def test_quantiles_of_the_largest_and_smallest_numbers() -> None:
    sample = np.concatenate([RANDOM.uniform(-1, 0.5, 400) * HUGE, [-HUGE, HUGE, 5e-324, 0.0]])
    scores = apply("quantile", fit("quantile", sample), np.sort(sample))
    assert np.isfinite(scores).all()
    assert (np.diff(scores) >= 0).all()


def test_bins_hold_about_as_many_numbers_each() -> None:
    ends = fit_bins(SKEWED)
    assert len(ends) == number_transforms.MAX_BINS
    found = number_transforms.bins(ends, SKEWED)
    np.testing.assert_array_equal(found, np.digitize(SKEWED, ends))
    counts = np.bincount(found, minlength=len(ends) + 1)
    assert counts[0] == 0
    assert counts[1:].min() > 0.9 * len(SKEWED) / len(ends)
    assert number_transforms.bins(ends, np.array([-1e9, 1e9, np.nan])).tolist() == [1, 64, 0]


def test_few_distinct_numbers_and_frequent_ones_have_bins_of_their_own() -> None:
    few = np.array([3.0, 1.0, 1.0, 2.0])
    assert fit_bins(few).tolist() == [1, 2, 3]
    mostly_zero = np.concatenate([np.zeros(92_000), np.full(300, 7.0), SKEWED, -SKEWED[:300]])
    ends = fit_bins(mostly_zero)
    assert number_transforms.MAX_BINS - 4 <= len(ends) <= number_transforms.MAX_BINS
    found = number_transforms.bins(ends, mostly_zero)
    for frequent in (0.0, 7.0):
        of_it = number_transforms.bins(ends, np.array([frequent]))
        assert set(mostly_zero[found == of_it]) == {frequent}
    others = np.bincount(found[(mostly_zero != 0) & (mostly_zero != 7)])
    assert others.max() < 1.1 * 5300 / (len(ends) - 4)


def test_bins_are_never_too_many() -> None:
    for frequent in range(40):
        sample = np.concatenate(
            [np.repeat(np.arange(0.5, frequent), 4000), RANDOM.random(9000) * 40]
        )
        assert 10 < len(fit_bins(sample)) <= number_transforms.MAX_BINS


def test_what_is_lost_is_counted() -> None:
    plain = np.array([16_777_217.0, 16_777_216.0, 0.1, 1.23456789, 1234567.0, 0.1 + 0.2, 2.5])
    assert losses("plain", {}, plain) == Losses(lost_digits=2)
    assert losses("plain", {}, np.array([1e39, -HUGE, 3e38])) == Losses(cut_off=2)
    assert losses("plain", {}, np.array([1e-50, 0.0, -1e-320])) == Losses(became_zero=2)
    assert losses("log", {}, np.array([-3.0, -7.5, -2.999, HUGE])) == Losses(became_zero=2)
    parameters = fit("quantile", np.arange(100.0))
    beyond = np.array([-1.0, 0.0, 99.0, 99.5, HUGE])
    assert losses("quantile", parameters, beyond) == Losses(cut_off=3)
    assert number_transforms.may_lose("quantile", parameters, -1, 5)
    assert not number_transforms.may_lose("quantile", parameters, 0, 99)
    standard = fit("standard", np.arange(100.0))
    assert losses("standard", standard, np.array([-HUGE, 0.0, 400.0])) == Losses(cut_off=2)
    assert apply("standard", standard, np.array([HUGE])).tolist() == [10.0]
    stored = number_transforms.narrowed(apply("plain", {}, np.array([HUGE])), np.float32)
    assert np.isfinite(stored).all()


def test_floats_of_16_bits_hold_few_numbers_exactly() -> None:
    assert number_transforms.exact_in_float16(np.array([2048.0, -0.5, 65504.0]))
    for number in (2049.0, 0.1, 65520.0, 1e-10):
        assert not number_transforms.exact_in_float16(np.array([number]))
