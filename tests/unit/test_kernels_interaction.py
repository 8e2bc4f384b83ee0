"""Lookup and interaction in Triton's interpreter, over odd shapes, against float64."""

import itertools

import pytest
import torch

from tests.embedding_kernels import (
    Case,
    check_gather,
    check_gather_interaction,
    check_gradients_at_rows,
    check_interaction_of_rows,
    interpreted,
    one_store,
    relative_error,
    two_stores,
)
from trainmark.kernels import gather_interaction as fused
from trainmark.kernels import interaction
from trainmark.kernels.interaction import Launch
from trainmark.kernels.table_formats import FORMATS, Rows, Tables, decode

FP32, FP16 = torch.float32, torch.float16

# Batches, features and widths: each odd one at least once, and the real one.
CASES = [
    Case(0, 26, 128),
    Case(1, 1, 16),
    Case(3, 2, 24),
    Case(3, 26, 128),
    Case(2, 27, 100),
    Case(1, 40, 256),
    Case(1, 64, 64),
    Case(1, 2, 512),
    Case(1, 64, 512),
    Case(3, 26, 128, FP16),
    Case(2, 27, 100, FP16),
    Case(33, 3, 16, FP16),
    Case(2, 1, 512, FP16),
    Case(1, 64, 256, FP16),
]


@interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fused_passes_are_exact(case: Case) -> None:
    check_gather_interaction(case, one_store(case.dim, FP32, "cpu"), "cpu")


@interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_go_where_the_rows_came_from(case: Case) -> None:
    check_gradients_at_rows(case, "cpu")


@interpreted
@pytest.mark.parametrize("table_format", FORMATS)
def test_fused_passes_from_any_format_beside_fp32(table_format: str) -> None:
    case = Case(2, 5, 24)
    check_gather_interaction(case, one_store(24, FORMATS[table_format], "cpu"), "cpu")
    check_gather_interaction(case, two_stores(24, FORMATS[table_format], "cpu", 5), "cpu")


@interpreted
@pytest.mark.parametrize("case", [Case(2, 26, 256, FP16), Case(1, 1, 512, FP16)], ids=str)
def test_long_rows_of_two_formats(case: Case) -> None:
    """Which are read in larger pieces than those of one."""
    check_gather_interaction(case, two_stores(case.dim, torch.int8, "cpu", case.features), "cpu")


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
def test_a_warp_is_given_what_its_registers_hold(dtype: torch.dtype) -> None:
    one, two = one_store(16, FP32, "cpu"), two_stores(16, torch.int8, "cpu", 1)
    for features, dim, tables in itertools.product(range(1, 65), (16, 24, 128, 512), (one, two)):
        launch = interaction.default_launch(features, dim, tables, dtype)
        assert launch.columns in (16, 32, 64, 128, 256, 512)
        tile = interaction._padded_vectors(features) * launch.columns
        assert tile <= launch.warps * (4096 if dtype == FP16 else 1024)


@interpreted
@pytest.mark.parametrize("launch", [Launch(16, 4), Launch(32, 1), Launch(64, 8)], ids=str)
def test_no_way_of_cutting_the_work_changes_it(launch: Launch) -> None:
    case = Case(5, 9, 40)
    check_gather_interaction(case, two_stores(40, torch.int8, "cpu", 9), "cpu", launch)


@interpreted
def test_ids_of_64_bits() -> None:
    check_gather_interaction(Case(3, 4, 16), one_store(16, FP32, "cpu"), "cpu", wide=True)


@interpreted
@pytest.mark.parametrize("case", [Case(0, 3, 16), Case(2, 0, 16), Case(3, 5, 24, FP16)], ids=str)
def test_interaction_of_rows(case: Case) -> None:
    check_interaction_of_rows(case, "cpu")


@interpreted
@pytest.mark.parametrize("table_format", FORMATS)
@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_gathered_rows_are_the_reference(table_format: str, dtype: torch.dtype) -> None:
    for case in (Case(33, 3, 100, dtype), Case(0, 3, 100, dtype)):
        check_gather(case, one_store(100, FORMATS[table_format], "cpu"), "cpu")
        check_gather(case, two_stores(100, FORMATS[table_format], "cpu", 3), "cpu")


@interpreted
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 60000.0])
def test_gradients_that_are_not_finite_are_noticed(value: float) -> None:
    """60000 is a number in fp16; its products are not."""
    case = Case(3, 4, 16, FP16)
    tables = Tables(Rows(torch.full((40, 16), 4.0)))
    x, ids, grad = case.x("cpu"), case.ids("cpu"), case.grad("cpu")
    buffer = torch.empty(3, 4, 16, dtype=FP16)
    for changed, expected in ((False, 1), (True, 0)):
        if changed:
            grad[1, 16 + 2] = value
        for backward in (fused.backward_triton, fused.backward_reference):
            finite = torch.ones(())
            backward(grad, x, ids, tables, buffer, finite)
            assert finite.item() == expected


@pytest.mark.parametrize("second", [True, False])
def test_autograd_fills_the_buffer(second: bool) -> None:
    """As CPU runs use it; autograd differentiates the same from dense tables."""
    case = Case(7, 5, 12)
    tables = two_stores(12, FP32, "cpu", 5) if second else one_store(12, FP32, "cpu")
    x, ids, grad = case.x("cpu").requires_grad_(), case.ids("cpu"), case.grad("cpu")
    buffer = torch.empty(7, 5, 12)
    out = fused.gather_interaction(x, ids, tables, buffer)
    (found_x,) = torch.autograd.grad(out, x, grad)

    stores = [decode(tables.first), decode(tables.second or tables.first)]
    rows = torch.stack([stores[second and f % 3 == 1][ids[:, f].long()] for f in range(5)], 1)
    rows.requires_grad_()
    wanted = interaction.dot_interaction_reference(x, rows)
    assert relative_error(out, wanted) < 1e-6
    wanted_x, wanted_rows = torch.autograd.grad(wanted, [x, rows], grad)
    assert relative_error(found_x, wanted_x) < 1e-6
    assert relative_error(buffer, wanted_rows) < 1e-6


def test_prediction_needs_no_buffer() -> None:
    case = Case(2, 3, 8)
    with torch.no_grad():
        out = fused.gather_interaction(case.x("cpu"), case.ids("cpu"), one_store(8, FP32, "cpu"))
    assert out.shape == (2, interaction.output_width(3, 8))
