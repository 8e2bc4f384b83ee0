"""What must hold of what the ranks of `dlrm_ranks.main` found, on CPUs and on a GPU."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import rank_processes
from tests.distributed import dlrm_ranks as ranks
from tests.distributed import joining, small_dlrm
from tests.distributed.dlrm_ranks import Group
from trainmark.distributed.mesh import single
from trainmark.training.batches import rank_shares

TOLERANCE = {"cpu": 2e-6, "cuda": 1e-5}
"""Relative; in fp32 differences come from the order of additions alone."""
LOW_PRECISION_TOLERANCE = 1e-4
Found = dict[str, Any]


def check_groups(groups: tuple[Group, ...], folder: Path) -> dict[Group, Found]:
    """Start all groups of ranks; each trains like one process. What their first ranks found."""
    started = [
        rank_processes.start(ranks.main, group, groups, folder, world=group.world)
        for group in groups
    ]
    assert len(set(one_process(groups[0].kind, "sgd")["losses"])) == 8
    rank_processes.finish(*started)
    first = {}
    for group in groups:
        of_ranks = [
            json.loads((folder / f"{group}-{rank}.json").read_text()) for rank in range(group.world)
        ]
        first[group] = of_ranks[0]
        _check_equality(group, of_ranks)
        assert of_ranks[0]["skips"] == {"nan": True, "overflow": True}
        undisturbed, continued = of_ranks[0]["continued"]
        assert undisturbed == continued
        _check_resharded(groups, of_ranks[0]["reshard"])
    return first


@cache
def one_process(kind: str, optimizer: str, **changes: Any) -> Found:
    """What one process on one device finds."""
    device = joining.device_of(kind)
    cfg = small_dlrm.config(1, optimizer, device=device, **changes)
    return small_dlrm.train(small_dlrm.trainer(cfg, single(device)))


def alone(kind: str, optimizer: str, changes: dict[str, Any]) -> Found:
    """The same of a case; how ranks cut tables and batches means nothing to one process."""
    kept = {k: v for k, v in changes.items() if k not in ("micro_batch", "sharding")}
    return one_process(kind, optimizer, **kept)


def _check_equality(group: Group, of_ranks: list[Found]) -> None:
    print(f"{group}: largest relative difference of a loss, difference of AUC")
    for name, (kind, optimizer, changes) in ranks.cases(group).items():
        is_low = "precision" in changes or "table_format" in changes
        tolerance = LOW_PRECISION_TOLERANCE if is_low else TOLERANCE[group.kind]
        reference = alone(group.kind, optimizer, changes)
        _check_run(name, of_ranks[0]["equality"][name], reference, tolerance)
        if kind == "table_wise" and optimizer == "sgd":
            _check_bytes([rank["equality"][name]["sent"] for rank in of_ranks])


def _check_run(name: str, found: Found, reference: Found, tolerance: float) -> None:
    pairs = zip(found["losses"], reference["losses"], strict=True)
    difference = max(abs(a - b) / b for a, b in pairs)
    of_auc = abs(found["metrics"]["auc"] - reference["metrics"]["auc"])
    print(f"  {name:45} {difference:.1e} {of_auc:.1e}")
    assert difference < tolerance, name
    assert of_auc < 10 * tolerance, name
    assert found["metrics"] == pytest.approx(reference["metrics"], rel=10 * tolerance), name
    assert found["scores"] == pytest.approx(reference["scores"], rel=1e-3, abs=100 * tolerance), (
        name
    )
    assert found["samples"] == reference["samples"] == 2 * small_dlrm.TRAIN_ROWS, name


def _check_bytes(sent: list[dict[str, int]]) -> None:
    """Table i lies on rank i modulo the ranks; count what must go elsewhere, sample by sample."""
    world, epochs, table_count = len(sent), 2, len(small_dlrm.TABLE_ROWS)
    batches = [small_dlrm.GLOBAL_BATCH] * 3 + [3]
    totals = [sum(rank_shares(b, world)[r] for b in batches) * epochs for r in range(world)]
    for rank, found in enumerate(sent):
        mine = len(range(rank, table_count, world))
        others = sum(totals) - totals[rank]
        asked = totals[rank] * (table_count - mine)
        assert found["ids"] == 4 * asked
        assert found["rows"] == others * mine * small_dlrm.DIM * 4
        assert found["gradients"] == asked * small_dlrm.DIM * 4
        assert found["counts"] == found["replicas"] == found["squares"] == 0


def _check_resharded(groups: tuple[Group, ...], found: dict[str, float]) -> None:
    """From each group, 3 checkpoints into 3 shardings, and 2 with Adam, and in int8, into 2."""
    assert len(found) == len(groups) * (3 * 3 + 2 * 2 + 2 * 2)
    for name, loss in found.items():
        optimizer, _, changes = ranks.RESHARDED[name.partition(" on ")[0]]
        (begun_by,) = (g for g in groups if f" on {g} ->" in name)  # each kind draws its weights
        after = one_process(begun_by.kind, optimizer, **changes)["losses"][ranks.SAVED_AT]
        near = LOW_PRECISION_TOLERANCE if changes else TOLERANCE["cuda"]
        assert loss == pytest.approx(after, rel=near), name
