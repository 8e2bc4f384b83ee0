"""The fused perceptron against autograd in float64, and its kernels in Triton's interpreter."""

import itertools
import os

import pytest
import torch
from torch import Tensor

from trainmark.kernels import relu_mlp as kernel
from trainmark.kernels.relu_mlp import masked_sums_reference, relu_mlp_reference

WIDTHS = [(13, 8, 4), (5, 1), (7, 16, 16, 3, 1), (1, 1)]
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels run on a CPU if interpreted"
)


def layers(widths: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    pairs = list(itertools.pairwise(widths))
    weights = [torch.randn(o, i, dtype=dtype, requires_grad=True) for i, o in pairs]
    biases = [torch.randn(o, dtype=dtype, requires_grad=True) for _, o in pairs]
    return weights, biases


@pytest.mark.parametrize("last_relu", [True, False])
@pytest.mark.parametrize("samples", [0, 1, 33])
@pytest.mark.parametrize("widths", WIDTHS)
def test_forward_and_gradients(
    widths: tuple[int, ...], samples: int, last_relu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hand-written backward pass, with plain torch for its kernels."""
    torch.manual_seed(0)
    weights, biases = layers(widths, torch.float64)
    x = torch.randn(samples, widths[0], dtype=torch.float64, requires_grad=True)
    monkeypatch.setattr(kernel, "_relu_product", lambda b, x, w: torch.addmm(b, x, w).relu())
    monkeypatch.setattr(kernel, "_weight_gradient", lambda g, x: g.t() @ x)
    parameters = [x, *weights, *biases]
    expected = relu_mlp_reference(x, weights, biases, last_relu)
    ours = kernel._ReluMlp.apply(x, last_relu, *weights, *biases)
    torch.testing.assert_close(ours, expected)
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, parameters, upstream)
    got = torch.autograd.grad(ours, parameters, upstream)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-6, atol=1e-6)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (65, 129), (64, 128), (200, 3)])
def test_masked_sums(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gradient, output = torch.randn(shape).to(dtype), torch.randn(shape).relu().to(dtype)
    masked, sums = kernel._masked_sums(gradient, output)
    expected, expected_sums = masked_sums_reference(gradient, output)
    assert torch.equal(masked, expected)
    torch.testing.assert_close(sums, expected_sums, rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("shape", [(1, 64, 64), (130, 70, 300), (128, 128, 256), (5, 65, 7)])
def test_masked_product(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    samples, outputs, inputs = shape
    gradient = torch.randn(samples, outputs).half()
    weight, x = torch.randn(outputs, inputs).half(), torch.randn(samples, inputs).half().relu()
    result, sums = kernel._masked_product(gradient, weight, x)
    exact, exact_sums = masked_sums_reference(gradient.double() @ weight.double(), x)
    torch.testing.assert_close(result.double(), exact, rtol=2e-3, atol=2e-2)
    torch.testing.assert_close(sums, exact_sums, rtol=1e-3, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("widths", [(13, 512, 256, 128), (480, 1024, 1024, 512, 256, 1)])
def test_on_a_gpu(widths: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights, biases = layers(widths, torch.float32)
    scaled = [(w / w.shape[1] ** 0.5).detach().cuda().requires_grad_() for w in weights]
    biases = [b.detach().cuda().requires_grad_() for b in biases]
    x = torch.randn(1000, widths[0], device="cuda", dtype=dtype, requires_grad=True)
    ours = kernel.relu_mlp(x, scaled, biases, last_relu=False)
    upstream = torch.randn_like(ours)
    got = torch.autograd.grad(ours, [x, *scaled, *biases], upstream)
    exact = [t.detach().double().requires_grad_() for t in (x, *scaled, *biases)]
    half = 1 + len(scaled)
    expected = relu_mlp_reference(exact[0], exact[1:half], exact[half:], last_relu=False)
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    bound = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    for mine, theirs in zip((ours, *got), (expected, *wanted), strict=True):
        assert (mine.double() - theirs).norm() <= bound * theirs.norm()
