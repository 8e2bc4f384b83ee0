"""Every formula against scikit-learn or float64 numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score

from trainmark import metrics


def draw(seed: int, rows: int, levels: int | None, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Logits (with few levels: heavy ties) and labels that follow them a little."""
    random = np.random.default_rng(seed)
    logits = random.standard_normal(rows) * 2
    if levels is not None:
        logits = np.round(logits * levels) / levels
    labels = random.random(rows) < rate * (1 + 0.5 * np.tanh(logits))
    labels[0], labels[-1] = True, False
    return logits.astype(np.float32), labels


@pytest.mark.parametrize("rows", [2, 3, 1000, 100_003])
@pytest.mark.parametrize("levels", [None, 10, 1])
@pytest.mark.parametrize("rate", [0.03, 0.5])
def test_binary_metrics_match_scikit_learn(rows: int, levels: int | None, rate: float) -> None:
    logits, labels = draw(rows, rows, levels, rate)
    found = metrics.binary_metrics(torch.from_numpy(logits), torch.from_numpy(labels))
    wide = logits.astype(np.float64)
    probabilities = 1 / (1 + np.exp(-wide))
    assert found["auc"] == pytest.approx(roc_auc_score(labels, wide), abs=1e-6)
    assert found["log_loss"] == pytest.approx(log_loss(labels, probabilities), abs=1e-6)
    assert found["accuracy"] == pytest.approx(accuracy_score(labels, wide > 0), abs=1e-12)
    assert found["calibration"] == pytest.approx(probabilities.mean() / labels.mean(), rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=40).filter(
        lambda pairs: len({label for _, label in pairs}) == 2
    )
)
def test_auc_with_ties_is_the_share_of_ordered_pairs(pairs: list[tuple[int, bool]]) -> None:
    scores = torch.tensor([float(score) for score, _ in pairs])
    labels = torch.tensor([label for _, label in pairs])
    wins = [
        1.0 if s > t else 0.5 if s == t else 0.0
        for s, clicked in pairs
        if clicked
        for t, other in pairs
        if not other
    ]
    assert metrics.auc(scores, labels) == pytest.approx(sum(wins) / len(wins), abs=1e-12)


@pytest.mark.parametrize("label", [True, False])
def test_auc_of_one_class_is_undefined(label: bool) -> None:
    logits, labels = torch.randn(10), torch.full((10,), label)
    found = metrics.binary_metrics(logits, labels)
    assert found["auc"] is None
    assert found["log_loss"] is not None
    assert (found["calibration"] is None) == (not label)


def test_metrics_of_no_rows_are_undefined() -> None:
    found = metrics.binary_metrics(torch.empty(0), torch.empty(0))
    assert set(found) == {"auc", "log_loss", "accuracy", "calibration"}
    assert set(found.values()) == {None}


def test_auc_does_not_depend_on_the_order_of_samples() -> None:
    logits, labels = map(torch.from_numpy, draw(1, 5000, 20, 0.2))
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(3))
    assert metrics.auc(logits, labels) == metrics.auc(logits[order], labels[order])


def test_extreme_logits_keep_the_log_loss_finite() -> None:
    logits, labels = torch.tensor([800.0, -800.0, 800.0]), torch.tensor([True, False, False])
    found = metrics.binary_metrics(logits, labels)
    assert found["log_loss"] == pytest.approx(800 / 3)


@pytest.mark.parametrize(
    ("value", "target", "better", "expected"),
    [
        (0.8, 0.8, "higher", True),
        (0.79, 0.8, "higher", False),
        (0.79, 0.8, "lower", True),
        (0.9, None, "higher", None),
        (None, 0.8, "higher", False),
        (float("nan"), 0.8, "lower", False),
    ],
)
def test_reached(
    value: float | None, target: float | None, better: str, expected: bool | None
) -> None:
    assert metrics.reached(value, target, better) is expected


def test_speed() -> None:
    assert metrics.throughput(1000, 4.0) == 250.0
    assert metrics.throughput(0, 4.0) is None
    assert metrics.throughput(10, 0.0) is None
    assert metrics.mfu(4e12, 2.0, 2, 1e12) == 1.0


def test_shares_and_errors() -> None:
    assert metrics.share_of_excess(0.8, 0.95) == pytest.approx(0.785)
    assert metrics.mean_relative_error([1.02, 0.99], [1.0, 1.0]) == pytest.approx(0.015)
