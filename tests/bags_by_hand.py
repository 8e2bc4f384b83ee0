"""Tables with several ids per feature, looked up and updated by the formulas, row after row in
float64: what the engines are compared with."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainmark.embeddings.tables.batch import IdGroup

LR, EPS, BETA1, BETA2 = 0.1, 1e-3, 0.9, 0.999
"""Of all rules. A small eps would make a whole step of gradients that cancel to rounding."""
Array = NDArray[Any]


class ByHand:
    """Tables, and what their optimiser keeps: by the names that checkpoints have for them."""

    def __init__(self, weights: dict[str, Tensor], optimizer: str, pooling: str) -> None:
        self.optimizer, self.pooling, self.updates = optimizer, pooling, 0
        self.tables = {name.removesuffix(".weight"): _copy(w) for name, w in weights.items()}
        self.state = {
            f"{name}.{kind}": np.zeros(len(table) if shape == "row" else table.shape)
            for name, table in self.tables.items()
            for kind, shape in _STATE[optimizer].items()
        }

    def lookup(self, ids: Sequence[Array]) -> Array:
        """[B, F, D], of [B, hotness] ids of each feature; -1 is none."""
        rows = np.zeros((len(ids[0]), len(ids), self.tables["tables.0"].shape[1]))
        for feature, of_feature in enumerate(ids):
            for sample, bag in enumerate(of_feature):
                for row in bag[bag >= 0]:
                    share = self._share(bag)
                    rows[sample, feature] += share * self.tables[f"tables.{feature}"][row]
        return rows

    def update(self, ids: Sequence[Array], grads_BFD: Array) -> None:
        self.updates += 1
        for feature, of_feature in enumerate(ids):
            sums: dict[int, Any] = defaultdict(float)
            for sample, bag in enumerate(of_feature):
                for row in bag[bag >= 0]:
                    sums[row] = sums[row] + self._share(bag) * grads_BFD[sample, feature]
            for row, gradient in sums.items():
                self._step(f"tables.{feature}", row, gradient)

    def _share(self, bag: Array) -> float:
        return 1 / (bag >= 0).sum() if self.pooling == "mean" else 1.0

    def _step(self, name: str, row: int, g: Array) -> None:
        table = self.tables[name]
        if self.optimizer == "sgd":
            table[row] -= LR * g
        elif self.optimizer == "adam":
            first, second = self.state[f"{name}.first"], self.state[f"{name}.second"]
            first[row] = BETA1 * first[row] + (1 - BETA1) * g
            second[row] = BETA2 * second[row] + (1 - BETA2) * g**2
            rate = LR * np.sqrt(1 - BETA2**self.updates) / (1 - BETA1**self.updates)
            table[row] -= rate * first[row] / (np.sqrt(second[row]) + EPS)
        else:
            total = self.state[f"{name}.sum"]
            total[row] += (g**2).mean() if self.optimizer == "rowwise_adagrad" else g**2
            table[row] -= LR * g / (np.sqrt(total[row]) + EPS)


_STATE: dict[str, dict[str, str]] = {
    "sgd": {},
    "adagrad": {"sum": "table"},
    "rowwise_adagrad": {"sum": "row"},
    "adam": {"first": "table", "second": "table"},
}


def _copy(weight: Tensor) -> Array:
    return weight.detach().double().numpy().copy()


def draw_ids(
    table_rows: Sequence[int], hotness: Sequence[int], samples: int, seed: int
) -> list[Array]:
    """[samples, hotness] of each feature: bags that are empty, bags with an id twice, and ids that
    many bags have."""
    random = np.random.default_rng(seed)
    found = []
    for rows, most in zip(table_rows, hotness, strict=True):
        ids = random.integers(0, max(1, rows // 3), (samples, most))
        ids[np.arange(most) >= random.integers(0, most + 1, (samples, 1))] = -1
        ids[0], ids[1] = -1, rows - 1
        found.append(ids)
    return found


def groups_of(ids: Sequence[Array]) -> list[IdGroup]:
    """Features of equally many ids together, the last ones first."""
    found = []
    for most in sorted({of_feature.shape[1] for of_feature in ids}, reverse=True):
        features = [f for f, of_feature in enumerate(ids) if of_feature.shape[1] == most]
        stacked = torch.from_numpy(np.stack([ids[f] for f in features]))
        found.append(IdGroup(features, (stacked[:, :, 0] if most == 1 else stacked).int()))
    return found


def train(
    engine: Any,
    by_hand: ByHand,
    ids: Sequence[Array],
    seed: int,
    *,
    shares: Sequence[int],
    rank: int = 0,
    micro_batches: int = 1,
) -> None:
    """A step of both, each from its own rows.

    Args:
        ids: of the samples of all ranks.
        shares: samples of each rank.
    """
    expected = by_hand.lookup(ids)
    grads = np.random.default_rng(seed).standard_normal(expected.shape).astype(np.float32)
    firsts = np.cumsum([0, *shares])
    engine.begin_step(LR)
    for micro in range(micro_batches):
        bounds = [
            (first + share * micro // micro_batches, first + share * (micro + 1) // micro_batches)
            for first, share in zip(firsts, shares, strict=False)
        ]
        own = slice(*bounds[rank])
        own_groups = [group.part(own) for group in groups_of(ids)]
        prepared = engine.prepare(own_groups, [stop - start for start, stop in bounds])
        engine.begin(prepared)
        rows = engine.lookup(prepared)
        torch.testing.assert_close(_copy(rows), expected[own], rtol=1e-5, atol=1e-6)
        rows.backward(torch.from_numpy(grads[own]))
    engine.apply_gradients(LR, torch.ones(()))
    by_hand.update(ids, grads)
