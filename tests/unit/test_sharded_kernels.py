"""The sharded engine as it works on a GPU, with its kernels in Triton's interpreter."""

import gc

import pytest
import torch
from torch import Tensor

from tests.distributed.small_dlrm import DIM, TABLE_ROWS, placement
from tests.embedding_kernels import interpreted
from tests.engines import ready
from trainmark.distributed.mesh import single
from trainmark.embeddings import engine
from trainmark.embeddings.engine import EmbeddingEngine, LocalEngine
from trainmark.embeddings.exchange import stores
from trainmark.embeddings.exchange.row_exchange import RowExchange
from trainmark.embeddings.sharded import ShardedEngine
from trainmark.embeddings.tables import row_update
from trainmark.embeddings.tables.batch import IdGroup
from trainmark.embeddings.tables.host import distinct
from trainmark.embeddings.tables.update import UpdateRule, make_rule
from trainmark.kernels import copy_rows, gather_interaction, gather_rows, sparse_update

CPU, MAX_SAMPLES = torch.device("cpu"), 23
RULES = ["sgd", "adagrad", "rowwise_adagrad", "adam"]
KINDS = [
    "table_wise", "row_wise", "data_parallel", "column_wise",
    "table_wise_host", "row_wise_host", "mixture_host",
]  # fmt: skip


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU go the way of a GPU's, to the kernels' references."""
    monkeypatch.setattr(row_update, "has_kernel", lambda rule, _: rule.kernel is not None)


@pytest.fixture
def in_interpreter(as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And to the kernels themselves, which takes seconds a step."""
    for module, name in (
        (copy_rows, "_has_kernel"), (gather_rows, "_has_kernel"), (gather_interaction, "has_kernel")
    ):  # fmt: skip
        monkeypatch.setattr(module, name, lambda _: True)
    for module in (row_update, stores):
        monkeypatch.setattr(module, "update_rows", sparse_update.update_rows_triton)
    # The plain engine stays plain: what it hands to a CPU's kernel lies otherwise in memory.
    monkeypatch.setattr(engine, "has_compiled", lambda *tensors: False)


def rule(name: str) -> UpdateRule:
    return make_rule(name, eps=1e-6, beta1=0.9, beta2=0.999)


def sharded(kind: str, name: str) -> ShardedEngine:
    engine = ShardedEngine(
        placement(kind, 1), TABLE_ROWS, DIM, rule(name), single(CPU), torch.float32
    )
    engine._reads_in_place, engine._requests_ahead = engine.routes.unit == DIM, True
    return ready(engine)


def plain(name: str) -> LocalEngine:
    return ready(LocalEngine(TABLE_ROWS, DIM, rule(name)))


def groups(step: int) -> list[IdGroup]:
    random = torch.Generator().manual_seed(step)
    ids = [torch.randint(0, rows, (MAX_SAMPLES,), generator=random) for rows in TABLE_ROWS]
    return [IdGroup(list(range(len(ids))), torch.stack(ids).int())]


def train(
    engine: EmbeddingEngine,
    micro_batches: int = 1,
    closed: int | None = None,
    samples: int = MAX_SAMPLES,
    steps: int = 4,
) -> list[Tensor]:
    """Steps, each prepared while the one before it has yet to change rows; outputs of each."""
    pieces = [slice(int(p[0]), int(p[-1]) + 1) for p in torch.arange(samples).chunk(micro_batches)]

    def prepared(step: int) -> list:
        return [
            engine.prepare([g.part(p) for g in groups(step)], [p.stop - p.start]) for p in pieces
        ]

    outputs, ahead = [], prepared(0)
    for step in range(steps):
        lookups, ahead = ahead, prepared(step + 1)
        for lookup, piece in zip(lookups, pieces, strict=True):
            count = piece.stop - piece.start
            x = torch.linspace(-1, 1, count * DIM).view(-1, DIM).requires_grad_()
            engine.begin(lookup)
            output = engine.lookup_and_interact(lookup, x * 1.5)
            (output.sin().sum() * (torch.inf if step == closed else 0.1)).backward()
            outputs.append(output.detach())
        finite = torch.stack([gradient.sum() for gradient in engine.gradients()]).sum().isfinite()
        assert finite == (step != closed)
        engine.apply_gradients(0.1, finite.float(), torch.tensor(0.5))
    return outputs


def check_equal(ours: ShardedEngine, theirs: LocalEngine) -> None:
    for part, _, rows in [
        *(found for store in ours.stores for found in store.part_weights()),
        *ours.replicas.part_weights(),
    ]:
        whole = theirs.table_weights()[f"{part.name}.weight"]
        expected = whole[slice(*part.rows), slice(*part.columns)]
        torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_outputs_are_those_of_one_plain_engine(
    kind: str, name: str, as_on_a_gpu: None
) -> None:
    ours = sharded(kind, name)
    theirs = plain(name)
    for mine, expected in zip(train(ours), train(theirs), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
    check_equal(ours, theirs)


@pytest.mark.parametrize("kind", ["table_wise", "mixture_host"])
def test_micro_batches_and_a_step_that_must_not_count(kind: str, as_on_a_gpu: None) -> None:
    for options in ({"micro_batches": 3}, {"closed": 1}):
        ours = sharded(kind, "rowwise_adagrad")
        theirs = plain("rowwise_adagrad")
        for mine, expected in zip(train(ours, **options), train(theirs, **options), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
        check_equal(ours, theirs)


@interpreted
@pytest.mark.slow
def test_the_kernels_do_what_their_references_do(in_interpreter: None) -> None:
    for kind in ("row_wise_host", "data_parallel"):
        ours = sharded(kind, "rowwise_adagrad")
        theirs = plain("rowwise_adagrad")
        found = train(ours, samples=3, steps=2), train(theirs, samples=3, steps=2)
        for mine, expected in zip(*found, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
        check_equal(ours, theirs)


@pytest.mark.parametrize("count", [0, 1, 200])
def test_distinct_ids_are_found_without_counting_them(count: int) -> None:
    ids = torch.randint(0, 60, (count,), generator=torch.Generator().manual_seed(1)).int()
    found, places, in_order = distinct(ids, 60)
    expected, inverse = ids.unique(return_inverse=True)
    assert torch.equal(found[: len(expected)], expected)
    assert (found[len(expected) :] == 60).all()
    assert torch.equal(places, inverse)
    assert torch.equal(inverse[in_order.places_N], in_order.rows_N)
    assert (in_order.rows_N.diff() >= 0).all()


@pytest.mark.parametrize("in_place", [True, False])
def test_a_step_leaves_nothing_for_the_collector_of_garbage(in_place: bool) -> None:
    """Or memory grows with every step until it comes, and each step gets pages that are new."""
    ours = sharded("table_wise", "sgd")
    ours._reads_in_place = in_place
    train(ours, steps=1)
    gc.collect()
    gc.disable()
    try:
        train(ours, steps=3)
        kept = [found for found in gc.get_objects() if type(found) is RowExchange]
        assert kept == []
    finally:
        gc.enable()
