"""`--shard I/N`: every Nth test, beginning with the Ith, so that N processes run them all."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shard", default="1/1", metavar="I/N", help="every Nth test, from the Ith on"
    )


@pytest.hookimpl(trylast=True)  # of the tests that -m and -k have left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    first, _, count = config.getoption("--shard").partition("/")
    kept = items[int(first) - 1 :: int(count)]
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept
