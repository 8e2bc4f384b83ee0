"""Every formula of a reported number, once. `docs/metrics.md` explains each.

This file has speed, targets and losses.

ranking.py   how well scores order two classes: AUC, its error, PR-AUC, AUC within groups
binary.py    metrics of yes-or-no predictions, with intervals; paired differences
slowdown.py  whether steps take longer, from two processes that took turns

No torch at the top: `metrics` is read by verbs that must answer at once.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from trainmark.metrics.binary import binary_metrics as binary_metrics
from trainmark.metrics.ranking import auc as auc

# --- speed


def throughput(samples: int, seconds: float) -> float | None:
    """Samples per second; None where nothing was measured."""
    return samples / seconds if samples > 0 and seconds > 0 else None


def ratio(a: float | None, b: float | None) -> float | None:
    """a over b; None where one is not known, or nothing was measured."""
    return a / b if a is not None and b else None


def cost(seconds: float, price_per_hour: float) -> float:
    """The price of a machine that is paid by time."""
    return seconds / 3600 * price_per_hour


def grams_co2(joules: float, grams_per_kwh: float) -> float:
    """The CO2 of so much electricity."""
    return joules / 3.6e6 * grams_per_kwh


def latency_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median and tail of how long requests took.

    A percentile that falls between two requests lies linearly between them, as in published ones.
    """
    import numpy as np

    median, p90, p95, p99 = np.percentile(seconds, [50, 90, 95, 99]) * 1e3
    found = {"mean": np.mean(seconds) * 1e3, "median": median, "p90": p90, "p95": p95, "p99": p99}
    return {f"{name}_ms": float(value) for name, value in found.items()}


def mfu(flops: float, seconds: float, devices: int, peak_flops: float) -> float:
    """Model FLOPs utilisation: the arithmetic the model needs, over what the devices could do."""
    return flops / (seconds * devices * peak_flops)


def relative_error(predicted: float | None, measured: float | None) -> float | None:
    """The share by which a prediction was too high; None if either number is missing."""
    if predicted is None or not measured:
        return None
    return predicted / measured - 1


def evaluation_steps(steps_per_epoch: int, evals_per_epoch: int) -> frozenset[int]:
    """Zero-based steps of an epoch after which to evaluate: evenly spaced, the last step included.

    For example 64,013 steps and 2 evaluations give steps 32,006 and 64,012.
    """
    last = steps_per_epoch - 1
    count = min(evals_per_epoch, 2 * last + 1)  # already after every step
    return frozenset(round(i * last / count) for i in range(1, count + 1))


# --- quality


def classification_metrics(correct: float, loss: float, count: float) -> dict[str, float | None]:
    """Accuracy and mean loss from sums over all samples."""
    if count == 0:
        return {"accuracy": None, "loss": None}
    return {"accuracy": correct / count, "loss": loss / count}


def guessing_error(positives: int, negatives: int) -> float:
    """The standard error of an AUC around 0.5, where scores say nothing (Mann and Whitney's)."""
    return math.sqrt((positives + negatives + 1) / (12 * positives * negatives))


def share_of_excess(best_auc: float, share: float) -> float:
    """The AUC that has this share of the best possible model's excess over guessing (0.5)."""
    return 0.5 + share * (best_auc - 0.5)


def reached(value: float | None, target: float | None, better: str) -> bool | None:
    """Whether a quality target is met; None without a target."""
    if target is None:
        return None
    if value is None or math.isnan(value):
        return False
    return value >= target if better == "higher" else value <= target


def improves(value: float | None, best: float | None, better: str) -> bool:
    """Whether a value is better than the best one before it; an undefined value never is."""
    if value is None or not math.isfinite(value):
        return False
    if best is None:
        return True
    return value > best if better == "higher" else value < best


STILL_RISING = 0.01
"""Of what an AUC lacked to 1 in the first half of a run: a gain of less says nothing."""


def still_rising(aucs: Sequence[float]) -> tuple[float, float] | None:
    """The best AUC in the first half of a run's evaluations, and the last one, if that is clearly
    better than all before; else None."""
    if len(aucs) < 4:
        return None
    *earlier, last = aucs
    early = max(aucs[: len(aucs) // 2])
    gained = last - early >= STILL_RISING * (1 - early) and last > max(earlier)
    return (early, last) if gained else None


PARTS_OF_CURVE = 10
CLEAR_RISE_ERRORS = 4  # standard errors: the lowest of nine means lies below the others by chance
CLEAR_RISE_SHARE = 0.05  # of the lowest mean
CLEAR_RISE_FALL = 0.02  # of what the loss fell before: losses near 0 vary by more than they are


def risen_loss(losses: Sequence[float]) -> tuple[float, float] | None:
    """Cut a loss curve into tenths; if the last mean is clearly above the lowest, return (lowest,
    last).

    None if the loss did not rise, or if there are too few steps to tell.
    """
    count = len(losses)
    if count < 2 * PARTS_OF_CURVE:
        return None
    cuts = [count * part // PARTS_OF_CURVE for part in range(PARTS_OF_CURVE + 1)]
    parts = [losses[start:stop] for start, stop in itertools.pairwise(cuts)]
    first, *_, last = means = [statistics.fmean(part) for part in parts]
    lowest = min(means)
    low_part = parts[means.index(lowest)]
    errors = [statistics.variance(part) / len(part) for part in (low_part, parts[-1])]
    clear = max(
        CLEAR_RISE_ERRORS * math.sqrt(sum(errors)),
        CLEAR_RISE_SHARE * abs(lowest),
        CLEAR_RISE_FALL * (first - lowest),
    )
    return (lowest, last) if last - lowest > clear else None


def explained_share(groups: Sequence[Sequence[float]]) -> float | None:
    """The share of the variance that lies between groups, less what chance would put there (epsilon
    squared of a one-way analysis of variance); at least 0.

    None unless there are two groups or more, and more values than groups.
    """
    values = [value for group in groups for value in group]
    between, within = len(groups) - 1, len(values) - len(groups)
    if between < 1 or within < 1:
        return None
    mean = statistics.fmean(values)
    total = sum((value - mean) ** 2 for value in values)
    if total == 0:
        return 0.0
    inside = sum((value - statistics.fmean(group)) ** 2 for group in groups for value in group)
    return max(0.0, 1 - inside / within * (between + within) / total)


def mean_relative_error(values: Sequence[float], references: Sequence[float]) -> float:
    """Mean of |value - reference| / |reference|, the published measure of loss alignment."""
    pairs = list(zip(values, references, strict=True))
    return sum(abs(v - r) / abs(r) for v, r in pairs) / len(pairs)


# --- changes

CLEAR_CHANGE = 4  # times the median of the earlier changes: about 2.7 of their standard deviations
KNOWN_NOISE = 2  # earlier changes, of which the median tells what is usual
UNKNOWN_NOISE = 5  # times the smallest change worth telling, with fewer


def clear_change(values: Sequence[float], smallest: float) -> float | None:
    """The change of the last value from the one before it, as a share of that one, if it is clear.

    It is clear above `smallest` and above `CLEAR_CHANGE` times the median of the earlier changes;
    with too few values to know that, above `UNKNOWN_NOISE` times `smallest`. None for a change
    within the noise, or from nothing or 0.
    """
    if len(values) < 2 or values[-2] == 0:
        return None
    *earlier, last = [(b - a) / abs(a) for a, b in itertools.pairwise(values) if a]
    if len(earlier) < KNOWN_NOISE:
        limit = UNKNOWN_NOISE * smallest
    else:
        limit = max(smallest, CLEAR_CHANGE * statistics.median(map(abs, earlier)))
    return last if abs(last) > limit else None
