"""What TorchRec cannot train as the native engine would is refused, all at once."""

from typing import Any

import pytest

from trainmark.embeddings import torchrec_tables
from trainmark.embeddings.placement.placement import (
    Placement,
    Shard,
    TablePlacement,
    whole_everywhere,
)
from trainmark.embeddings.torchrec_tables import TableSpecs, problems


def specs(**changes: Any) -> TableSpecs:
    given = {"dim": 8, "optimizer": "sgd", "eps": 1e-8, "micro_batch": 4, "accumulate": 1}
    return TableSpecs(rows=(10,), **{**given, **changes})


def placed(**fields: Any) -> Placement:
    shards = fields.pop("shards", (Shard(device=0, rows=(0, 10), columns=(0, 8)),))
    table = TablePlacement(table=0, shards=shards, **fields)
    return Placement(devices=2, tables=(table,))


HALVES = tuple(Shard(device=d, rows=(0, 10), columns=(4 * d, 4 * d + 4)) for d in range(2))
UNEVEN = tuple(Shard(device=d, rows=(0, 10), columns=c) for d, c in enumerate([(0, 6), (6, 8)]))


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrec_tables, "find_spec", lambda name: object())


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_what_it_can_do(optimizer: str) -> None:
    assert problems(specs(optimizer=optimizer), None) == []
    assert problems(specs(optimizer=optimizer), placed(sharding="table_wise")) == []
    assert problems(specs(optimizer=optimizer), placed(sharding="column_wise", shards=HALVES)) == []
    assert problems(specs(accumulate=3), None) == []


@pytest.mark.parametrize(
    ("changes", "placement", "says"),
    [
        ({"optimizer": "adam"}, None, "no adam that equals ours"),
        ({"dim": 6}, None, "divide by 4. Received: 6"),
        ({"accumulate": 2, "optimizer": "adagrad"}, None, "accumulate 2 with adagrad"),
        ({}, placed(sharding="table_wise", memory="host"), "table 0 is in host memory"),
        (
            {},
            placed(sharding="data_parallel", shards=whole_everywhere(10, 8, 2)),
            "table 0 is data_parallel",
        ),
        (
            {"optimizer": "rowwise_adagrad"},
            placed(sharding="column_wise", shards=HALVES),
            "a sum for each slice",
        ),
        ({}, placed(sharding="column_wise", shards=UNEVEN), "number of columns divides by 4"),
    ],
)
def test_what_it_cannot(changes: dict[str, Any], placement: Placement | None, says: str) -> None:
    (problem,) = problems(specs(**changes), placement)
    assert says in problem


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrec_tables, "find_spec", lambda name: None)
    (problem,) = problems(specs(), None)
    assert "pip install 'trainmark[torchrec]'" in problem
