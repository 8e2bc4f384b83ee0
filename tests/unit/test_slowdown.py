"""Whether steps take longer: formulas beside scipy's, verdicts beside a known truth."""

import math
import statistics

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from trainmark.metrics import slowdown
from trainmark.metrics.slowdown import block_difference, compare, median_and_error

THREE_PERCENT = 0.03
Rounds = list[list[float]]


def noise(rng: np.random.Generator, blocks: int) -> NDArray[np.float64]:
    """Differences of a noisy machine, whose median is 0: heavy tails, and loud times of minutes."""
    loud = np.empty(blocks)
    level = rng.normal()
    for block in range(blocks):
        level = 0.97 * level + math.sqrt(1 - 0.97**2) * rng.normal()
        loud[block] = 0.1 * math.exp(0.7 * level)
    return loud * rng.standard_t(2, blocks)


def test_a_block_compares_lower_quartiles() -> None:
    rng = np.random.default_rng(0)
    base, candidate = rng.gamma(2, size=(2, 8)).tolist()
    quartiles = [
        statistics.quantiles(side, n=4, method="inclusive")[0] for side in (base, candidate)
    ]
    assert block_difference(base, candidate) == pytest.approx(math.log(quartiles[1] / quartiles[0]))
    assert block_difference(candidate, base) == pytest.approx(-block_difference(base, candidate))


def test_disturbed_steps_hardly_matter() -> None:
    """Not even where they are all of one side; a mean would say that the base is slower."""
    rng = np.random.default_rng(1)
    base, candidate = 0.02 * (1 + 0.01 * rng.random((2, 300, 8)))
    base *= np.where(rng.random(base.shape) < 0.4, 10, 1)
    found = [block_difference(a, 1.03 * b) for a, b in zip(base, candidate, strict=True)]
    assert math.expm1(median_and_error(found)[0]) == pytest.approx(0.03, abs=0.003)


@pytest.mark.parametrize("blocks", [20, 50, 200])
def test_the_error_of_a_median_is_what_repeats_show(blocks: int) -> None:
    rng = np.random.default_rng(2)
    found = [median_and_error(noise(rng, blocks).tolist()) for _ in range(1500)]
    medians, errors = np.array(found).T
    assert np.mean(np.abs(medians / errors) < 2) > 0.93
    normal = [median_and_error(rng.normal(size=blocks).tolist()) for _ in range(1500)]
    medians, errors = np.array(normal).T
    assert np.std(medians) == pytest.approx(float(np.mean(errors)), rel=0.15)


def test_odds_and_interval_of_one_round() -> None:
    blocks = np.random.default_rng(3).normal(0.02, 0.05, 100).tolist()
    median, error = median_and_error(blocks)
    found = compare([blocks], THREE_PERCENT)
    assert found is not None
    spread = stats.t(10, scale=math.hypot(error, slowdown.PROCESS_SD))  # sqrt(100) of freedom
    odds = spread.pdf(median - math.log(1.03)) / spread.pdf(median)
    assert found.odds == pytest.approx(odds)
    assert found.confidence == pytest.approx(max(odds, 1 / odds) / (1 + max(odds, 1 / odds)))
    low, high = np.expm1(median + np.array(spread.interval(0.95)))
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)
    assert found.slowdown == pytest.approx(math.expm1(median))


def test_both_directions_are_alike() -> None:
    rng = np.random.default_rng(4)
    rounds: Rounds = [noise(rng, 41).tolist() for _ in range(3)]
    found, opposite = compare(rounds, 0.03), compare([[-x for x in r] for r in rounds], 0.03)
    assert found is not None
    assert opposite is not None
    assert 1 + opposite.slowdown == pytest.approx(1 / (1 + found.slowdown))
    assert 1 + opposite.low == pytest.approx(1 / (1 + found.high))


def test_rounds_that_disagree_are_less_sure() -> None:
    rng = np.random.default_rng(5)
    blocks = rng.normal(0, 0.02, (4, 100))
    agree = compare(blocks.tolist(), 0.03)
    differ = compare((blocks + np.array([[-0.03], [0.03], [-0.03], [0.03]])).tolist(), 0.03)
    assert agree is not None
    assert differ is not None
    assert agree.verdict == "not slower"
    assert differ.high - differ.low > 3 * (agree.high - agree.low)


def test_too_few_blocks_are_no_answer() -> None:
    assert compare([], 0.03) is None
    assert compare([[0.1] * (slowdown.FEWEST_BLOCKS - 1)] * 3, 0.03) is None
    assert compare([[0.1] * slowdown.FEWEST_BLOCKS], 0.03) is not None
    assert compare([[9.0] * slowdown.FEWEST_BLOCKS], 0.03) is not None  # odds beyond any float


@pytest.mark.parametrize(("takes", "answer"), [(3.0, "slower"), (0.4, "not slower")])
def test_a_candidate_far_beyond_is_decided(takes: float, answer: str) -> None:
    """Where Student's t makes 0 and 3 % about as improbable."""
    blocks = np.random.default_rng(7).normal(math.log(takes), 0.1, (2, 25)).tolist()
    alone, found = compare(blocks[:1], THREE_PERCENT), compare(blocks, THREE_PERCENT)
    assert alone is not None
    assert found is not None
    assert alone.verdict == "undecided"  # it may be this pair of processes
    assert found.verdict == answer


def verdict(rng: np.random.Generator, effect: float) -> str:
    """Of one gate that looks after every fifth block, and at the end of 6 rounds gives up."""
    rounds: Rounds = []
    for _ in range(6):
        process = rng.normal(0, slowdown.PROCESS_SD)
        blocks = (noise(rng, 100) + math.log1p(effect) + process).tolist()
        rounds.append([])
        for look in range(0, 100, 5):
            rounds[-1] += blocks[look : look + 5]
            found = compare(rounds, THREE_PERCENT)
            if found is not None and found.verdict != "undecided":
                return found.verdict
    return "undecided"


@pytest.mark.parametrize(
    ("effect", "answer"),
    [
        (0.0, "not slower"),
        (0.03, "slower"),
        (-0.05, "not slower"),
    ],
)
def test_verdicts_beside_the_truth(effect: float, answer: str) -> None:
    """However often one looks: 95 of 100 slow-downs found, at most 2 of 100 false alarms."""
    rng = np.random.default_rng(6)
    found = [verdict(rng, effect) for _ in range(200)]
    wrong = {"slower": "not slower", "not slower": "slower"}[answer]
    assert found.count(answer) >= 0.95 * len(found)
    assert found.count(wrong) <= 0.02 * len(found)
