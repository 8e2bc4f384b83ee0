"""Which crosses a log has rows for: combinations that say more than their features by themselves.

The training rows are cut into halves. A model without interactions predicts the clicks; what it
leaves unexplained of a combination must be alike in both halves. For noise, the score is as often
below 0 as above, with a standard deviation of 1, and one of 4,000 is beyond `SURELY`. Crosses of
few combinations never score so high: a dot product is enough for them.

All pairs are scored, and the best of them with every third feature.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainmark.workloads.dlrm.crosses import CROSS_ROWS, crossed
from trainmark.workloads.dlrm.data import row_source
from trainmark.workloads.dlrm.runs import DlrmRun, is_generated

SURELY = 3.5
MOST = 6
"""Crosses of a log; and pairs that are tried with a third feature."""
MOST_FEATURES = 64
"""Beyond which there are too many pairs to try."""
ROUNDS, PRIOR_ROWS = 8, 5.0

Cross = tuple[int, ...]
Ids = Sequence[NDArray[np.integer]]
Floats = NDArray[np.float64]


def of_run(cfg: DlrmRun) -> tuple[str, ...]:
    """The crosses that a run's training rows show, as --model.crosses has them."""
    if is_generated(cfg.data) or cfg.model.has_bags:
        return ()
    source = row_source(cfg, "train")
    rows = source.kind.room(source.num_rows)
    source.read(0, source.num_rows, rows)
    return tuple("x".join(map(str, cross)) for cross in choose(rows.ids, rows.labels))


def choose(ids: Ids, labels: NDArray[np.bool_]) -> list[Cross]:
    """The best crosses, of which each is surely one.

    Args:
        ids: of each feature, of the training rows in a random order.
        labels: of the same rows.
    """
    if not 2 <= len(ids) <= MOST_FEATURES or labels.all() or not labels.any():
        return []
    wide, rest = [column.astype(np.int64) for column in ids], unexplained(ids, labels)
    pairs = _scored(wide, rest, itertools.combinations(range(len(ids)), 2))
    best = sorted(pairs, key=lambda pair: -pairs[pair])[:MOST]
    more = {tuple(sorted({*pair, third})) for pair in best for third in range(len(ids))}
    scores = pairs | _scored(wide, rest, sorted(more - set(pairs)))
    found = sorted(scores, key=lambda cross: -scores[cross])[:MOST]
    return [cross for cross in found if scores[cross] > SURELY]


def unexplained(ids: Ids, labels: NDArray[np.bool_]) -> Floats:
    """What is left of each click by a logistic regression on all features' ids.

    It is fitted feature by feature, with scikit-learn's default penalty.
    """
    clicks = labels.astype(np.float64)
    mean = clicks.mean()
    logits = np.full(len(clicks), np.log(mean / (1 - mean)))
    weights = [np.zeros(int(column.max(initial=0)) + 1) for column in ids]
    for _ in range(ROUNDS):
        for column, of_ids in zip(ids, weights, strict=True):
            chances = 1 / (1 + np.exp(-logits))
            slope = np.bincount(column, clicks - chances, len(of_ids)) - of_ids
            step = slope / (np.bincount(column, chances * (1 - chances), len(of_ids)) + 1)
            of_ids += step
            logits += step[column]
    return clicks - 1 / (1 + np.exp(-logits))


def _scored(ids: Ids, rest: Floats, crosses: Iterable[Cross]) -> dict[Cross, float]:
    return {cross: score(crossed([ids[feature] for feature in cross]), rest) for cross in crosses}


def score(rows: NDArray[np.int64], rest: Floats) -> float:
    """How surely a cross says more: whether what is left is alike in both halves of its rows.

    The products of what is left in both halves have a mean of 0 where it is noise. So their sum is
    measured by its own standard deviation; rows that are hardly ever used weigh little.
    """
    middle = len(rest) // 2
    (sums, counts), (others, of_others) = (
        _sums(rows[part], rest[part]) for part in (slice(middle), slice(middle, None))
    )
    products = sums * others / (counts + of_others + PRIOR_ROWS)
    deviation = np.sqrt((products**2).sum())
    return float(products.sum() / deviation) if deviation > 0 else 0.0


def _sums(rows: NDArray[np.int64], rest: Floats) -> tuple[Any, Any]:
    """For each row of a cross: what is unexplained of its clicks, and how often it occurs."""
    return np.bincount(rows, rest, CROSS_ROWS), np.bincount(rows, minlength=CROSS_ROWS)
