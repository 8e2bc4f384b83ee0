"""The kernels that numba compiles for CPUs, against float64 and what runs without numba."""

import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
import torch
from torch import Tensor

from tests.small import config, trainer
from trainmark.embeddings.tables.update import (
    Adagrad,
    RowGradients,
    RowwiseAdagrad,
    Sgd,
    add_rows,
    make_rule,
)
from trainmark.kernels import compiled
from trainmark.kernels.gather_interaction import gather_interaction
from trainmark.kernels.interaction import dot_interaction, dot_interaction_reference
from trainmark.kernels.relu_mlp import masked_sums, relu_mlp, relu_mlp_reference
from trainmark.kernels.sparse_update import RuleName
from trainmark.kernels.table_formats import Rows, Tables
from trainmark.workloads.dlrm.data import build_data
from trainmark.workloads.dlrm.runs import DlrmRun, Optimizer

pytestmark = pytest.mark.skipif(not compiled.INSTALLED, reason="needs numba (extra `fast`)")

# (samples, rows of a sample, width): a real one; tails of tiles and vectors; nothing at all.
SHAPES = [(37, 26, 64), (5, 3, 20), (7, 8, 48), (3, 1, 1), (4, 0, 16), (0, 3, 8)]


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(x: Tensor, rows: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output and gradients in float64, by autograd."""
    x, rows = x.detach().double().requires_grad_(), rows.detach().double().requires_grad_()
    out = dot_interaction_reference(x, rows)
    out.backward(grad.double())
    assert x.grad is not None
    assert rows.grad is not None
    return out.detach(), x.grad, rows.grad


def assert_near(found: Tensor | None, wanted: Tensor) -> None:
    assert found is not None
    torch.testing.assert_close(found.detach().double(), wanted, rtol=2e-6, atol=2e-5)


@pytest.fixture(params=[1, 3], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("samples", "features", "dim"), SHAPES)
def test_interaction_of_rows(samples: int, features: int, dim: int) -> None:
    x, rows = random(samples, dim), random(samples, features, dim, seed=2)
    x.requires_grad_()
    rows.requires_grad_()
    out = dot_interaction(x, rows)
    grad = random(*out.shape, seed=3)
    out.backward(grad)
    wanted = exact(x, rows, grad)
    for found, right in zip((out, x.grad, rows.grad), wanted, strict=True):
        assert_near(found, right)


@pytest.mark.parametrize(("samples", "features", "dim"), SHAPES)
@pytest.mark.parametrize("id_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("by_feature", [True, False])
def test_looked_up_rows(
    samples: int, features: int, dim: int, id_type: torch.dtype, by_feature: bool
) -> None:
    """Ids and rows lie in memory by feature or by sample."""
    x, table = random(samples, dim).requires_grad_(), random(11, dim, seed=2)
    ids = torch.arange(samples * features).view(samples, features) * 7 % 11
    buffer = torch.empty(samples, features, dim)
    if by_feature:
        ids = ids.t().contiguous().t()
        buffer = torch.empty(features, samples, dim).transpose(0, 1)
    before = table.clone()
    out = gather_interaction(x, ids.to(id_type), Tables(Rows(table)), buffer)
    grad = random(*out.shape, seed=3)
    out.backward(grad)
    wanted = exact(x, table[ids], grad)
    for found, right in zip((out, x.grad, buffer), wanted, strict=True):
        assert_near(found, right)
    assert torch.equal(table, before)


@pytest.mark.parametrize(("dim", "unit"), [(48, 16), (64, 32), (12, 4), (12, 12)])
def test_pieces_get_their_gradients_in_their_own_places(dim: int, unit: int) -> None:
    samples, features = 5, 9
    pieces = features * dim // unit
    received = random(samples * pieces + 3, unit, seed=2)
    shuffled = torch.randperm(len(received), generator=torch.Generator().manual_seed(4))
    places = shuffled[: samples * pieces].view(samples, pieces)
    others = shuffled[samples * pieces :]
    rows, rest = received[places].view(samples, features, dim), received[others]
    x = random(samples, dim).requires_grad_()
    out = gather_interaction(x, places, Tables(Rows(received)), received, at_rows=True)
    grad = random(*out.shape, seed=3)
    out.backward(grad)
    found = (out, x.grad, received[places].view(samples, features, dim))
    for mine, right in zip(found, exact(x, rows, grad), strict=True):
        assert_near(mine, right)
    assert torch.equal(received[others], rest)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_gradients_that_are_not_finite_are_noticed(bad: float) -> None:
    x, table = random(6, 16).requires_grad_(), torch.full((8, 16), 2.0**127)
    ids = torch.arange(24).view(6, 4) % 8
    for poison, expected in ((None, 1), (bad, 0)):
        finite, buffer = torch.ones(()), torch.empty(6, 4, 16)
        out = gather_interaction(x, ids, Tables(Rows(table)), buffer, finite)
        grad = torch.zeros_like(out)
        grad[1:, 16] = 1.0  # all others are as large as numbers get, and finite
        if poison is not None:
            grad[4, 16 + 7] = poison
        out.backward(grad)
        assert finite.item() == expected


@pytest.mark.parametrize(("count", "rows", "dim"), [(500, 30, 64), (500, 4000, 20), (0, 3, 16)])
def test_rows_are_added_as_without_numba(
    count: int, rows: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: SGD is the same, wherever a run is continued."""
    ids = torch.randint(rows, (count,), generator=torch.Generator().manual_seed(5))
    results = []
    for installed in (True, False):
        monkeypatch.setattr(compiled, "INSTALLED", installed)
        table = random(rows, dim)
        found = RowGradients(ids, random(count, dim, seed=2))
        Sgd().update(table, {}, found, 0.3, torch.ones(()))
        add_rows(table, ids, random(count, dim, seed=3))
        results.append(table)
    assert torch.equal(*results)


@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("count", "rows", "dim"), [(500, 30, 64), (500, 4000, 20), (0, 3, 16), (4000, 70_000, 8)]
)
def test_adagrad(count: int, rows: int, dim: int, shared: bool, per_row: bool) -> None:
    """By rows and by elements, beside its formula in 64 bits; tables of one bucket and of three.

    With `shared`, several ids have the same gradient, as those of a bag do.
    """
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(rows, (count,), generator=draw)
    ids[count // 2 :] = ids[: count - count // 2]  # some come twice in the largest table, too
    places = torch.randint(count // 3 + 1, (count,), generator=draw) if shared else None
    given = random(count, dim)
    grads = given if places is None else given[places]
    table, state = random(rows, dim), random(rows, *([] if per_row else [dim]), seed=6).square()
    g = torch.zeros(rows, dim, dtype=torch.float64).index_add_(0, ids, grads.double())
    sums = state.double() + (g.square().mean(1) if per_row else g.square())
    wanted = table.double() - 0.3 * g / (sums.sqrt() + 1e-3).view(rows, -1)
    rule = RowwiseAdagrad(1e-3) if per_row else Adagrad(1e-3)
    rule.update(table, {"sum": state}, RowGradients(ids, given, places), 0.3, torch.ones(()))
    assert_near(state, sums)
    assert_near(table, wanted)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad"])
def test_updates_do_not_depend_on_the_number_of_threads(name: str) -> None:
    ids = torch.randint(50, (700,), generator=torch.Generator().manual_seed(5)) * 999

    def updated() -> Tensor:
        table, rule = random(50_000, 8), make_rule(name, eps=1e-3, beta1=0.9, beta2=0.999)
        found = RowGradients(ids, random(700, 8, seed=2))
        rule.update(table, rule.new_state(table), found, 0.3, torch.ones(()))
        return table

    assert_same_in_any_threads(updated)


def assert_same_in_any_threads(compute: Callable[[], Tensor]) -> None:
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(compute())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


# --- the MLPs


@pytest.mark.parametrize("last_relu", [True, False])
@pytest.mark.parametrize("widths", [(13, 64, 20), (5, 1), (40, 128, 17, 3)])
@pytest.mark.parametrize("samples", [0, 1, 700])
def test_mlp(samples: int, widths: tuple[int, ...], last_relu: bool) -> None:
    pairs = list(itertools.pairwise(widths))
    weights = [random(o, i, seed=o).requires_grad_() for i, o in pairs]
    biases = [random(o, seed=9 + o).requires_grad_() for _, o in pairs]
    leaves = [random(samples, widths[0]).requires_grad_(), *weights, *biases]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    out = relu_mlp(leaves[0], weights, biases, last_relu)
    right = relu_mlp_reference(wide[0], wide[1 : len(pairs) + 1], wide[len(pairs) + 1 :], last_relu)
    assert out.grad_fn is not None
    assert "ReluMlp" in out.grad_fn.name()
    grad = random(*out.shape, seed=3)
    found = [out, *torch.autograd.grad(out, leaves, grad)]
    wanted = [right, *torch.autograd.grad(right, wide, grad.double())]
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine.double() - theirs).norm() <= 1e-6 * theirs.norm()


def test_what_is_not_a_number_stays_so_behind_a_relu() -> None:
    x, weight, bias = random(4, 8), random(16, 8, seed=2), random(16, seed=3)
    x[2, 5] = float("nan")
    assert relu_mlp(x, [weight], [bias], True)[2].isnan().all()


def test_sums_do_not_depend_on_the_number_of_threads() -> None:
    gradient, output = random(1000, 20), random(1000, 20, seed=2)
    assert_same_in_any_threads(lambda: masked_sums(gradient, output)[1])


# --- runs


def losses(cfg: DlrmRun) -> list[float]:
    built = trainer(cfg)
    data = itertools.islice(build_data(cfg, "train", 0, 1), 4)
    return [built.step(built.prepare(batch), 0.1)[0].item() for batch in data]


@pytest.mark.parametrize("name", ["sgd", "rowwise_adagrad", "adagrad"])
def test_a_run_without_numba_has_the_same_losses(
    name: RuleName, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config(optimizer=Optimizer(name=name), micro_batch=256)
    fast = losses(cfg)
    monkeypatch.setattr(compiled, "INSTALLED", False)
    assert fast == pytest.approx(losses(cfg), rel=2e-6)


def test_a_forked_process_has_threads_of_its_own() -> None:
    x, rows = random(8, 16), random(8, 3, 16)
    wanted = dot_interaction(x, rows)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(dot_interaction(x, rows), wanted) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("ranges", [1, 2, 7, 50])
def test_ranges_are_done_once_and_in_order(ranges: int) -> None:
    found = compiled.in_threads(lambda begin, end: (begin, end), 20, ranges=ranges)
    assert [begin for begin, _ in found] == [0, *(end for _, end in found[:-1])]
    assert found[-1][1] == 20
    assert len(found) == (1 if torch.get_num_threads() == 1 else min(max(3, ranges), 20))


def test_threads_that_have_no_core_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy:
        def submit(self, work: object) -> Future[None]:
            return Future()  # which never begins

    monkeypatch.setattr(compiled, "_threads", lambda *_: Busy())
    found = compiled.in_threads(lambda begin, end: end - begin, 20)
    assert sum(found) == 20


def test_what_fails_in_a_thread_fails_here() -> None:
    def kernel(begin: int, end: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        compiled.in_threads(kernel, 20, ranges=9)
