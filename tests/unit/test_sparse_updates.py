"""Sparse updates against torch.optim on dense tensors, and against values computed by hand."""

import pytest
import torch
from torch import Tensor

from tests.small import copies, same_bits
from trainmark.embeddings.engine import LocalEngine
from trainmark.embeddings.tables import row_update
from trainmark.embeddings.tables.row_update import Settings
from trainmark.embeddings.tables.update import RowGradients, add_rows, make_rule
from trainmark.training.optimizers import (
    decay_weights,
    gated_step,
    make_optimizer,
    optimizer_tensors,
)

SETTINGS = {"eps": 1e-8, "beta1": 0.9, "beta2": 0.999}
ON, OFF = torch.ones(()), torch.zeros(())
RULES = ["sgd", "adagrad", "rowwise_adagrad", "adam"]


def engine(name: str, rows: int = 6, dim: int = 4, weight_decay: float = 0.0) -> LocalEngine:
    rule = make_rule(name, **SETTINGS, weight_decay=weight_decay)
    made = LocalEngine([rows - 2, 2], dim, rule)
    made.to_empty(device="cpu")
    made.init_weights(3)
    made.create_state()
    return made


def train_step(tables: LocalEngine, ids: Tensor, target: Tensor, lr: float) -> None:
    """One step of sum((row - target)^2) / 2: the gradient of a lookup is row - target."""
    rows = tables.lookup(ids)
    ((rows - target) ** 2 / 2).sum().backward()
    tables.apply_gradients(lr, ON)


# Steps of [B, F] ids: with duplicates inside a batch, between features, and a row never touched.
BATCHES = [
    torch.tensor([[0, 4], [0, 5], [0, 4], [3, 4]]),
    torch.tensor([[0, 4], [3, 5], [1, 5], [3, 5]]),
]


@pytest.mark.parametrize(
    ("name", "peer"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.3)),
        ("adagrad", lambda p: torch.optim.Adagrad(p, lr=0.3, eps=1e-8)),
        ("adam", lambda p: torch.optim.SparseAdam(p, lr=0.3, eps=1e-8)),
    ],
)
def test_two_steps_match_torch_optim(name: str, peer: object) -> None:
    tables = engine(name)
    bag = torch.nn.Embedding(6, 4, sparse=True, _weight=tables.store.weight.clone())
    optimizer = peer(bag.parameters())  # type: ignore[operator]
    for ids in BATCHES:
        target = torch.arange(4.0).expand(4, 2, 4)
        train_step(tables, ids, target, lr=0.3)
        optimizer.zero_grad()
        ((bag(ids) - target) ** 2 / 2).sum().backward()
        optimizer.step()
    torch.testing.assert_close(tables.store.weight, bag.weight.detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(tables.store.weight[2], engine(name).store.weight[2])  # never looked up


@pytest.mark.parametrize("name", RULES)
def test_weight_decay_takes_its_share_of_the_rows_that_were_looked_up(name: str) -> None:
    """Off the row, before its update and once: what follows is what no decay would have done."""
    decayed, plain = engine(name, weight_decay=0.5), engine(name)
    for ids in BATCHES:
        before = decayed.store.weight.clone()
        plain.store.weight.copy_(before)
        for tables in (decayed, plain):
            train_step(tables, ids, torch.arange(4.0).expand(4, 2, 4), lr=0.3)
        share = torch.zeros(6, 1)
        share[ids.unique()] = 0.3 * 0.5
        expected = plain.store.weight - share * before
        torch.testing.assert_close(decayed.store.weight, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(decayed.store.weight[2], engine(name).store.weight[2])  # never looked up


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_summed_rows_decay_once_whatever_their_type(ids: torch.dtype) -> None:
    """Sorted for the kernels, they are of 32 bits, and one that repeats comes again with zeros."""
    decayed, plain = (make_rule("rowwise_adagrad", **SETTINGS, weight_decay=d) for d in (0.5, 0.0))
    rows, grads = torch.tensor([1, 1, 3], dtype=ids), torch.rand(3, 4)
    grads[1] = 0
    before, found = torch.rand(5, 4), []
    for rule in (decayed, plain):
        found.append(before.clone())
        state, settings = rule.new_state(found[-1]), Settings(lr=0.3, gate=ON)
        squares = grads.square().mean(1)
        row_update.update_summed(rule, found[-1], state, rows, grads.clone(), squares, settings)
    share = torch.zeros(5, 1)
    share[[1, 3]] = 0.3 * 0.5
    torch.testing.assert_close(found[0], found[1] - share * before)


def test_rowwise_adagrad_by_hand() -> None:
    tables = engine("rowwise_adagrad", rows=3, dim=2)
    weight = torch.tensor([[1.0, 3.0], [0.0, 0.0], [5.0, 5.0]])
    tables.store.weight.copy_(weight)
    ids, zero = torch.tensor([[0], [0]]), torch.zeros(2, 1, 2)
    # Two samples, each with gradient (1, 3): summed (2, 6), s = (4 + 36) / 2 = 20.
    train_step(tables, ids, zero, lr=0.5)
    after_one = torch.tensor([1.0, 3.0]) - 0.5 * torch.tensor([2.0, 6.0]) / 20**0.5
    torch.testing.assert_close(tables.store.weight[0], after_one)
    assert tables.store.optimizer_state["sum"].tolist() == [20.0, 0.0, 0.0]
    train_step(tables, ids, zero, lr=0.5)
    gradient = 2 * after_one
    total = 20 + gradient.square().mean()
    torch.testing.assert_close(tables.store.weight[0], after_one - 0.5 * gradient / total.sqrt())
    assert torch.equal(tables.store.weight[1:], weight[1:])


def test_adagrad_by_hand() -> None:
    tables = engine("adagrad", rows=3, dim=2)
    tables.store.weight.copy_(torch.tensor([[1.0, 3.0], [0.0, 0.0], [5.0, 5.0]]))
    ids, zero = torch.tensor([[0], [0]]), torch.zeros(2, 1, 2)
    train_step(tables, ids, zero, lr=0.5)  # g = (2, 6), s = (4, 36), w -= 0.5 g / sqrt(s)
    torch.testing.assert_close(tables.store.weight[0], torch.tensor([0.5, 2.5]))
    train_step(tables, ids, zero, lr=0.5)  # g = (1, 5), s = (5, 61)
    expected = torch.tensor([0.5 - 0.5 / 5**0.5, 2.5 - 2.5 / 61**0.5])
    torch.testing.assert_close(tables.store.weight[0], expected)


@pytest.mark.parametrize("name", RULES)
def test_micro_batches_equal_one_batch(name: str) -> None:
    together, apart = engine(name), engine(name)
    for ids in BATCHES:
        target = torch.ones(4, 2, 4)
        train_step(together, ids, target, lr=0.1)
        for part in (ids[:1], ids[1:]):
            ((apart.lookup(part) - target[: len(part)]) ** 2 / 2).sum().backward()
        apart.apply_gradients(0.1, ON)
    torch.testing.assert_close(apart.store.weight, together.store.weight, rtol=1e-6, atol=1e-7)


def held(tables: LocalEngine) -> dict[str, Tensor]:
    """Copies of rows and state."""
    return copies({"weight": tables.store.weight, **tables.store.optimizer_state})


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
def test_a_closed_gate_changes_nothing(name: str, first: bool) -> None:
    tables = engine(name, weight_decay=0.5)
    if not first:
        train_step(tables, BATCHES[0], torch.ones(4, 2, 4), lr=0.1)
    before = held(tables)
    rows = tables.lookup(BATCHES[0])
    (rows * float("nan")).sum().backward()
    tables.apply_gradients(0.1, OFF)
    assert same_bits(held(tables), before)
    assert tables.gradients() == []  # forgotten, not applied later


@pytest.mark.parametrize("name", RULES)
def test_a_rule_with_zero_gradients_and_a_closed_gate_changes_nothing(name: str) -> None:
    """What a GPU does instead of asking the gate."""
    tables = engine(name)
    train_step(tables, BATCHES[0], torch.ones(4, 2, 4), lr=0.1)
    before, ids = held(tables), BATCHES[1].reshape(-1)
    store, zeros = tables.store, RowGradients(ids, torch.zeros(len(ids), 4))
    store.rule.update(store.weight, store.optimizer_state, zeros, 0.1, OFF)
    assert same_bits(held(tables), before)


def test_duplicates_are_summed() -> None:
    ids = torch.tensor([7, 2, 7, 7])
    rows, sums = RowGradients(ids, torch.arange(8.0).view(4, 2)).summed()
    assert rows.tolist() == [2, 7]
    assert sums.tolist() == [[2.0, 3.0], [10.0, 13.0]]


def test_updates_are_repeatable() -> None:
    """The order of additions is fixed, however many threads there are."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50, (20_000,), generator=random)
    rows = torch.randn(20_000, 8, generator=random)
    found = []
    for _ in range(3):
        target = torch.zeros(50, 8)
        add_rows(target, ids, rows)
        found.append(target)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_an_evaluation_first_does_not_disturb_training() -> None:
    """The gather's buffer is made once per size, here under inference mode."""
    tables = engine("sgd")
    with torch.inference_mode():
        evaluated = tables.lookup(BATCHES[0]).clone()
    before = tables.store.weight[BATCHES[0]]
    train_step(tables, BATCHES[0], torch.zeros(4, 2, 4), lr=0.1)
    assert torch.equal(evaluated, before)
    assert not torch.equal(tables.store.weight[BATCHES[0]], before)


# --- the dense optimisers


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_dense_steps_match_torch_optim_and_obey_the_gate(name: str) -> None:
    peers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
        "adam": lambda p: torch.optim.Adam(p, lr=0.3, eps=1e-8),
    }
    ours = torch.nn.Parameter(torch.arange(6.0))
    theirs = torch.nn.Parameter(torch.arange(6.0))
    optimizer = make_optimizer(name, [ours], **SETTINGS)
    adagrad = lambda p: torch.optim.Adagrad(p, lr=0.3, eps=1e-8)  # noqa: E731
    peer = peers.get(name, adagrad)([theirs])
    for gate in (ON, OFF, ON):
        ours.grad = (ours.detach() - 2) ** 2
        if not gate:
            ours.grad[0] = float("nan")
            before = ours.detach().clone()
            state = optimizer_tensors(optimizer, {ours: "w"})
            copies = {key: value.clone() for key, value in state.items()}
        gated_step(optimizer, 0.3, gate)
        if gate:
            theirs.grad = (theirs.detach() - 2) ** 2
            peer.step()
        else:
            assert torch.equal(ours, before)
            assert all(torch.equal(state[key], copies[key]) for key in state)
    torch.testing.assert_close(ours.detach(), theirs.detach())


def test_dense_weight_decay_is_adamws() -> None:
    """PyTorch's AdamW is its Adam with decoupled decay; a closed gate changes nothing."""
    start = torch.arange(6.0).view(2, 3)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    optimizer = make_optimizer("adam", [ours], **SETTINGS)
    peer = torch.optim.AdamW([theirs], lr=0.3, eps=1e-8, weight_decay=0.1)
    for gate in (ON, OFF, ON):
        ours.grad, theirs.grad = ((p.detach() - 2) ** 2 for p in (ours, theirs))
        with torch.no_grad():
            decay_weights([ours], 0.1, 0.3, gate)
        gated_step(optimizer, 0.3, gate)
        if gate:
            peer.step()
    torch.testing.assert_close(ours.detach(), theirs.detach())
