"""Several ids per feature in the engines of one process, beside the formulas."""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from tests import bags_by_hand
from tests.bags_by_hand import BETA1, BETA2, EPS, ByHand, draw_ids
from tests.distributed import bag_ranks, small_dlrm
from tests.distributed.small_dlrm import CPU, DIM, TABLE_ROWS
from trainmark.distributed.mesh import single
from trainmark.embeddings.bag_engines import FusedBagEngine, LocalBagEngine
from trainmark.embeddings.mean import MeanEngine
from trainmark.embeddings.sharded import ShardedEngine
from trainmark.embeddings.tables.formats import Formats
from trainmark.embeddings.tables.host import WorkingSet
from trainmark.embeddings.tables.update import make_rule
from trainmark.kernels import compiled
from trainmark.kernels.pool_rows import Bags
from trainmark.training.checking import fingerprint

HOTNESS = bag_ranks.HOTNESS
SAMPLES, STEPS = 40, 4


def local(optimizer: str) -> Any:
    rule = make_rule(optimizer, eps=EPS, beta1=BETA1, beta2=BETA2)
    return LocalBagEngine(TABLE_ROWS, DIM, rule, HOTNESS)


def fused(optimizer: str) -> Any:
    rule = make_rule(optimizer, eps=EPS, beta1=BETA1, beta2=BETA2)
    formats = Formats(of_tables=["fp32"] * len(TABLE_ROWS))
    return FusedBagEngine(TABLE_ROWS, DIM, rule, formats, hotness=HOTNESS)


def sharded(optimizer: str, kind: str) -> Any:
    rule = make_rule(optimizer, eps=EPS, beta1=BETA1, beta2=BETA2)
    placement = small_dlrm.placement(kind, 1)
    return ShardedEngine(
        placement, TABLE_ROWS, DIM, rule, single(CPU), torch.float32, hotness=HOTNESS
    )


ENGINES: dict[str, Any] = {
    "local": local,
    "fused": fused,
    "sharded": partial(sharded, kind="mixture"),
    "host": partial(sharded, kind="mixture_host"),
}


def built(name: str, optimizer: str, pooling: str = "sum") -> Any:
    engine = ENGINES[name](optimizer).to_empty(device="cpu")
    if pooling == "mean":
        engine = MeanEngine(engine, len(TABLE_ROWS))
    engine.init_weights(3)
    engine.create_state()
    return engine


@pytest.mark.parametrize("has_numba", [True, False])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("optimizer", small_dlrm.OPTIMIZERS)
@pytest.mark.parametrize("name", ENGINES)
def test_rows_change_by_the_formulas(
    name: str, optimizer: str, pooling: str, has_numba: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (name, optimizer) == ("fused", "adam"):
        return  # which has no kernel
    monkeypatch.setattr(compiled, "INSTALLED", compiled.INSTALLED and has_numba)
    engine = built(name, optimizer, pooling)
    by_hand = bag_ranks.whole_by_hand(optimizer, pooling)
    for step in range(STEPS):
        ids = draw_ids(TABLE_ROWS, HOTNESS, SAMPLES, step)
        micros = 3 if step == 1 else 1
        bags_by_hand.train(engine, by_hand, ids, step, shares=[SAMPLES], micro_batches=micros)
    bag_ranks.compare(engine, by_hand, f"{name} {optimizer}")


def test_ids_are_such_that_mistakes_show() -> None:
    """Bags without ids, with one twice, and ids of many bags; a row that nobody looks up stays."""
    ids = draw_ids(TABLE_ROWS, HOTNESS, SAMPLES, 0)
    assert all((of_feature[0] == -1).all() for of_feature in ids)
    twice = [len(set(bag[bag >= 0])) < (bag >= 0).sum() for bag in ids[0]]
    assert sum(twice) >= 10
    by_hand = ByHand({"tables.0.weight": torch.ones(TABLE_ROWS[0], DIM)}, "adam", "mean")
    before = by_hand.tables["tables.0"].copy()
    by_hand.update(ids[:1], by_hand.lookup(ids[:1]))
    changed = (by_hand.tables["tables.0"] != before).any(1)
    assert set(changed.nonzero()[0]) == set(ids[0][ids[0] >= 0])


# --- what is read of the tables, and what streams must know of


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("name", ENGINES)
def test_rows_in_use_are_those_of_bags(name: str, pooling: str) -> None:
    """`--check-every` asks for them, twice."""
    engine, ids = built(name, "sgd", pooling), draw_ids(TABLE_ROWS, HOTNESS, SAMPLES, 0)
    before = engine.prepare(bags_by_hand.groups_of(ids), [SAMPLES])
    first, again = (fingerprint(*engine.rows_in_use(before)) for _ in range(2))
    assert first == again
    looked_up, other = ids[2].max(), next(row for row in range(300) if row not in ids[2])
    for row, is_seen in ((other, False), (looked_up, True)):
        (rows,) = small_dlrm.parts(engine.table_weights()["tables.2.weight"], torch.empty(300, DIM))
        rows[0][row, 1] += 1
        after = engine.prepare(bags_by_hand.groups_of(ids), [SAMPLES])
        assert (fingerprint(*engine.rows_in_use(after)) != first) == is_seen


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("kind", ["mixture", "mixture_host", "row_wise"])
def test_streams_are_told_of_all_that_was_prepared(kind: str, optimizer: str) -> None:
    """Else memory that the compute stream still reads would be given to the next batch."""
    engine = sharded(optimizer, kind).to_empty(device="cpu")
    engine.init_weights(3)
    engine.create_state()
    engine._requests_ahead = True  # as on a GPU
    ids = draw_ids(TABLE_ROWS, HOTNESS, SAMPLES, 0)
    prepared = engine.prepare(bags_by_hand.groups_of(ids), [SAMPLES])
    sets = [a.holder for a in prepared.requested if isinstance(a.holder, WorkingSet)]
    told = [*prepared.prepared_tensors(), *(t for working in sets for t in working.tensors())]
    places = {tensor.data_ptr() for tensor in told}
    found = list(tensors_in(prepared))
    assert len(found) > 10
    kept = engine._connect().replica_bags(SAMPLES).table.data_ptr()  # for all batches of a size
    assert not [path for path, t in found if t.numel() and t.data_ptr() not in places | {kept}]


def tensors_in(thing: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All that lie in what an engine prepared, but for its tables."""
    if isinstance(thing, torch.Tensor):
        yield path, thing
    elif isinstance(thing, list | tuple):
        for number, part in enumerate(thing):
            yield from tensors_in(part, f"{path}[{number}]")
    elif isinstance(thing, dict):
        for key, part in thing.items():
            yield from tensors_in(part, f"{path}[{key}]")
    elif isinstance(thing, Bags) or dataclasses.is_dataclass(thing):
        for name, part in vars(thing).items():
            # The store's own; and what nobody reads but who makes it.
            if name not in ("shared_state", "row_of_id"):
                yield from tensors_in(part, f"{path}.{name}")
