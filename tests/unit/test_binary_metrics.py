"""Metrics with their uncertainty: against scikit-learn, scipy, brute force, and repeated draws."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import binomtest
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score
from torch import Tensor

from trainmark import metrics
from trainmark.metrics import binary, ranking


def clicks(seed: int, rows: int, rate: float = 0.2) -> tuple[Tensor, Tensor]:
    """Logits with some ties, and labels that they are calibrated for."""
    random = np.random.default_rng(seed)
    logits = np.round(random.normal(np.log(rate / (1 - rate)), 1.0, rows) * 20) / 20
    labels = random.random(rows) < 1 / (1 + np.exp(-logits))
    labels[:2], labels[-2:] = True, False
    return torch.from_numpy(logits.astype(np.float32)), torch.from_numpy(labels)


def assess(scores: Tensor, labels: Tensor, groups: Tensor | None = None) -> binary.Assessment:
    found = binary.assess(scores, labels, groups)
    assert found is not None
    return found


def wins(scores: Tensor, labels: Tensor) -> NDArray[np.float64]:
    """Of each positive against each other: 1, 1/2 or 0."""
    positives, others = scores[labels].numpy(), scores[~labels].numpy()
    return (positives[:, None] > others) + 0.5 * (positives[:, None] == others)


# --- AUC


def delongs_variance(won: NDArray[np.float64]) -> float:
    """By its definition, of an AUC or of a difference of two."""
    return sum(won.mean(axis).var(ddof=1) / won.shape[1 - axis] for axis in (0, 1))


@pytest.mark.parametrize("rows", [5, 60, 700])
def test_the_error_of_an_auc_is_delongs(rows: int) -> None:
    scores, labels = clicks(1, rows)
    won = wins(scores, labels)
    levels = ranking.levels(scores, labels)
    assert ranking.auc_error(levels) == pytest.approx(delongs_variance(won) ** 0.5, rel=1e-9)
    by_positive, by_other = ranking.row_placements(levels, scores, labels)
    np.testing.assert_allclose(by_positive.numpy(), won.mean(1), rtol=1e-12)
    np.testing.assert_allclose(by_other.numpy(), won.mean(0), rtol=1e-12)


def test_an_auc_without_fault_has_no_interval() -> None:
    """Not one of no width: seven positives do not show that all others are above, too."""
    labels = torch.arange(4000) < 7
    found = binary.assess(torch.where(labels, 5.0, -5.0), labels)
    assert found is not None
    assert found.auc == ranking.Estimate(value=1.0)
    same = ranking.levels(torch.zeros(4000), labels)  # an AUC of 0.5, whatever the rows
    assert ranking.auc_error(same) == 0


def test_the_error_of_a_difference_of_aucs_is_delongs_paired_one() -> None:
    a, labels = clicks(2, 500)
    b = a + 0.5 * torch.randn(500, generator=torch.Generator().manual_seed(3))
    found = binary.difference(a, b, labels).auc
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    expected = delongs_variance(wins(b, labels) - wins(a, labels)) ** 0.5
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * expected, rel=1e-4)
    truth = roc_auc_score(labels, b) - roc_auc_score(labels, a)
    assert found.value == pytest.approx(truth, abs=1e-12)
    alone = ranking.auc_error(ranking.levels(a, labels))
    assert alone is not None
    assert expected < alone


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """400 samples of 300 rows: the AUC and the log loss of a very large one lie inside in 95 %."""
    logits, labels = clicks(4, 2_000_000)
    truth = metrics.binary_metrics(logits, labels)
    generator = torch.Generator().manual_seed(5)
    inside = np.zeros(3)
    for _ in range(400):
        rows = torch.randint(len(logits), (300,), generator=generator)
        found = assess(logits[rows], labels[rows])
        pairs = [
            (found.auc, "auc"),
            (found.log_loss, "log_loss"),
            (found.calibration, "calibration"),
        ]
        for place, (estimate, name) in enumerate(pairs):
            assert estimate is not None
            assert estimate.low is not None
            assert estimate.high is not None
            value = truth[name]
            assert value is not None
            inside[place] += estimate.low <= value <= estimate.high
    assert ((inside >= 365) & (inside <= 395)).all(), inside  # 380 are expected, +- 4.4


def test_the_interval_of_an_auc_stays_within_what_is_possible() -> None:
    scores = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.4, 0.5])
    labels = torch.tensor([False, False, False, True, True, True])
    found = assess(scores, labels)
    assert found.auc is not None
    assert found.auc.value == pytest.approx(7 / 9)
    assert found.auc.high == 1.0


# --- the other metrics


@pytest.mark.parametrize("rows", [10, 5000])
def test_log_loss_average_precision_and_entropy(rows: int) -> None:
    logits, labels = clicks(6, rows)
    found = assess(logits, labels)
    predictions = torch.sigmoid(logits.double()).numpy()
    cheap = metrics.binary_metrics(logits, labels)
    assert found.auc is not None
    assert found.calibration is not None
    assert (found.auc.value, found.log_loss.value) == (cheap["auc"], cheap["log_loss"])
    assert found.calibration.value == pytest.approx(cheap["calibration"], rel=1e-12)
    assert (found.rows, found.positives) == (rows, int(labels.sum()))
    assert found.pr_auc == pytest.approx(average_precision_score(labels, logits), abs=1e-12)
    constant = np.full(rows, labels.double().mean())
    assert found.normalised_entropy == pytest.approx(
        log_loss(labels, predictions) / log_loss(labels, constant), rel=1e-9
    )
    losses = -np.log(np.where(labels.numpy(), predictions, 1 - predictions))
    half = 1.959964 * losses.std(ddof=1) / np.sqrt(rows)
    assert found.log_loss.high == pytest.approx(losses.mean() + half, rel=1e-6)


def test_bins_are_quantiles_of_the_predictions() -> None:
    logits, labels = clicks(7, 3000)
    logits += torch.rand(3000, generator=torch.Generator().manual_seed(0)) / 50  # no ties
    found = assess(logits, labels)
    order = torch.argsort(logits)
    assert len(found.bins) == binary.BINS
    distance = 0.0
    for part, one in zip(np.array_split(order.numpy(), binary.BINS), found.bins, strict=True):
        predicted = torch.sigmoid(logits.double())[part].mean().item()
        positives = int(labels[part].sum())
        assert one.rows == len(part) == 200
        assert one.prediction == pytest.approx(predicted, rel=1e-12)
        wilson = binomtest(positives, len(part)).proportion_ci(method="wilson")
        assert one.rate.value == positives / len(part)
        assert (one.rate.low, one.rate.high) == pytest.approx((wilson.low, wilson.high), rel=1e-9)
        distance += abs(predicted - positives / len(part)) / binary.BINS
    assert found.calibration_error == pytest.approx(distance, rel=1e-9)


def test_rows_of_one_prediction_stay_in_one_bin() -> None:
    logits = torch.tensor([-1.0] * 700 + [0.5] * 300)
    labels = torch.arange(1000) % 3 == 0
    found = assess(logits, labels)
    assert [one.rows for one in found.bins] == [700, 300]


@pytest.mark.parametrize(("count", "rows"), [(0, 5), (5, 5), (1, 1000)])
def test_shares_at_the_ends_have_wilsons_interval(count: int, rows: int) -> None:
    found = binary.share(count, rows)
    wilson = binomtest(count, rows).proportion_ci(method="wilson")
    assert (found.low, found.high) == pytest.approx((wilson.low, wilson.high), abs=1e-12)


@pytest.mark.parametrize("label", [True, False])
def test_one_class_leaves_undefined_what_needs_two(label: bool) -> None:
    found = assess(torch.randn(20), torch.full((20,), label), torch.arange(20) % 3)
    assert found.auc is None
    assert found.normalised_entropy is None
    assert found.group_auc is None
    assert (found.pr_auc is None) == (found.calibration is None) == (not label)


def test_few_rows_have_no_interval_and_none_no_assessment() -> None:
    found = assess(torch.tensor([0.5, -0.5]), torch.tensor([True, False]))
    assert found.auc is not None
    assert (found.auc.value, found.auc.low, found.auc.high) == (1.0, None, None)
    assert binary.assess(torch.empty(0), torch.empty(0)) is None


# --- groups


def test_the_auc_within_groups_weighs_them_by_their_rows() -> None:
    scores, labels = clicks(8, 4000, rate=0.1)
    sizes = np.random.default_rng(9).zipf(1.6, 4000) % 300
    groups = torch.from_numpy(sizes.astype(np.int32) * 7 - 40)  # numbers need not be consecutive
    found = ranking.group_auc(scores, labels, groups)
    assert found is not None
    aucs, weights, left_out = [], [], 0
    for name in np.unique(groups.numpy()):
        rows = groups == name
        if labels[rows].all() or not labels[rows].any():
            left_out += 1
            continue
        aucs.append(roc_auc_score(labels[rows], scores[rows]))
        weights.append(int(rows.sum()))
    assert left_out > 0
    assert len(aucs) > 20
    assert (found.groups, found.groups_left_out, found.rows) == (len(aucs), left_out, sum(weights))
    mean = np.average(aucs, weights=weights)
    assert found.auc.value == pytest.approx(mean, abs=1e-12)
    random = np.random.default_rng(10)
    draws = random.integers(0, len(aucs), (4000, len(aucs)))
    again = (np.array(aucs) * weights)[draws].sum(1) / np.array(weights)[draws].sum(1)
    assert found.auc.low is not None
    assert found.auc.high is not None
    error = (found.auc.high - found.auc.low) / 2 / 1.96
    assert error == pytest.approx(again.std(), rel=0.25)  # the bootstrap over groups


# --- differences and importance


def test_the_difference_in_log_loss_is_that_of_each_row() -> None:
    a, labels = clicks(11, 900)
    b = 0.8 * a
    found = binary.difference(a, b, labels).log_loss
    y = labels.numpy()
    of_rows = [
        -np.log(np.where(y, p, 1 - p))
        for p in (torch.sigmoid(logits.double()).numpy() for logits in (a, b))
    ]
    rows = of_rows[1] - of_rows[0]
    half = 1.959964 * rows.std(ddof=1) / 30
    assert found.value == pytest.approx(rows.mean(), rel=1e-9)
    assert (found.low, found.high) == pytest.approx((rows.mean() - half, rows.mean() + half), 1e-6)


def test_equal_scores_do_not_differ() -> None:
    a, labels = clicks(12, 100)
    found = binary.difference(a, a, labels)
    assert found.auc == binary.Estimate(value=0.0, low=0.0, high=0.0)
    assert found.log_loss == binary.Estimate(value=0.0, low=0.0, high=0.0)


def test_importance_is_the_mean_drop_with_its_error() -> None:
    """The error is that of other rows, as the spread over many draws of them shows."""
    random = np.random.default_rng(0)

    def found(repeats: int) -> binary.Importance:
        scores, labels = clicks(int(random.integers(1 << 30)), 400)

        def placed(values: torch.Tensor) -> ranking.Placements:
            return ranking.row_placements(ranking.levels(values, labels), values, labels)

        orders = [torch.from_numpy(random.permutation(len(scores))) for _ in range(repeats)]
        permuted = [placed(scores[order]) for order in orders]
        usual = ranking.auc(scores, labels)
        cost = [usual - ranking.auc(scores[order], labels) for order in orders]  # type: ignore[operator]
        of_user = binary.importance_of("user", placed(scores), permuted)
        assert of_user.drop == pytest.approx(np.mean(cost))
        return of_user

    for repeats in (1, 5):
        drawn = [found(repeats) for _ in range(200)]
        mean_error = np.mean([column.error for column in drawn if column.error is not None])
        assert mean_error == pytest.approx(np.std([column.drop for column in drawn]), rel=0.15)
