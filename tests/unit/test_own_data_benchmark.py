"""benchmarks/own_data.py on one small set, and what it makes of scores."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from benchmarks import own_data
from benchmarks.own_data import Scores
from benchmarks.own_data_sets import LABEL, Set, Table, planted_log


def scores(*of_splits: tuple[float, float, float]) -> list[Scores]:
    return [Scores(10, *aucs, prepare_s=1.0, train_s=2.0, train_cpu_s=2.0) for aucs in of_splits]


def test_one_split_of_a_small_set() -> None:
    """All three learn a log of 1,500 rows a little."""
    chosen = Set(lambda: planted_log(1500, 0.5, 0, ids=(5, 4, 3), interactions=0.0), 0.3)
    found = own_data.run_split(chosen, 0)
    aucs = (found.trainmark, found.logistic_regression, found.gradient_boosting)
    assert all(0.55 < auc < 0.95 for auc in aucs)
    row = own_data.row_of("small", chosen, [found])
    assert (row["rows"], row["standard_error"], row["seconds"]) == (1500, None, found.train_s)
    assert f"{found.trainmark:.4f}" in own_data.table([row])


def test_too_few_clicks_are_refused() -> None:
    with pytest.raises(ValueError, match="test clicks are too few"):
        own_data.run_split(Set(lambda: planted_log(500, 0.5, 0)), 0)


def test_a_set_is_compared_with_the_better_baseline() -> None:
    """By its mean over the splits; two standard errors of the paired difference are allowed."""
    row = own_data.row_of(
        "", Set(lambda: planted_log(10, 0.5, 0)), scores((0.7, 0.6, 0.70), (0.7, 0.8, 0.72))
    )
    differences = [0.0, -0.02]  # boosting's mean is 0.71, that of the other 0.7
    assert row["difference"] == pytest.approx(np.mean(differences))
    assert row["standard_error"] == pytest.approx(stats.sem(differences))
    assert row["holds"]  # -0.01 + 2 x 0.01


@pytest.mark.parametrize(("ours", "holds"), [(0.6951, True), (0.6949, False)])
def test_half_a_hundredth_is_allowed(ours: float, holds: bool) -> None:
    row = own_data.row_of(
        "", Set(lambda: planted_log(10, 0.5, 0)), scores((ours, 0.7, 0.6), (ours, 0.7, 0.6))
    )
    assert row["holds"] == holds


def test_boosting_groups_what_is_beyond_its_categories() -> None:
    """A column of 1,000 values, of which each frequent one says all."""
    random = np.random.default_rng(0)
    ids = np.concatenate([random.integers(0, 20, 3000), random.integers(20, 1000, 3000)])
    rows = pd.DataFrame({LABEL: ids % 2 == 0, "id": ids})
    table = Table(rows, [])
    assert 0.7 < own_data.score_gradient_boosting(table, table) < 1.0
