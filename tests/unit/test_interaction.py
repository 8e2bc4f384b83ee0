"""The interaction whose backward pass is written by hand, against autograd's."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trainmark.kernels.interaction import dot_interaction, dot_interaction_reference

Interaction = Callable[[Tensor, Tensor], Tensor]


def gradients(
    interaction: Interaction, x: Tensor, rows: Tensor, weights: Tensor
) -> tuple[Tensor, ...]:
    x, rows = x.detach().requires_grad_(), rows.detach().requires_grad_()
    (interaction(x, rows) * weights).sum().backward()
    assert x.grad is not None
    assert rows.grad is not None
    return x.grad, rows.grad


# 0 rows, an output with padding (3, 8) and without (2, 5), a real one.
SHAPES = [(0, 4), (1, 1), (2, 5), (3, 8), (26, 64)]


@pytest.mark.parametrize(("num_rows", "dim"), SHAPES)
def test_value_and_gradient_are_autograds(num_rows: int, dim: int) -> None:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(6, dim, generator=random, dtype=torch.float64)
    rows = torch.randn(6, num_rows, dim, generator=random, dtype=torch.float64)
    expected = dot_interaction_reference(x, rows)
    assert torch.equal(dot_interaction(x, rows), expected)
    weights = torch.randn(expected.shape, generator=random, dtype=torch.float64)
    found = gradients(dot_interaction, x, rows, weights)
    torch.testing.assert_close(found, gradients(dot_interaction_reference, x, rows, weights))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(2)
    x = torch.randn(16, 8, generator=random).to(dtype)
    rows = torch.randn(16, 5, 8, generator=random).to(dtype)
    found = dot_interaction(x, rows)
    assert found.dtype == dtype
    weights = torch.randn(found.shape, generator=random).to(dtype)
    exact = gradients(dot_interaction_reference, x.double(), rows.double(), weights.double())
    for mine, right in zip(gradients(dot_interaction, x, rows, weights), exact, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), right, rtol=0.05, atol=0.1)
