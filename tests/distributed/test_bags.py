"""Several ids per feature on ranks: as one process trains, wherever the tables lie."""

from pathlib import Path

import pytest

from tests import rank_processes
from tests.distributed.bag_ranks import on_ranks, write_data


@pytest.mark.parametrize("engine", ["native", "torchrec"])
def test_two_ranks_train_as_one_process(engine: str, tmp_path: Path) -> None:
    if engine == "torchrec":
        pytest.importorskip("torchrec")
    write_data(tmp_path / "data")
    rank_processes.run(on_ranks, tmp_path, engine, world=2)
