"""Over 300 steps, ranks on CPUs stay near one process; `tests/gpu` has the same of a GPU."""

from pathlib import Path

import pytest

from tests.distributed import long_ranks


@pytest.mark.slow
@pytest.mark.parametrize(("world", "count"), [(2, 11), (4, 8)])
def test_300_steps(world: int, count: int, tmp_path: Path) -> None:
    assert len(long_ranks.check(world, tmp_path)) == count
