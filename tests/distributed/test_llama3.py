"""Every split of Llama-3 trains like one process; each continues what any other began."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import rank_processes
from tests.distributed import llama3_ranks
from tests.distributed.llama3_ranks import (
    BF16_STATES,
    CONTINUED,
    CPU,
    SAVED_AT,
    SPLITS,
    STEPS,
    config,
    train,
)
from trainmark.checkpoint import folders
from trainmark.distributed.mesh import single

GROUPS = [
    pytest.param("two"),
    *(pytest.param(g, marks=pytest.mark.slow) for g in ("two-variants", "four")),
]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one process has trained, and saved half-way; ranks write beside it."""
    path = tmp_path_factory.mktemp("llama3")
    losses = train(config(), single(CPU), save_to=path / "one")
    (path / "one.json").write_text(json.dumps(losses))
    return path


def run_ranks(folder: Path, group: str) -> dict[str, Any]:
    """What the splits of a group gave."""
    rank_processes.run(llama3_ranks.main, group, folder, world=SPLITS[group][0])
    data: dict[str, Any] = json.loads((folder / f"{group}.json").read_text())
    return data


def one_process(folder: Path) -> list[float]:
    losses: list[float] = json.loads((folder / "one.json").read_text())
    return losses


near = partial(pytest.approx, abs=TOLERANCE, rel=0)


def near_for(name: str, losses: list[float]) -> Any:
    """fp32 follows exactly; in lower precision a curve is only like it."""
    return pytest.approx(losses, rel=0.02) if "8" in name or "16" in name else near(losses)


def test_one_process_learns(folder: Path) -> None:
    losses = one_process(folder)
    assert len(losses) == STEPS + 2
    assert losses[-3] < losses[0] - 1


@pytest.mark.parametrize("group", GROUPS)
def test_splits_train_like_one_process(folder: Path, group: str) -> None:
    """One test a group, so that its ranks are started once, whoever runs the tests."""
    alone, found = one_process(folder), run_ranks(folder, group)
    following = alone[SAVED_AT : SAVED_AT + CONTINUED]
    assert found.keys() == SPLITS[group][1].keys()
    for name, losses in found.items():
        assert losses["whole"] == near_for(name, alone), name
        # A split continues what one process and what every other split began ...
        assert losses["continued"].keys() >= {"one", *found} - {name}
        for other, continued in losses["continued"].items():
            assert continued == near_for(name + other, following), (other, name)
        # ... and one process what a split began.
        start = folders.latest(folder / name)
        assert start is not None
        back = train(config(), single(CPU), start=start, stop=SAVED_AT + CONTINUED)
        assert back == near_for(name, following), name


@pytest.mark.slow
def test_two_and_four_ranks_continue_each_other(folder: Path, tmp_path: Path) -> None:
    """Each group continues what those before it have saved in its folder."""
    following = one_process(folder)[SAVED_AT : SAVED_AT + CONTINUED]
    run_ranks(tmp_path, "two-alone")
    more = run_ranks(tmp_path, "four-after-two")["PP2xTP2"]["continued"]
    assert more == {"DP2": near(following)}
    fewer = run_ranks(tmp_path, "two-after-four")["DP2-again"]["continued"]
    assert fewer == {"DP2": near(following), "PP2xTP2": near(following)}


@pytest.mark.slow
def test_splits_without_masters_continue_each_other(tmp_path: Path) -> None:
    """What lies beside the weights is cut and put together as they are."""
    alone = train(config(**BF16_STATES), single(CPU), save_to=tmp_path / "one")
    found = run_ranks(tmp_path, "two-bf16-states")
    assert len(found) == 2
    for losses in found.values():
        assert losses["whole"] == pytest.approx(alone, rel=0.02)
        assert len(losses["continued"]) == 2
        for continued in losses["continued"].values():
            assert continued == pytest.approx(alone[SAVED_AT : SAVED_AT + CONTINUED], rel=0.02)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bf16"},
        BF16_STATES,
        {"precision": "fp8", "optimizer_states": "bf16"},
        {"precision": "fp16"},
        {"recompute": "selective"},
    ],
    ids=lambda changes: "-".join(changes.values()) or "fp32",
)
def test_one_process_resumes_bit_for_bit(tmp_path: Path, changes: dict[str, Any]) -> None:
    cfg = dataclasses.replace(config(**changes))
    whole = train(cfg, single(CPU), save_to=tmp_path, stop=SAVED_AT + 4)
    start = folders.latest(tmp_path)
    assert start is not None
    assert train(cfg, single(CPU), start=start, stop=SAVED_AT + 4) == whole[SAVED_AT:]
    # Every precision trains: the curve is near fp32's.
    assert whole[SAVED_AT] == pytest.approx(3.4719, rel=0.02)
