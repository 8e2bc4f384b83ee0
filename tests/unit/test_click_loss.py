"""The last layer with its loss, against float64 autograd."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trainmark.kernels import click_loss as kernel
from trainmark.kernels import compiled

triton = pytest.importorskip("triton")
Compute = Callable[..., kernel.LossGradients]


def float64(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    labels: Tensor,
    scale: Tensor,
    positive_weight: float = 1.0,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Gradients by autograd, of a ReLU's input that is its output where that is positive."""
    before = torch.where(x > 0, x, -1.0).double().requires_grad_()
    weight, bias = (t.double().requires_grad_() for t in (weight, bias))
    logits = (before.relu() @ weight.t() + bias).squeeze(-1)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(
        logits,
        labels.double(),
        reduction="sum",
        pos_weight=torch.tensor(positive_weight, device=x.device).double(),
    )
    grads = torch.autograd.grad(scale.double() * loss, [before, weight, bias])
    return loss.detach(), grads


def inputs(
    samples: int, width: int, dtype: torch.dtype, device: str, spread: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    random = torch.Generator(device).manual_seed(samples * 1000 + width)
    x = torch.randn(samples, width, device=device, generator=random).relu().to(dtype)
    weight = spread * torch.randn(1, width, device=device, generator=random)
    bias = torch.randn(1, device=device, generator=random)
    labels = (torch.rand(samples, device=device, generator=random) < 0.3).float()
    return x, weight, bias, labels, torch.tensor(1 / max(samples, 1), device=device)


def check(
    compute: Compute,
    samples: int,
    width: int,
    dtype: torch.dtype,
    device: str,
    spread: float = 1.0,
    positive_weight: float = 1.0,
) -> None:
    args = (*inputs(samples, width, dtype, device, spread), positive_weight)
    found = compute(*args)
    loss, (grad_x, grad_weight, grad_bias) = float64(*args)
    rounding = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    assert found.inputs_BM.dtype == dtype
    assert found.loss.isfinite()
    for mine, theirs, bound in (
        (found.loss, loss, 1e-5),
        (found.inputs_BM, grad_x, rounding),
        (found.weight_1M, grad_weight, 1e-5),
        (found.bias_1, grad_bias, 1e-5),
    ):
        assert mine.shape == theirs.shape
        size = max(theirs.norm(), grad_bias.abs().max())
        assert (mine.double() - theirs).norm() <= bound * size


COMPILED = [kernel.click_loss_compiled] if compiled.INSTALLED else []
SHAPES = [(1, 1), (5, 3), (64, 256), (70, 100), (257, 16), (9, 1500)]


@pytest.mark.parametrize(("samples", "width"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel(samples: int, width: int, dtype: torch.dtype) -> None:
    check(kernel.click_loss_triton, samples, width, dtype, "cpu")


@pytest.mark.parametrize(
    "compute", [kernel.click_loss_triton, kernel.click_loss_reference, *COMPILED]
)
@pytest.mark.parametrize("positive_weight", [0.25, 7.0])
def test_clicks_that_count_more_or_less(compute: Compute, positive_weight: float) -> None:
    check(compute, 70, 100, torch.float32, "cpu", positive_weight=positive_weight)


@pytest.mark.parametrize("compute", [kernel.click_loss_triton, kernel.click_loss_reference])
def test_extreme_logits(compute: Compute) -> None:
    """Logits of some hundreds, where a naive sigmoid overflows."""
    check(compute, 50, 40, torch.float32, "cpu", spread=100.0)


@pytest.mark.parametrize(("samples", "width"), SHAPES)
def test_reference(samples: int, width: int) -> None:
    check(kernel.click_loss_reference, samples, width, torch.float32, "cpu")


@pytest.mark.parametrize("compute", COMPILED)
@pytest.mark.parametrize(("samples", "width"), [*SHAPES, (700, 128)])
def test_compiled(compute: Compute, samples: int, width: int) -> None:
    check(compute, samples, width, torch.float32, "cpu")


def test_programs_with_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "PROGRAMS", 3)
    check(kernel.click_loss_triton, 1001, 300, torch.float32, "cpu")


@pytest.mark.parametrize("compute", [kernel.click_loss_triton, *COMPILED])
def test_no_samples(compute: Compute) -> None:
    found = compute(*inputs(0, 8, torch.float32, "cpu"))
    assert found.loss == 0
    assert not found.weight_1M.any()
    assert found.inputs_BM.shape == (0, 8)


def test_autograd() -> None:
    x, weight, bias, labels, scale = inputs(33, 12, torch.float32, "cpu")
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    loss = kernel.click_loss(x, weight, bias, labels, scale)
    loss.backward()
    exact_loss, exact = float64(x.detach(), weight.detach(), bias.detach(), labels, scale)
    torch.testing.assert_close(loss.detach().double(), exact_loss)
    for leaf, gradient in zip(leaves, exact, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad.double(), gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("samples", "width"), [(0, 8), *SHAPES, (65536, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_a_gpu(samples: int, width: int, dtype: torch.dtype) -> None:
    check(kernel.click_loss_triton, samples, width, dtype, "cuda")
    check(kernel.click_loss_triton, samples, width, dtype, "cuda", positive_weight=3.0)
