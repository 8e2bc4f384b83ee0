"""Checks of the embedding path's kernels, for Triton's interpreter (tests/unit) and for GPUs."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from trainmark.kernels import (
    copy_rows,
    gather_interaction,
    gather_rows,
    interaction,
    rounding,
    sparse_update,
)
from trainmark.kernels.cross_layers import cross_layers, cross_layers_reference
from trainmark.kernels.interaction import Launch
from trainmark.kernels.sparse_update import Rule, SortedRows, sort_rows
from trainmark.kernels.table_formats import Rows, Tables, decode, encode, read_rows

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
interpreted = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="kernels run on the GPU here: see tests/gpu"
)

# What a product of numbers in that type, added up in fp32, leaves of a relative error.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm; not a number if a value is not."""
    assert found.shape == exact.shape
    if exact.numel() == 0:
        return 0.0
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


def random(*shape: int, seed: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=source).to(device, dtype)


def random_ids(count: int, high: int, seed: int, device: str) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(0, high, (count,), generator=source, dtype=torch.int32).to(device)


def stored(num_rows: int, dim: int, dtype: torch.dtype, device: str, seed: int = 1) -> Rows:
    return encode(random(num_rows, dim, seed=seed, device=device), dtype)


def one_store(dim: int, dtype: torch.dtype, device: str) -> Tables:
    return Tables(stored(40, dim, dtype, device))


def two_stores(dim: int, dtype: torch.dtype, device: str, features: int) -> Tables:
    """Ids below 40 are good for either."""
    in_second_F = torch.arange(features, device=device) % 3 == 1
    return Tables(
        stored(40, dim, dtype, device), stored(50, dim, torch.float32, device, 2), in_second_F
    )


# --- random bits


@triton.jit
def _bits_kernel(rows, key, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    stream = rounding.mixed(tl.load(key).to(tl.uint32))
    bits = rounding.bits_of_rows(stream, tl.load(rows + row), column)
    place = row[:, None] * COLUMNS + column[None, :]
    tl.store(out + place, bits.to(tl.int32, bitcast=True))


def check_bits(device: str) -> None:
    rows = torch.tensor([0, 5, 2**31 - 1, 2**31, 2**32, 2**40 + 3, 882_774_558, 7], device=device)
    for value in (0, 1, -77, 2**31 - 1):
        key = rounding_key(device, value)
        out = torch.empty(8, 64, dtype=torch.int32, device=device)
        _bits_kernel[(1,)](rows, key, out, ROWS=8, COLUMNS=64)
        assert torch.equal(out, rounding.random_bits(key, rows, 64))
        assert torch.equal(out.cpu(), rounding.random_bits(key.cpu(), rows.cpu(), 64))


# --- interaction


@dataclass(frozen=True)
class Case:
    """An interaction to check."""

    batch: int
    features: int
    dim: int
    dtype: torch.dtype = torch.float32

    def x(self, device: str) -> Tensor:
        return random(self.batch, self.dim, seed=3, device=device, dtype=self.dtype)

    def ids(self, device: str) -> Tensor:
        ids = random_ids(self.batch * self.features, 40, 4, device)
        return ids.view(self.batch, self.features)

    def grad(self, device: str) -> Tensor:
        width = interaction.output_width(self.features, self.dim)
        return random(self.batch, width, seed=5, device=device, dtype=self.dtype)


def exact_interaction(
    x_BD: Tensor, rows_BFD: Tensor, grad_BW: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Output and gradients by autograd in float64."""
    x = x_BD.double().requires_grad_()
    rows = rows_BFD.double().requires_grad_()
    out = interaction.dot_interaction_reference(x, rows)
    grad_x, grad_rows = torch.autograd.grad(out, [x, rows], grad_BW.double())
    return out.detach(), grad_x, grad_rows


def check_gather_interaction(
    case: Case, tables: Tables, device: str, launch: Launch | None = None, wide: bool = False
) -> None:
    """Both passes of the fused kernel against float64."""
    x_BD, grad_BW = case.x(device), case.grad(device)
    ids_BF = case.ids(device).to(torch.int64 if wide else torch.int32)
    # The computing type's rounding of the rows is part of the definition, not an error.
    rows_BFD = gather_rows.gather_rows_reference(ids_BF, tables, case.dtype)
    out, grad_x, grad_rows = exact_interaction(x_BD, rows_BFD, grad_BW)
    found = gather_interaction.forward_triton(x_BD, ids_BF, tables, launch)
    buffer = torch.full_like(rows_BFD, torch.nan)
    finite = torch.ones((), device=device)
    found_x = gather_interaction.backward_triton(
        grad_BW, x_BD, ids_BF, tables, buffer, finite, launch
    )
    tolerance = TOLERANCE[case.dtype]
    used = case.dim + case.features * (case.features + 1) // 2
    assert relative_error(found, out) < tolerance
    assert not found[:, used:].any()
    assert relative_error(found_x, grad_x) < tolerance
    assert relative_error(buffer, grad_rows) < tolerance
    assert finite.item() == 1


def check_gradients_at_rows(case: Case, device: str) -> None:
    """Rows that are looked up once each, in any order: gradients come back in theirs."""
    x_BD, grad_BW = case.x(device), case.grad(device)
    count = case.batch * case.features
    order = torch.randperm(count, generator=torch.Generator().manual_seed(3)).to(device)
    rows_RD = random(count, case.dim, seed=6, device=device, dtype=case.dtype)
    ids_BF = order.view(case.batch, case.features)
    _, grad_x, grad_rows = exact_interaction(x_BD, rows_RD[ids_BF], grad_BW)
    expected = torch.empty(count, case.dim, dtype=torch.float64, device=device)
    expected[order] = grad_rows.flatten(0, 1)
    for backward in (gather_interaction.backward_triton, gather_interaction.backward_reference):
        found = torch.full_like(rows_RD, torch.nan)
        found_x = backward(grad_BW, x_BD, ids_BF, Tables(Rows(rows_RD)), found, None, at_rows=True)
        assert relative_error(found_x, grad_x) < TOLERANCE[case.dtype]
        assert relative_error(found, expected) < TOLERANCE[case.dtype]


def check_interaction_of_rows(case: Case, device: str) -> None:
    """The same from a tensor of rows, through autograd."""
    x_BD, grad_BW = case.x(device), case.grad(device)
    rows_BFD = random(case.batch, case.features, case.dim, seed=6, device=device, dtype=case.dtype)
    wanted = exact_interaction(x_BD, rows_BFD, grad_BW)
    leaves = [x_BD.requires_grad_(), rows_BFD.requires_grad_()]
    out = interaction._TritonInteraction.apply(*leaves)
    found = [out, *torch.autograd.grad(out, leaves, grad_BW)]
    for mine, exact in zip(found, wanted, strict=True):
        assert mine.dtype == case.dtype
        assert relative_error(mine, exact) < TOLERANCE[case.dtype]


def check_gather(case: Case, tables: Tables, device: str) -> None:
    ids_BF = case.ids(device)
    found = gather_rows.gather_rows_triton(ids_BF, tables, case.dtype)
    assert torch.equal(found, gather_rows.gather_rows_reference(ids_BF, tables, case.dtype))


# --- update


def scalars(device: str, lr: float = 0.1, factor: float = 0.5, gate: float = 1.0) -> Tensor:
    return torch.tensor([lr, factor, gate], device=device)


def rounding_key(device: str, value: int = 5) -> Tensor:
    return torch.tensor(value, dtype=torch.int32, device=device)


def new_state(rule: Rule, num_rows: int, dim: int, device: str) -> Tensor | None:
    shapes = {"sgd": None, "rowwise_adagrad": (num_rows,), "adagrad": (num_rows, dim)}
    shape = shapes[rule.name]
    return None if shape is None else torch.full(shape, 0.1, device=device)


def copied(rows: Rows) -> Rows:
    return Rows(rows.codes.clone(), None if rows.scales is None else rows.scales.clone())


def exact_update(
    rows: Rows, state: Tensor | None, ids_N: Tensor, grads_ND: Tensor, rule: Rule
) -> tuple[Tensor, Tensor | None]:
    """Weights and state after one update with `scalars`, in float64, by dense operations."""
    weights = decode(rows).double()
    weights[ids_N.long().unique()] *= 1 - 0.1 * rule.weight_decay
    sums = torch.zeros_like(weights).index_add_(0, ids_N.long(), grads_ND.double()) * 0.5
    if state is None:
        return weights - 0.1 * sums, None
    if rule.name == "adagrad":
        total = state.double() + sums.square()
        return weights - 0.1 * sums / (total.sqrt() + rule.eps), total
    total = state.double() + sums.square().mean(1)
    return weights - 0.1 * sums / (total.sqrt() + rule.eps)[:, None], total


def check_update(
    rows: Rows,
    ids_N: Tensor,
    rule: Rule,
    device: str,
    launch: sparse_update.Launch | None = None,
    grad_dtype: torch.dtype = torch.float32,
) -> None:
    """fp32 rows equal the float64 ones; others are those, or their neighbours in the format."""
    num_rows, dim = rows.codes.shape
    grads_ND = random(ids_N.numel(), dim, seed=7, device=device, dtype=grad_dtype)
    state = new_state(rule, num_rows, dim, device)
    exact, exact_state = exact_update(rows, state, ids_N, grads_ND, rule)
    before = copied(rows)
    sparse_update.update_rows_triton(
        rows, state, sort_rows(ids_N[:, None]), grads_ND, rule, scalars(device),
        rounding_key(device), launch,
    )  # fmt: skip
    if state is not None:
        assert exact_state is not None
        assert relative_error(state, exact_state) < 1e-5
    touched = ids_N.long().unique()
    untouched = torch.ones(num_rows, dtype=torch.bool, device=device)
    untouched[touched] = False
    assert torch.equal(decode(rows)[untouched], decode(before)[untouched])
    check_stored(rows, touched, exact[touched])


def check_stored(rows: Rows, ids: Tensor, exact: Tensor) -> None:
    """Every stored weight is within one step of its format from the exact one."""
    found = read_rows(rows, ids).double()
    if rows.codes.dtype == torch.float32:
        torch.testing.assert_close(found, exact, rtol=2e-5, atol=2e-5)
        return
    info = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float8_e4m3fn: 2**-3}
    step = exact.abs() * info.get(rows.codes.dtype, 0.0)
    if rows.scales is not None:
        largest = exact.abs().amax(1, keepdim=True)
        step = largest / 127 if rows.codes.dtype == torch.int8 else step + largest / 448 / 512
    assert ((found - exact).abs() <= step * 1.001 + 2e-5).all()
    if ids.numel():
        assert (found != exact).any()


def sorted_one(ids_N: Tensor) -> SortedRows:
    return sort_rows(ids_N[:, None])


# --- copies


def check_copies(dim: int | None, device: str, table_device: str, num_rows: int = 5000) -> None:
    """Lists with rows that the table does not have, read and written; `dim` None: no columns."""
    shape = () if dim is None else (dim,)
    for count in (0, 1, 33, 2 * num_rows // 3):
        rows = torch.randperm(num_rows, generator=torch.Generator().manual_seed(1))[:count].int()
        rows[::3] = num_rows + 7
        table, listed = random(num_rows, *shape, seed=2, device="cpu"), torch.ones(count, *shape)
        there = rows < num_rows
        expected = listed.clone()
        expected[there] = table[rows[there]]
        held = table.to(table_device)
        if device != table_device:
            held = held.pin_memory()
        found = listed.to(device)
        copy_rows.copy_rows_triton(held, rows.to(device), found, to_table=False)
        assert torch.equal(found.cpu(), expected)

        expected = table.clone()
        expected[rows[there]] = listed[there] * 3
        copy_rows.copy_rows_triton(held, rows.to(device), listed.to(device) * 3, to_table=True)
        if device != "cpu":
            torch.accelerator.synchronize()
        assert torch.equal(held.cpu(), expected)


def check_cross_layers(
    layers: int, rank: int | None, dtype: torch.dtype, device: str, *, samples: int, width: int
) -> None:
    """Results and gradients against float64."""
    inner, size = rank or width, 1.5 / width**0.5  # so that fp16 holds what three layers give

    def parameters(*shape: int) -> list[Tensor]:
        return [
            (size * random(*shape, seed=10 * len(shape) + i, device=device)).requires_grad_()
            for i in range(layers)
        ]

    ups, biases = parameters(width, inner), parameters(width)
    downs = parameters(inner, width) if rank else []
    first = random(samples, width, seed=1, device=device).to(dtype).requires_grad_()
    used = [first, *ups, *biases, *downs]
    upstream = random(samples, width, seed=2, device=device)
    given = upstream.to(dtype)
    ours = cross_layers(first, downs, ups, biases)
    found = torch.autograd.grad(ours, used, given)
    assert given.equal(upstream.to(dtype))  # who handed it on may still need it

    def exact(tensors: list[Tensor]) -> list[Tensor]:
        return [t.detach().double().requires_grad_() for t in tensors]

    first_64, ups_64, biases_64, downs_64 = exact([first]), exact(ups), exact(biases), exact(downs)
    plain = cross_layers_reference(first_64[0], downs_64, ups_64, biases_64)
    wanted = torch.autograd.grad(
        plain, [*first_64, *ups_64, *biases_64, *downs_64], upstream.double()
    )
    tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    assert relative_error(ours, plain) < tolerance
    for one, other in zip(found, wanted, strict=True):
        assert relative_error(one, other) < tolerance
