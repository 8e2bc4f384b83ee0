"""The embedding path's kernels on a GPU, over all types, against float64 and plain torch."""

import pytest
import torch

from tests.embedding_kernels import (
    Case,
    check_bits,
    check_copies,
    check_cross_layers,
    check_gather,
    check_gather_interaction,
    check_gradients_at_rows,
    check_interaction_of_rows,
    check_stored,
    check_update,
    copied,
    new_state,
    one_store,
    random,
    random_ids,
    rounding_key,
    scalars,
    sorted_one,
    stored,
    two_stores,
)
from trainmark.kernels import interaction, sparse_update
from trainmark.kernels.gather_interaction import gather_interaction
from trainmark.kernels.interaction import Launch
from trainmark.kernels.sparse_update import Rule, RuleName, update_rows, update_rows_reference
from trainmark.kernels.table_formats import (
    FORMATS,
    LARGEST_CODE,
    Rows,
    Tables,
    decode,
    read_rows,
    write_rows,
)

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
RULES: list[RuleName] = ["sgd", "rowwise_adagrad", "adagrad"]
SHAPES = [
    (0, 26, 128), (1, 1, 16), (3, 2, 24), (33, 26, 128), (33, 27, 100), (3, 40, 256), (3, 64, 64),
    (3, 64, 512), (33, 26, 64), (1, 2, 512),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_interaction(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    case = Case(*shape, dtype)
    check_gather_interaction(case, one_store(case.dim, torch.float32, "cuda"), "cuda")
    check_interaction_of_rows(case, "cuda")
    check_gradients_at_rows(case, "cuda")


@pytest.mark.parametrize("dim", [None, 1, 24, 128, 512])
def test_copies_of_rows_of_the_host_and_of_the_device(dim: int | None) -> None:
    check_copies(dim, "cuda", "cpu")
    check_copies(dim, "cuda", "cuda", num_rows=100_000)


@pytest.mark.gpu_full  # many kernels to compile
@pytest.mark.parametrize("shape", [(33, 26, 128), (9, 26, 256), (9, 3, 512), (3, 64, 64)], ids=str)
@pytest.mark.parametrize("table_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_format_beside_fp32(
    table_format: str, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    case = Case(*shape, dtype)
    for tables in (
        one_store(case.dim, FORMATS[table_format], "cuda"),
        two_stores(case.dim, FORMATS[table_format], "cuda", case.features),
    ):
        check_gather_interaction(case, tables, "cuda")
        check_gather_interaction(case, tables, "cuda", wide=True)
        check_gather(case, tables, "cuda")


@pytest.mark.parametrize(
    "launch", [Launch(128, warps=8), Launch(64, warps=1), Launch(32, warps=2)], ids=str
)
def test_no_way_of_cutting_the_work_changes_it(launch: Launch) -> None:
    case = Case(33, 26, 128, torch.bfloat16)
    check_gather_interaction(case, two_stores(128, torch.int8, "cuda", 26), "cuda", launch)


def test_the_precision_of_fp32_products_follows_torchs_switch() -> None:
    case = Case(64, 26, 128)
    tables = one_store(128, torch.float32, "cuda")
    ids = case.ids("cuda")
    exact = interaction.launch_forward(case.x("cuda"), ids, tables, 26)
    try:
        torch.set_float32_matmul_precision("high")
        rough = interaction.launch_forward(case.x("cuda"), ids, tables, 26)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert 1e-5 < (exact - rough).norm() / exact.norm() < 2e-3


@pytest.mark.gpu_full
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("table_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_update(table_format: str, name: RuleName, dtype: torch.dtype) -> None:
    """Rows of their own, duplicates, and rows with thousands of entries."""
    parts = [random_ids(3000, 900, 1, "cuda"), random_ids(9000, 3, 2, "cuda") + 950]
    for dim in (16, 100, 128, 512):
        rows = stored(960, dim, FORMATS[table_format], "cuda")
        rule = Rule(name, weight_decay=3.0 if dim == 100 else 0.0)
        check_update(rows, torch.cat(parts), rule, "cuda", grad_dtype=dtype)


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 1025])
def test_update_of_odd_sizes(count: int) -> None:
    for high in (1, 1000):
        ids_N = random_ids(count, high, 3, "cuda")
        check_update(stored(1000, 64, torch.float32, "cuda"), ids_N, Rule("adagrad"), "cuda")


@pytest.mark.parametrize("table_format", FORMATS)
def test_update_rounds_as_plain_torch(table_format: str) -> None:
    ids_N, grads = random_ids(5000, 4000, 4, "cuda"), random(5000, 128, seed=8, device="cuda")
    mine = stored(4000, 128, FORMATS[table_format], "cuda")
    reference = copied(mine)
    for rows, update in ((mine, update_rows), (reference, update_rows_reference)):
        update(
            rows, None, sorted_one(ids_N), grads, Rule("sgd"), scalars("cuda"), rounding_key("cuda")
        )
    close = torch.isclose(decode(mine), decode(reference), rtol=1e-5, atol=1e-6)
    assert close.float().mean() > 0.999


def test_updates_are_repeatable_bit_for_bit() -> None:
    ids_N = torch.cat([random_ids(200_000, 50, 5, "cuda"), random_ids(100_000, 90_000, 6, "cuda")])
    grads = random(300_000, 128, seed=9, device="cuda", dtype=torch.bfloat16)
    found = []
    for _ in range(3):
        rows, state = stored(90_000, 128, torch.int8, "cuda"), torch.zeros(90_000, device="cuda")
        update_rows(
            rows, state, sorted_one(ids_N), grads, Rule("rowwise_adagrad"), scalars("cuda"),
            rounding_key("cuda"),
        )  # fmt: skip
        assert rows.scales is not None
        assert state is not None
        found.append((rows.codes, rows.scales, state))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_step_lives_in_a_cuda_graph() -> None:
    """Sort, both passes and update, replayed with other inputs, learning rate and key."""
    B, F, D = 256, 26, 64
    tables = Tables(stored(500, D, torch.int8, "cuda"))
    eager = copied(tables.first)
    x = random(B, D, seed=1, device="cuda", dtype=torch.bfloat16).requires_grad_()
    ids = random_ids(B * F, 500, 2, "cuda").view(B, F)
    grad = random(B, interaction.output_width(F, D), seed=3, device="cuda", dtype=torch.bfloat16)
    buffer = torch.empty(B, F, D, device="cuda", dtype=torch.bfloat16)
    settings, key = scalars("cuda", lr=0.0), rounding_key("cuda")

    def step(rows: Rows) -> None:
        out = gather_interaction(x, ids, Tables(rows), buffer)
        torch.autograd.grad(out, x, grad)
        batch = sparse_update.sort_rows(ids)
        update_rows(rows, None, batch, buffer.flatten(0, 1), Rule("sgd"), settings, key)

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        step(copied(eager))
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(tables.first)
    for replay in range(3):
        ids.copy_(random_ids(B * F, 500, 10 + replay, "cuda").view(B, F))
        settings.copy_(scalars("cuda", lr=0.01 * (replay + 1)))
        key.fill_(replay)
        graph.replay()
        step(eager)
    assert torch.equal(tables.first.codes, eager.codes)
    assert torch.equal(decode(tables.first), decode(eager))


@pytest.mark.parametrize("dtype", LARGEST_CODE, ids=str)
def test_rows_beyond_2_to_the_31_weights(dtype: torch.dtype) -> None:
    D, count = 128, 200
    num_rows = 2**31 // D + 1000
    codes = torch.zeros(num_rows, D, device="cuda", dtype=torch.int8).view(dtype)
    rows = Rows(codes, torch.zeros(num_rows, device="cuda"))
    last = torch.arange(num_rows - count, num_rows, device="cuda")
    write_rows(rows, last, random(count, D, seed=1, device="cuda"))
    before = read_rows(rows, last)

    x, ids = random(40, D, seed=2, device="cuda"), last.int().view(40, 5)
    near = torch.arange(count, device="cuda", dtype=torch.int32).view(40, 5)
    found = interaction.launch_forward(x, ids, Tables(rows), 5)
    assert torch.equal(found, interaction.launch_forward(x, near, Tables(Rows(before)), 5))

    grads = random(count, D, seed=3, device="cuda")
    settings, key = scalars("cuda", lr=0.1, factor=1.0), rounding_key("cuda")
    update_rows(rows, None, sorted_one(last.int()), grads, Rule("sgd"), settings, key)
    check_stored(rows, last, before.double() - 0.1 * grads.double())
    assert not rows.scales[:-count].any()  # type: ignore[index]


def test_bits_are_the_same_in_triton_and_torch() -> None:
    check_bits("cuda")


def test_state_of_untouched_rows_stays() -> None:
    state = new_state(Rule("adagrad"), 100, 16, "cuda")
    assert state is not None
    ids_N = torch.tensor([3], device="cuda", dtype=torch.int32)
    update_rows(
        stored(100, 16, torch.float32, "cuda"), state, sorted_one(ids_N),
        random(1, 16, seed=1, device="cuda"), Rule("adagrad"), scalars("cuda"),
        rounding_key("cuda"),
    )  # fmt: skip
    changed = (state != 0.1).any(1).nonzero().flatten().tolist()
    assert changed == [3]


@pytest.mark.parametrize(("layers", "rank"), [(1, 8), (3, 64), (3, None)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_layers(layers: int, rank: int | None, dtype: torch.dtype) -> None:
    check_cross_layers(layers, rank, dtype, "cuda", samples=1000, width=136)
