"""The generated click log: always the same, as hard as promised, and not linear."""

import numpy as np
import pytest
import scipy.sparse
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from trainmark.clickdata.numerical import MISSING, log_transform
from trainmark.clickdata.planted import (
    BLOCK_ROWS,
    CARDINALITIES,
    FLOAT32_VALUES,
    MAX_COUNT,
    PlantedClicks,
    Rows,
)


def assert_equal(a: Rows, b: Rows) -> None:
    for name in ("labels", "numerical", "categorical", "probability"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


@pytest.fixture(scope="module")
def log() -> PlantedClicks:
    return PlantedClicks(seed=0)


@pytest.fixture(scope="module")
def rows(log: PlantedClicks) -> Rows:
    return log.rows(0, 3 * BLOCK_ROWS)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_click_rate_and_best_auc_are_as_promised(seed: int) -> None:
    log = PlantedClicks(seed=seed)
    assert 0.75 <= log.best_auc(0, 2 * BLOCK_ROWS) <= 0.85
    assert 0.17 <= log.rows(0, BLOCK_ROWS).labels.mean() <= 0.23


def test_any_range_is_the_same_wherever_it_starts(rows: Rows) -> None:
    start, stop = BLOCK_ROWS - 5, 2 * BLOCK_ROWS + 7
    part = PlantedClicks(seed=0).rows(start, stop)
    expected = Rows(
        labels=rows.labels[start:stop],
        numerical=rows.numerical[start:stop],
        categorical=rows.categorical[:, start:stop],
        probability=rows.probability[start:stop],
    )
    assert_equal(part, expected)


def test_blocks_are_the_rows_in_pieces(log: PlantedClicks) -> None:
    start, stop = 100, BLOCK_ROWS + 50
    pieces = list(log.blocks(start, stop))
    assert [len(piece) for piece in pieces] == [BLOCK_ROWS - 100, 50]
    labels = np.concatenate([piece.labels for piece in pieces])
    np.testing.assert_array_equal(labels, log.rows(start, stop).labels)


def test_neighbouring_blocks_and_other_seeds_differ(rows: Rows) -> None:
    other_seed = PlantedClicks(seed=1).rows(0, 1000)
    for other in (rows.categorical[:, BLOCK_ROWS : BLOCK_ROWS + 1000], other_seed.categorical):
        assert (rows.categorical[:, :1000] == other).mean() < 0.5


def test_labels_are_drawn_from_the_probabilities(rows: Rows) -> None:
    order = np.argsort(rows.probability)
    for tenth in np.array_split(order, 10):
        error = abs(rows.labels[tenth].mean() - rows.probability[tenth].mean())
        assert error < 5 * 0.5 / np.sqrt(len(tenth))


def test_best_auc_agrees_with_scikit_learn(rows: Rows) -> None:
    counts = rows.counts
    assert counts.auc == pytest.approx(roc_auc_score(rows.labels, rows.probability), abs=1e-4)
    assert counts.clicks.sum() == rows.labels.sum()
    assert counts.rows == len(rows)


def test_best_auc_of_one_class_is_undefined(rows: Rows) -> None:
    clicks = rows.labels
    only_clicks = Rows(
        labels=clicks[clicks],
        numerical=rows.numerical[clicks],
        categorical=rows.categorical[:, clicks],
        probability=rows.probability[clicks],
    )
    assert np.isnan(only_clicks.counts.auc)


def test_columns_look_like_criteos(log: PlantedClicks, rows: Rows) -> None:
    assert rows.categorical.shape == (26, len(rows))
    assert rows.numerical.shape == (len(rows), 13)
    cardinalities = np.array(log.cardinalities)
    assert (rows.categorical.max(axis=1) < cardinalities).all()
    assert (rows.categorical.min(axis=1) >= 0).all()
    present = rows.numerical[rows.numerical != MISSING]
    assert present.min() == -2
    assert present.max() <= MAX_COUNT
    assert 0 < (rows.numerical == MISSING).mean() < 0.5
    assert 0 < (rows.categorical == 0).mean() < 0.1


def test_values_follow_a_power_law(log: PlantedClicks, rows: Rows) -> None:
    """Value number k has a probability near 1 / k, in every large column."""
    for column in np.flatnonzero(np.array(log.cardinalities) >= 1000):
        counts = np.bincount(rows.categorical[column])
        for k in (1, 2, 4, 8):
            expected = np.log1p(1 / k) / np.log1p(1 / (2 * k))
            assert counts[k] / counts[2 * k] == pytest.approx(expected, rel=0.15)


def test_the_rarest_values_of_a_large_column_are_as_frequent_as_promised() -> None:
    log = PlantedClicks(seed=1, cardinalities=(40_000_000, 3, 3), num_numerical=0)
    ids = log.rows(0, 8 * BLOCK_ROWS).categorical[0]
    rare = ids[ids >= 1 << 24]  # beyond, float32 has even numbers alone
    share = np.log(40_000_000 / (1 << 24)) / np.log(40_000_000) * (ids > 0).mean()
    expected = share * len(ids)
    assert len(rare) == pytest.approx(expected, abs=5 * np.sqrt(expected))
    assert (rare % 2).mean() == pytest.approx(0.5, abs=2.5 / np.sqrt(len(rare)))
    # Two draws are equal as often as chance has it, where value k has a probability of 1 / k.
    repeated = len(rare) - len(np.unique(rare))
    pairs, spread = expected**2 / 2, np.log(40_000_000 / (1 << 24))
    chance = pairs * (1 / (1 << 24) - 1 / 40_000_000) / spread**2
    assert repeated <= chance + 5 * np.sqrt(chance)
    assert ids.max() < 40_000_000


def test_the_demos_columns_are_what_they_always_were() -> None:
    """Columns that are larger draw other numbers."""
    assert max(CARDINALITIES) <= FLOAT32_VALUES


def test_raw_values_of_a_column_are_distinct(log: PlantedClicks) -> None:
    ids = np.arange(20000, dtype=np.int32)
    assert len(np.unique(log.values(3, ids))) == len(ids)
    assert (log.values(3, ids) != log.values(4, ids)).all()


@pytest.mark.parametrize(
    ("cardinalities", "num_numerical"), [((5, 2, 40_000_000), 0), ((3,), 2), ((), 1)]
)
def test_other_shapes(cardinalities: tuple[int, ...], num_numerical: int) -> None:
    log = PlantedClicks(seed=1, cardinalities=cardinalities, num_numerical=num_numerical)
    rows = log.rows(0, BLOCK_ROWS)
    assert rows.categorical.shape == (len(cardinalities), BLOCK_ROWS)
    assert rows.numerical.shape == (BLOCK_ROWS, num_numerical)
    for ids, cardinality in zip(rows.categorical, cardinalities, strict=True):
        assert 0 <= ids.min() <= ids.max() < cardinality
        assert ids.max() > 0.9 * (cardinality - 1)
    assert 0.7 < log.best_auc(0, BLOCK_ROWS) < 0.85


def test_log_transform() -> None:
    values = np.array([MISSING, -4, -3, -2, 0, 2**31 - 1], np.int32)
    expected = [0, 0, 0, 0, np.log(3), np.log(2**31 + 2)]
    found = log_transform(values)
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, np.array(expected, np.float16))


def test_a_logistic_regression_stays_under_80_percent_of_the_excess(log: PlantedClicks) -> None:
    train, test = log.rows(0, 200_000), log.rows(300_000, 350_000)
    model = LogisticRegression(C=0.01, tol=3e-3).fit(one_hot(log, train), train.labels)
    linear = roc_auc_score(test.labels, model.decision_function(one_hot(log, test)))
    best = roc_auc_score(test.labels, test.probability)
    # The lower bound shows that it has learned what a linear model can.
    assert 0.6 < (linear - 0.5) / (best - 0.5) < 0.75


def one_hot(log: PlantedClicks, rows: Rows) -> scipy.sparse.csr_matrix:
    offsets = np.cumsum([0, *log.cardinalities])
    columns = (rows.categorical + offsets[:-1, None]).T
    starts = np.arange(0, columns.size + 1, columns.shape[1])
    shape = (len(rows), offsets[-1])
    ones = np.ones(columns.size, np.float32)
    categorical = scipy.sparse.csr_matrix((ones, columns.ravel(), starts), shape)
    numerical = log_transform(rows.numerical).astype(np.float32)
    return scipy.sparse.hstack([categorical, scipy.sparse.csr_matrix(numerical)]).tocsr()


@pytest.mark.parametrize("cardinality", [2, 3, 50, 10_000])
def test_uniform_ids_are_equally_frequent(cardinality: int) -> None:
    log = PlantedClicks(seed=3, cardinalities=(cardinality, 40, 40), ids="uniform")
    ids = log.rows(0, 65536).categorical[0]
    counts = np.bincount(ids, minlength=cardinality)[1:]
    assert ids.max() < cardinality
    # A chi-square of a fair draw has mean cardinality - 2 and standard deviation sqrt(2 x that).
    expected = counts.sum() / len(counts)
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    degrees = len(counts) - 1
    assert abs(chi_square - degrees) <= 5 * np.sqrt(2 * degrees)


def test_without_a_signal_nothing_can_be_learned() -> None:
    log = PlantedClicks(seed=3, signal=False)
    rows = log.rows(0, 65536)
    assert len(np.unique(rows.probability)) == 1
    assert rows.labels.mean() == pytest.approx(rows.probability[0], abs=0.01)
    assert log.best_auc(0, 65536) == pytest.approx(0.5)
