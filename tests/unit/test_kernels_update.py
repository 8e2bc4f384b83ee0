"""The sparse update in Triton's interpreter and in plain torch, against float64 and the rules."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.embedding_kernels import (
    check_bits,
    check_update,
    copied,
    interpreted,
    new_state,
    random,
    random_ids,
    rounding_key,
    scalars,
    sorted_one,
    stored,
)
from trainmark.embeddings.tables.update import RowGradients, make_rule
from trainmark.kernels.adagrad_update import FusedAdagrad
from trainmark.kernels.sparse_update import (
    Launch,
    Rule,
    RuleName,
    SortedRows,
    sort_rows,
    sort_rows_of_two,
    update_rows_reference,
    update_rows_triton,
)
from trainmark.kernels.table_formats import FORMATS, Rows, decode

RULES: list[RuleName] = ["sgd", "rowwise_adagrad", "adagrad"]
FP32 = torch.float32
UPDATES = [pytest.param(update_rows_triton, marks=interpreted), update_rows_reference]


@interpreted
def test_bits_are_the_same_in_triton_and_torch() -> None:
    check_bits("cpu")


# --- the plan


def test_sorted_rows_lead_to_their_gradients() -> None:
    ids_BF = random_ids(60, 9, 1, "cpu").view(12, 5)
    batch = sort_rows(ids_BF)
    check_sorted(batch, ids_BF, ids_BF)
    assert batch.places_N.sort().values.tolist() == list(range(60))


def check_sorted(batch: SortedRows, ids_BF: Tensor, own: Tensor) -> None:
    """All of a store's `own` ids are in order, equal ones as they were, and lead to their places
    among all ids."""
    assert batch.rows_N.tolist() == sorted(own.flatten().tolist())
    assert torch.equal(ids_BF.flatten()[batch.places_N], batch.rows_N)
    equal = batch.rows_N[1:] == batch.rows_N[:-1]
    assert (batch.places_N.diff()[equal] > 0).all()


def test_one_sort_serves_two_stores() -> None:
    """Both have rows of the same numbers; places lead to the gradients of all features."""
    ids_BF = random_ids(60, 9, 3, "cpu").view(12, 5)
    in_second_F = torch.tensor([True, False, False, True, False])
    found = sort_rows_of_two(ids_BF, in_second_F.int() * 9, first_features=3, first_rows=9)
    for batch, features in zip(found, ([1, 2, 4], [0, 3]), strict=True):
        assert batch.rows_N.dtype == torch.int32
        check_sorted(batch, ids_BF, ids_BF[:, features])
        assert batch.places_N.unique().numel() == 12 * len(features)
        assert set((batch.places_N % 5).tolist()) == set(features)


# --- rules


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("name", RULES)
def test_fp32_updates_are_the_engines_rules(name: RuleName, update: Callable[..., None]) -> None:
    rows, dim = stored(9, 12, FP32, "cpu"), 12
    rule = make_rule(name, eps=1e-6, beta1=0.9, beta2=0.999)
    weight = rows.codes.clone()
    state = new_state(Rule(name), 9, dim, "cpu")
    theirs = {} if state is None else {"sum": state.clone()}
    for step in range(2):
        ids_N = random_ids(70, 8, step, "cpu")
        grads = random(70, dim, seed=step, device="cpu")
        update(
            rows, state, sorted_one(ids_N), grads, Rule(name, eps=1e-6),
            scalars("cpu", 0.3, 1.0), rounding_key("cpu"),
        )  # fmt: skip
        found = RowGradients(ids_N.long(), grads.clone())
        rule.update(weight, theirs, found, 0.3, torch.ones(()))
    torch.testing.assert_close(rows.codes, weight, rtol=1e-5, atol=1e-5)
    if state is not None:
        torch.testing.assert_close(state, theirs["sum"], rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("table_format", FORMATS)
def test_any_format_and_rule(table_format: str, name: RuleName) -> None:
    """Duplicates, a hot row, rows of their own; the reference rounds to the same bits. Every other
    case has weight decay, so that each format and each rule is seen with it and without."""
    decays = (list(FORMATS).index(table_format) + RULES.index(name)) % 2
    dtype, rule = FORMATS[table_format], Rule(name, weight_decay=3.0 * decays)
    ids_N = torch.cat([random_ids(30, 20, 3, "cpu"), torch.full((20,), 30, dtype=torch.int32)])
    check_update(stored(31, 24, dtype, "cpu"), ids_N, rule, "cpu")

    grads, batch = random(50, 24, seed=8, device="cpu"), sorted_one(ids_N)
    mine = stored(31, 24, dtype, "cpu")
    reference = copied(mine)
    for rows, update in ((mine, update_rows_triton), (reference, update_rows_reference)):
        state = new_state(rule, 31, 24, "cpu")
        update(rows, state, batch, grads, rule, scalars("cpu"), rounding_key("cpu"))
    same = decode(mine) == decode(reference)
    close = torch.isclose(decode(mine), decode(reference), rtol=1e-5, atol=1e-5)
    # Sums in another order may differ in the last bit, and rarely with it the chance.
    assert (same | close).float().mean() > 0.995


@interpreted
@pytest.mark.parametrize(
    ("count", "dim", "num_rows"),
    [(0, 16, 3), (1, 16, 3), (16, 16, 1), (17, 16, 17), (33, 100, 2), (40, 256, 30), (20, 512, 5)],
)
def test_odd_sizes(count: int, dim: int, num_rows: int) -> None:
    ids_N = random_ids(count, num_rows, 5, "cpu")
    check_update(stored(num_rows, dim, FP32, "cpu"), ids_N, Rule("rowwise_adagrad"), "cpu")
    check_update(stored(num_rows, dim, torch.int8, "cpu"), ids_N, Rule("sgd"), "cpu")


# Lengths of runs of equal rows, laid against pieces of 8 or 16 entries and of 16 or 32 sums.
RUNS = [
    [16, 16, 32],  # ends where chunks end
    [15, 2, 15, 1, 200],  # over one border; to the end
    [1, 300, 1],  # groups in the middle, an odd rest
    [128, 128, 7],  # begins where a group begins
    [5, 64, 64, 64, 3],
    [257],
    [100, 1, 1, 1, 150],
]
WAYS = [
    *((runs, Launch(8, 2, 2)) for runs in RUNS),
    *((runs, Launch(16)) for runs in RUNS[:3]),
    *((runs, Launch(8, 1, 3, warps=4)) for runs in RUNS[3:6]),
]


@interpreted
@pytest.mark.parametrize(("runs", "launch"), WAYS, ids=str)
def test_rows_that_span_several_pieces(runs: list[int], launch: Launch) -> None:
    ids_N = torch.repeat_interleave(torch.arange(len(runs)), torch.tensor(runs)).int()
    ids_N = ids_N[torch.randperm(len(ids_N), generator=torch.Generator().manual_seed(1))]
    check_update(stored(len(runs), 16, FP32, "cpu"), ids_N, Rule("adagrad"), "cpu", launch)


@interpreted
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16])
def test_rounding_to_nearest(dtype: torch.dtype) -> None:
    """Without a key. The interpreter rounds other types its own way."""
    ids_N, grads = torch.arange(31, dtype=torch.int32), random(31, 24, seed=8, device="cpu")
    mine = stored(31, 24, dtype, "cpu")
    reference = copied(mine)
    for rows, update in ((mine, update_rows_triton), (reference, update_rows_reference)):
        update(rows, None, sorted_one(ids_N), grads, Rule("sgd"), scalars("cpu"), None)
    assert torch.equal(mine.codes, reference.codes)


@interpreted
def test_gradients_of_16_bits() -> None:
    ids_N = random_ids(90, 4, 6, "cpu")
    check_update(stored(4, 16, FP32, "cpu"), ids_N, Rule("sgd"), "cpu", grad_dtype=torch.float16)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("name", RULES)
def test_a_closed_gate_changes_nothing(name: RuleName, update: Callable[..., None]) -> None:
    rule, ids_N = Rule(name), torch.tensor([0, 1] * 20 + [2], dtype=torch.int32)
    rows, state = stored(3, 16, torch.int8, "cpu"), new_state(Rule(name), 3, 16, "cpu")
    before, state_before = copied(rows), None if state is None else state.clone()
    grads = torch.full((41, 16), torch.nan)
    closed = scalars("cpu", gate=0.0)
    update(rows, state, sorted_one(ids_N), grads, rule, closed, rounding_key("cpu"))
    assert torch.equal(rows.codes, before.codes)
    assert torch.equal(decode(rows), decode(before))
    if state is not None:
        assert state_before is not None
        assert torch.equal(state, state_before)


@interpreted
def test_two_stores_are_updated_from_one_buffer() -> None:
    ids_BF = random_ids(36, 5, 7, "cpu").view(12, 3)
    grads_BFD = random(12, 3, 16, seed=9, device="cpu")
    starts_F = torch.tensor([0, 5, 0], dtype=torch.int32)
    for chosen, batch in zip(([0, 2], [1]), sort_rows_of_two(ids_BF, starts_F, 2, 5), strict=True):
        found = Rows(torch.zeros(5, 16))
        update_rows_triton(
            found, None, batch, grads_BFD.flatten(0, 1), Rule("sgd"), scalars("cpu", 1.0, 1.0),
            rounding_key("cpu"),
        )  # fmt: skip
        expected = torch.zeros(5, 16)
        picked: Tensor = grads_BFD[:, chosen].flatten(0, 1)
        expected.index_add_(0, ids_BF[:, chosen].flatten().long(), -picked)
        torch.testing.assert_close(found.codes, expected, rtol=1e-5, atol=1e-5)


# --- dense weights


@interpreted
def test_dense_adagrad_is_pytorchs_and_a_closed_gate_changes_nothing() -> None:
    torch.manual_seed(0)
    shapes = [(5000,), (3, 4099), (1,), (0, 7)]
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    optimizer = FusedAdagrad(ours, lr=0.0, eps=1e-3)
    expected = torch.optim.Adagrad(theirs, lr=0.0, eps=1e-3)
    for step in range(5):
        rate = 0.1 / (1 + step)
        optimizer.param_groups[0]["lr"] = torch.tensor(rate) if step % 2 else rate
        expected.param_groups[0]["lr"] = rate
        is_bad = step == 2
        for own, other in zip(ours, theirs, strict=True):
            gradient = torch.randn(own.shape)
            own.grad = gradient.clone()
            if is_bad and own.numel():
                own.grad.flatten()[0] = torch.nan
            other.grad = None if is_bad else gradient
        optimizer.found_inf = torch.tensor(float(is_bad))
        optimizer.step()
        expected.step()
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-6)
        sums = optimizer.state[own]["sum"], expected.state[other]["sum"]
        torch.testing.assert_close(*sums, rtol=1e-6, atol=1e-6)
