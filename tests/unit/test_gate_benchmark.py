"""What docs/gate.md promises, judged anew from the committed differences of recorded blocks."""

from typing import Any

import pytest

from benchmarks.common import read_rows
from benchmarks.gate_cpu import BUDGET_S, CLOCKS, SLOWER_BY, resampled_row
from trainmark.verbs.gate_turns import Clock

ROWS = read_rows("gate_cpu")


def rows(what: str, **fields: Any) -> list[dict[str, Any]]:
    wanted = {"what": what, **fields}
    return [row for row in ROWS if all(row[name] == wanted[name] for name in wanted)]


@pytest.mark.parametrize("clock", CLOCKS)
def test_slow_downs_are_found_and_false_alarms_are_rare(clock: Clock) -> None:
    """95 of 100 slow-downs of 3 %, at most 2 false alarms in 100."""
    (slower,) = rows("resampled", clock=clock, slower_by=SLOWER_BY)
    (equal,) = rows("resampled", clock=clock, slower_by=0.0)
    assert slower["budget_s"] == equal["budget_s"] == BUDGET_S
    assert slower["trials"] == equal["trials"] == 1000
    assert slower["slower"] >= 950
    assert equal["slower"] <= 20


@pytest.mark.parametrize("clock", CLOCKS)
def test_the_committed_blocks_say_so(clock: Clock) -> None:
    """A few gates, judged by the formulas as they are now."""
    (recorded,) = rows("pairs")
    pairs = [pair for pair in recorded["pairs"] if pair[clock]]
    assert len(pairs) > 20
    assert resampled_row(pairs, clock, SLOWER_BY, trials=20)["slower"] >= 18
    assert resampled_row(pairs, clock, 0.0, trials=20)["slower"] <= 1


def test_live_gates() -> None:
    found, clear = (rows("live", slower_by=effect) for effect in (SLOWER_BY, 0.0))
    assert sum(row["trials"] for row in found + clear) >= 10
    assert [row["slower"] for row in found] == [row["trials"] for row in found]
    assert [row["not slower"] for row in clear] == [row["trials"] for row in clear]
