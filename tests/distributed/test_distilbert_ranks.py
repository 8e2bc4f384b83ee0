"""DistilBERT on two ranks trains and evaluates like one process."""

from typing import Any

import pytest

from tests.distributed import distilbert_ranks
from tests.distributed.distilbert_ranks import MODES
from tests.small_distilbert import CPU


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return distilbert_ranks.start(tmp_path_factory.mktemp("ranks"), world=2)


@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_train_like_one(ranks: list[dict[str, Any]], mode: str) -> None:
    distilbert_ranks.check(ranks, mode, CPU)
    assert ranks[0][mode]["norms"] == ranks[1][mode]["norms"]
    assert ranks[0][mode]["metrics"] == ranks[1][mode]["metrics"]
