"""DistilBERT on two ranks trains and evaluates like one process."""

import json
from typing import Any

import pytest

from tests import rank_processes
from tests.distributed import distilbert_ranks
from tests.distributed.distilbert_ranks import MODES
from tests.small_distilbert import CPU


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    rank_processes.run(distilbert_ranks.main, folder, world=2)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_train_like_one(ranks: list[dict[str, Any]], mode: str) -> None:
    distilbert_ranks.check(ranks, mode, CPU)
    assert ranks[0][mode]["norms"] == ranks[1][mode]["norms"]
    assert ranks[0][mode]["metrics"] == ranks[1][mode]["metrics"]
