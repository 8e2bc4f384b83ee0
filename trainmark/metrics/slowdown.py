"""Whether one side's steps take longer than the other's, from steps that they took in turns.

A block is four turns, in the order ABBA or BAAB as a coin falls. Its difference is that of the
logarithms of both sides' lower quartiles: what disturbs less than three quarters of the steps
hardly moves it. Had the coin fallen otherwise, what disturbed one side would have disturbed the
other. So, whatever the noise and however long it lasts, a difference lies above the truth or below
it with equal chances, and the median over blocks has the error that order statistics say.

Two processes of one program differ, too, by where their memory happens to lie. A round is a pair of
fresh processes; `PROCESS_SD` is part of the error of its median. Rounds are weighted by their
errors; where they disagree more than these allow, the errors are taken to be larger.

What is found is judged by Wald's sequential test of "as fast" against "slower by so much": how many
times more probable the second makes it. One of the two is decided once that is `SURE` to one, and
looking after every block does not make wrong decisions more frequent. Of a slow-down between the
two, either may be decided. As errors are estimates, too, probabilities are those of Student's t.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

PROCESS_SD = 0.004
"""Standard deviation between two fresh processes of one program, as logarithms: about that of the
least disturbed pairs in benchmarks/results/gate_cpu.json."""
SURE = 99.0
"""Odds to one at which an answer is decided."""
FEWEST_BLOCKS = 20
"""A round with fewer blocks is not judged, because its error is not known well enough."""
FAR = 10
"""A candidate that is so many times `slower_by` slower, or faster, is judged as "slower by so much
or more", or as "as fast or faster", once a second pair of processes is: Student's tails are so long
that they make the two points about as improbable. Of one pair, or nearer, that would call three of
100 equal candidates slower where the machine is noisy."""

Verdict = Literal["slower", "not slower", "undecided"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is known of the candidate's step time, in parts of the base's."""

    slowdown: float
    """0.03: it takes 3 % longer; below 0, less."""
    low: float
    high: float
    """95 % interval of `slowdown`."""
    odds: float
    """How many times more probable "slower by so much" makes what was seen than "as fast"."""
    verdict: Verdict

    @property
    def confidence(self) -> float:
        """The probability of the likelier answer, if both were equally likely before."""
        most = max(self.odds, 1 / self.odds)
        return most / (1 + most)


def block_difference(base_s: Sequence[float], candidate_s: Sequence[float]) -> float:
    """A block's difference: above 0 if the candidate takes longer."""
    import numpy as np

    return float(np.log(np.quantile(candidate_s, 0.25) / np.quantile(base_s, 0.25)))


def median_and_error(differences: Sequence[float]) -> tuple[float, float]:
    """The median of a round's differences, and its standard error.

    Each difference lies above or below the truth with equal chances, so the number of differences
    below it has the standard deviation sqrt(N) / 2. Hence four standard errors lie between the two
    ordered differences that are sqrt(N) places away from the middle. The error is known as well as
    one with sqrt(N) degrees of freedom, half the number of differences in between.
    """
    import numpy as np

    ordered, blocks = np.sort(differences), len(differences)
    place = max(math.floor(blocks / 2 - math.sqrt(blocks)), 0)
    return float(np.median(ordered)), float(ordered[-1 - place] - ordered[place]) / 4


def compare(rounds: Sequence[Sequence[float]], slower_by: float) -> Comparison | None:
    """Judge the differences of all blocks so far; None as long as there are too few.

    Args:
        rounds: for each pair of processes, the differences of its blocks.
        slower_by: what is to be told from "as fast"; 0.03 is 3 %.
    """
    judged = [blocks for blocks in rounds if len(blocks) >= FEWEST_BLOCKS]
    if not judged:
        return None
    found = [median_and_error(blocks) for blocks in judged]
    weights = [1 / (error**2 + PROCESS_SD**2) for _, error in found]
    known = sum(weights)
    mean = sum(w * median for w, (median, _) in zip(weights, found, strict=True)) / known
    scatter = sum(w * (median - mean) ** 2 for w, (median, _) in zip(weights, found, strict=True))
    error = math.sqrt(max(1.0, scatter / max(len(found) - 1, 1)) / known)
    freedom = sum(math.sqrt(len(blocks)) for blocks in judged)
    gap = math.log1p(slower_by)
    as_fast, slower = mean / error, (mean - gap) / error
    if abs(mean) > FAR * gap and len(judged) > 1:
        as_fast, slower = max(as_fast, 0.0), min(slower, 0.0)
    log_odds = (freedom + 1) / 2 * math.log((1 + as_fast**2 / freedom) / (1 + slower**2 / freedom))
    half = _t95(freedom) * error
    return Comparison(
        slowdown=math.expm1(mean),
        low=math.expm1(mean - half),
        high=math.expm1(mean + half),
        odds=math.exp(min(max(log_odds, -700.0), 700.0)),
        verdict=_verdict(log_odds),
    )


def _t95(freedom: float) -> float:
    """Half the width of Student's 95 % interval (Cornish and Fisher's expansion: to 1 % from 4
    degrees of freedom on)."""
    z = 1.959964
    first = (z**3 + z) / (4 * freedom)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return z + first + second


def _verdict(log_odds: float) -> Verdict:
    if abs(log_odds) < math.log(SURE):
        return "undecided"
    return "slower" if log_odds > 0 else "not slower"
