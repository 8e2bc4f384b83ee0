"""Bags of rows and cross layers in Triton's interpreter, by numba and in plain torch."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from tests.embedding_kernels import (
    check_cross_layers,
    interpreted,
    random,
    relative_error,
    rounding_key,
    scalars,
    stored,
)
from trainmark.kernels import cross_layers as cross
from trainmark.kernels import pool_rows as pooling
from trainmark.kernels.compiled import INSTALLED
from trainmark.kernels.pool_rows import BagBlock, Bags
from trainmark.kernels.sparse_update import (
    Rule,
    SortedRows,
    sort_rows,
    update_rows_reference,
    update_rows_triton,
)
from trainmark.kernels.table_formats import FORMATS, Rows, Tables, decode

SAMPLES, HOTNESS = 11, (3, 1, 9)
CPU = torch.device("cpu")
NEEDS_NUMBA = pytest.mark.skipif(not INSTALLED, reason="needs numba (extra `fast`)")


def bags_beside_a_vector(offsets: tuple[int, ...] = (0, 0, 0), by_sample: bool = True) -> Bags:
    blocks, first = [], 0
    for feature, (hotness, offset) in enumerate(zip(HOTNESS, offsets, strict=True)):
        steps = (1, hotness) if by_sample else (SAMPLES, 1)
        blocks.append(
            BagBlock(first, *steps, hotness, SAMPLES, feature + 1, len(HOTNESS) + 1, offset)
        )
        first += SAMPLES * hotness
    return Bags(blocks, CPU)


def ids_with_gaps(rows: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """A quarter of them -1; the third feature of sample 2 has none at all."""
    source = torch.Generator().manual_seed(7)
    count = SAMPLES * sum(HOTNESS)
    ids = torch.randint(0, rows, (count,), generator=source).to(dtype)
    ids[torch.rand(count, generator=source) < 0.25] = -1
    empty = SAMPLES * 4 + 2 * 9
    ids[empty : empty + 9] = -1
    return ids


def by_torch(ids: Tensor, weight: Tensor) -> Tensor:
    """[samples, features, width] by torch's own bags, in float64."""
    found, first = [], 0
    for hotness in HOTNESS:
        of_feature = ids[first : first + SAMPLES * hotness].view(SAMPLES, hotness).long()
        there = (of_feature >= 0).double()
        sums = embedding_bag(
            of_feature.clamp(min=0), weight.double(), mode="sum", per_sample_weights=there
        )
        found.append(sums)
        first += SAMPLES * hotness
    return torch.stack(found, dim=1)


def pooled(kernel: str, ids: Tensor, bags: Bags, tables: Tables, dtype: torch.dtype) -> Tensor:
    out = torch.full((SAMPLES, len(HOTNESS) + 1, tables.first.codes.shape[1]), 5.0, dtype=dtype)
    getattr(pooling, kernel)(ids, bags, tables, out.view(-1, out.shape[2]))
    assert (out[:, 0] == 5).all()  # left for the dense vector
    return out[:, 1:]


KERNELS = [
    pytest.param("pool_rows_triton", marks=interpreted),
    "pool_rows_reference",
    pytest.param("pool_rows", marks=NEEDS_NUMBA),
]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("ids_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("dim", [8, 20])
def test_sums_are_those_of_torchs_bags(kernel: str, ids_type: torch.dtype, dim: int) -> None:
    rows = stored(40, dim, torch.float32, "cpu")
    ids = ids_with_gaps(40, ids_type)
    found = pooled(kernel, ids, bags_beside_a_vector(), Tables(rows), torch.float32)
    assert relative_error(found, by_torch(ids, rows.codes)) < 1e-6
    assert (found[2, 2] == 0).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_ids_may_lie_by_their_place_in_the_bag(kernel: str) -> None:
    rows, ids = stored(40, 8, torch.float32, "cpu"), ids_with_gaps(40)
    parts = ids.split([SAMPLES * hotness for hotness in HOTNESS])
    turned = torch.cat([part.view(SAMPLES, -1).t().reshape(-1) for part in parts])
    bags = bags_beside_a_vector(by_sample=False)
    found = pooled(kernel, turned, bags, Tables(rows), torch.float32)
    assert relative_error(found, by_torch(ids, rows.codes)) < 1e-6
    of_ids = bags_beside_a_vector().row_of_id.split([SAMPLES * hotness for hotness in HOTNESS])
    expected = torch.cat([part.view(SAMPLES, -1).t().reshape(-1) for part in of_ids])
    assert torch.equal(bags.row_of_id, expected)


@interpreted
@pytest.mark.parametrize("by_sample", [True, False])
def test_rows_of_sorted_ids_are_those_of_the_list(by_sample: bool) -> None:
    bags = bags_beside_a_vector(by_sample=by_sample)
    places = torch.randperm(SAMPLES * sum(HOTNESS), generator=torch.Generator().manual_seed(1))
    found = pooling.rows_of_triton(places, bags)
    assert torch.equal(found, bags.row_of_id[places].int())
    assert torch.equal(bags.rows_of(places), bags.row_of_id[places])


@pytest.mark.parametrize("kernel", KERNELS)
def test_ids_may_be_part_of_a_longer_list(kernel: str) -> None:
    """As those of one store are, of all that a rank is asked for."""
    rows, ids = stored(40, 8, torch.float32, "cpu"), ids_with_gaps(40)
    part = torch.cat([ids.new_tensor([1, 2, 3]), ids])[3:]
    found = pooled(kernel, part, bags_beside_a_vector(), Tables(rows), torch.float32)
    assert relative_error(found, by_torch(ids, rows.codes)) < 1e-6


@interpreted
@pytest.mark.parametrize("table_format", FORMATS)
def test_sums_from_any_format_beside_fp32(table_format: str) -> None:
    second, first = (
        stored(40, 16, FORMATS[table_format], "cpu"),
        stored(30, 16, torch.float32, "cpu"),
    )
    ids = ids_with_gaps(30)
    offset = 31
    bags = bags_beside_a_vector((0, offset, offset))
    with_offset = ids.clone()
    with_offset[SAMPLES * 3 :] += offset
    tables = Tables(first, second, torch.tensor([False, True, True]))
    found = pooled("pool_rows_triton", with_offset, bags, tables, torch.float32)
    exact = torch.cat(
        [by_torch(ids, first.codes)[:, :1], by_torch(ids, decode(second))[:, 1:]], dim=1
    )
    assert relative_error(found, exact) < 1e-6
    plain = pooled("pool_rows_reference", with_offset, bags, tables, torch.float16)
    assert torch.equal(plain, pooled("pool_rows_triton", with_offset, bags, tables, torch.float16))


@pytest.mark.parametrize("kernel", [pytest.param(True, marks=interpreted), False])
def test_an_update_reads_a_bags_gradient_for_each_of_its_ids(kernel: bool) -> None:
    bags, ids = bags_beside_a_vector(), ids_with_gaps(40)
    grads = random(SAMPLES * 4, 16, seed=3, device="cpu")
    weight = torch.nn.Parameter(random(40, 16, seed=4, device="cpu").double())
    (by_torch(ids, weight) * grads.view(SAMPLES, 4, 16)[:, 1:]).sum().backward()
    assert weight.grad is not None
    in_order = sort_rows(ids)
    batch = SortedRows(in_order.rows_N, bags.row_of_id[in_order.places_N])
    found = Rows(weight.detach().float())
    update = update_rows_triton if kernel else update_rows_reference
    update(found, None, batch, grads, Rule("sgd"), scalars("cpu", lr=1.0, factor=1.0), None)
    assert relative_error(found.codes, weight.detach() - weight.grad) < 1e-6


# --- state of 16 bits


def state_after(
    update: object, steps: int, key: int | None, square: float, begin: float = 0.0
) -> Tensor:
    rows, state = Rows(torch.zeros(8, 16)), torch.full((8, 16), begin, dtype=torch.bfloat16)
    batch = sort_rows(torch.arange(8, dtype=torch.int32))
    grads = torch.full((8, 16), square**0.5)
    for step in range(steps):
        rounds = None if key is None else rounding_key("cpu", key + step)
        update(rows, state, batch, grads, Rule("adagrad"), scalars("cpu", factor=1.0), rounds)  # type: ignore[operator]
    return state


@pytest.mark.parametrize(
    "update", [pytest.param(update_rows_triton, marks=interpreted), update_rows_reference]
)
def test_small_squares_add_up_in_bf16_by_chance_alone(update: object) -> None:
    """To nearest, 256 is where a sum of ones stays in bf16."""
    assert (state_after(update, 3, None, 1.0, begin=256) == 256).all()
    by_chance = state_after(update, 10, 11, 1.0, begin=256).float()
    assert abs(by_chance.mean() - 266) < 1.5
    tiny = state_after(update, 8, 11, 1e-13)  # fp16 would hold 0
    assert abs(tiny.float().mean() / 8e-13 - 1) < 0.01


@interpreted
def test_both_updates_round_the_state_alike() -> None:
    states = [state_after(u, 5, 3, 0.37) for u in (update_rows_triton, update_rows_reference)]
    assert torch.equal(*states)


# --- cross layers


@interpreted
@pytest.mark.parametrize(("layers", "rank"), [(1, 4), (2, 4), (3, 4), (3, None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_cross_layers_are_plain_torchs(
    layers: int, rank: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross, "has_kernel", lambda x: True)
    monkeypatch.setattr(cross, "weight_gradient", lambda g, x: g.float().t() @ x.float())
    monkeypatch.setattr(
        cross, "SUM_PROGRAMS", 2
    )  # so that each has several tiles, the last in part
    check_cross_layers(layers, rank, dtype, "cpu", samples=70, width=131)


def test_products_of_a_rank_without_samples_are_left_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cuBLASLt refuses such factors."""
    rows: list[int] = []
    monkeypatch.setattr(cross.cublaslt, "run", lambda gemm: bool(rows.append(len(gemm.left))))
    for samples in (0, 3):
        left, right = torch.ones(samples, 4).bfloat16(), torch.ones(4, 8).bfloat16()
        found = cross._product_and_sum(left, right, torch.ones(samples, 8).bfloat16())
        assert torch.equal(found, torch.full((samples, 8), 5.0).bfloat16())
    assert rows == [3]
