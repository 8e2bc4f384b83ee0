"""The fused perceptron against autograd in float64, and its kernels in Triton's interpreter."""

import itertools
import os

import pytest
import torch
from torch import Tensor

from trainmark.kernels import cublaslt
from trainmark.kernels import relu_mlp as kernel
from trainmark.kernels.relu_mlp import (
    masked_sums_reference,
    relu_mlp_reference,
    single_output_backward_reference,
)

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
    monkeypatch.setattr(kernel, "_weight_gradient", lambda g, x: g.t() @ x)
    parameters = [x, *weights, *biases]
    expected = relu_mlp_reference(x, weights, biases, last_relu)
    ours = kernel._ReluMlp.apply(x, last_relu, False, *weights, *biases)
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


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (65, 129), (300, 64), (7, 3)])
def test_single_output_backward(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    samples, inputs = shape
    gradient, x = torch.randn(samples, 1).to(dtype), torch.randn(shape).relu().to(dtype)
    weight = torch.randn(1, inputs).to(dtype)
    ours = kernel._single_output_backward(gradient, weight, x)
    exact = single_output_backward_reference(gradient.double(), weight.double(), x.double())
    bound = 4 * torch.finfo(dtype).eps
    for mine, theirs in zip(ours, exact, strict=True):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=bound, atol=10 * bound)


# --- on a GPU


def near(mine: Tensor, exact: Tensor, dtype: torch.dtype, products: int) -> None:
    """Each product rounds its factors and its result to `dtype`; errors of their sums are less."""
    assert mine.shape == exact.shape
    assert torch.isfinite(mine).all()
    bound = 2 * products * torch.finfo(dtype).eps + 1e-5
    assert (mine.double() - exact).norm() <= bound * exact.norm()


def exact_gradients(
    inputs: list[Tensor], weights: list[Tensor], upstream: Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Of x, weights and biases, in float64, with the ReLUs open where `inputs` are positive.

    Near zero a ReLU in 16 bits is open where one in float64 is closed: gradients through other
    ReLUs are other numbers, however well they are computed.
    """
    gradient, weight_grads, bias_grads = upstream.double(), [], []
    for layer in reversed(range(len(weights))):
        weight_grads.insert(0, gradient.t() @ inputs[layer].double())
        bias_grads.insert(0, gradient.sum(dim=0))
        gradient = gradient @ weights[layer].double()
        gradient = gradient * (inputs[layer] > 0) if layer else gradient
    return gradient, weight_grads, bias_grads


def on_gpu(widths: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    weights, biases = layers(widths, torch.float32)
    scaled = [(w / w.shape[1] ** 0.5).detach().cuda().requires_grad_() for w in weights]
    return scaled, [b.detach().cuda().requires_grad_() for b in biases]


def hidden_outputs(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    """The input of each layer as the kernel computes it, by plain torch in the same type."""
    inputs = [x]
    for w, b in zip(weights[:-1], biases[:-1], strict=True):
        inputs.append(torch._addmm_activation(b.to(x.dtype), inputs[-1], w.to(x.dtype).t()))
    return inputs


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["cublaslt", "own kernels"])
@pytest.mark.parametrize("samples", [9, 1000, 4097])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "widths", [(13, 512, 256, 128), (480, 1024, 1024, 512, 256, 1), (8, 72, 3)]
)
def test_on_a_gpu(
    widths: tuple[int, ...],
    dtype: torch.dtype,
    samples: int,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if path == "own kernels":
        monkeypatch.setattr(cublaslt, "library", lambda: None)
    torch.manual_seed(0)
    weights, biases = on_gpu(widths)
    x = torch.randn(samples, widths[0], device="cuda", dtype=dtype, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ours = kernel.relu_mlp(x, weights, biases, last_relu=False)
    # The layers' inputs, whose first has columns of zeros; its own forward decides what is open.
    inputs = [tensor for tensor in saved if tensor is not None][: len(weights)]
    inputs[0] = inputs[0][:, : widths[0]]
    for mine, plain in zip(inputs, hidden_outputs(x, weights, biases), strict=True):
        near(mine, plain.double(), dtype, products=len(weights))
    near(ours, inputs[-1].double() @ weights[-1].double().t() + biases[-1], dtype, products=1)
    upstream = torch.randn_like(ours)
    got = torch.autograd.grad(ours, [x, *weights, *biases], upstream)
    x_grad, weight_grads, bias_grads = exact_gradients(inputs, weights, upstream)
    for mine, exact in zip(got, (x_grad, *weight_grads, *bias_grads), strict=True):
        near(mine, exact, dtype, products=len(weights))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 8, 8), (999, 72, 1024), (4096, 480, 256)])
def test_cublaslt_products(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Both products of a hidden layer; its outputs are not a multiple of the mask's 128 bits."""
    torch.manual_seed(0)
    samples, inputs, outputs = shape
    x = torch.randn(samples, inputs, device="cuda", dtype=dtype)
    weight = torch.randn(outputs, inputs, device="cuda", dtype=dtype) / inputs**0.5
    bias = torch.randn(outputs, device="cuda", dtype=dtype)
    found = cublaslt.relu_product(x, weight, bias)
    assert found is not None, "no algorithm on this device"
    output, bits = found
    near(output, torch.addmm(bias.double(), x.double(), weight.double().t()).relu(), dtype, 1)
    # Back from a layer of as many outputs as inputs.
    gradient = torch.randn_like(output)
    square = torch.randn(outputs, outputs, device="cuda", dtype=dtype) / outputs**0.5
    found = cublaslt.masked_product(gradient, square, bits)
    assert found is not None, "no algorithm on this device"
    masked, sums = found
    exact = gradient.double() @ square.double() * (output > 0)
    near(masked, exact, dtype, products=1)
    error = (sums.double() - exact.sum(dim=0)).norm()
    assert error <= 4 * torch.finfo(dtype).eps * exact.norm()
    again = cublaslt.masked_product(gradient, square, bits)
    assert again is not None
    assert all(map(torch.equal, again, found))


@pytest.mark.gpu
def test_cublaslt_leaves_what_it_cannot_do() -> None:
    x, weight = torch.randn(64, 24, device="cuda"), torch.randn(16, 24, device="cuda")
    bias = torch.randn(16, device="cuda")
    assert cublaslt.relu_product(x, weight, bias) is None  # 32 bits
    x, weight, bias = x.half(), weight.half(), bias.half()
    assert cublaslt.relu_product(x[:0], weight, bias) is None
    odd = x[:, :15].contiguous(), weight[:, :15].contiguous()
    assert cublaslt.relu_product(*odd, bias) is None  # rows of 30 bytes
    shifted = torch.randn(64 * 24 + 1, device="cuda").half()[1:].view(64, 24)
    assert cublaslt.relu_product(shifted, weight, bias) is None  # an odd address


@pytest.mark.gpu
def test_replayed_in_a_graph() -> None:
    """New numbers in the same places: nothing of the first call may have been kept."""
    torch.manual_seed(0)
    weights, biases = on_gpu((480, 1024, 256, 1))
    x = torch.randn(513, 480, device="cuda", dtype=torch.bfloat16)
    results: list[Tensor] = []

    def step() -> None:
        output = kernel.relu_mlp(x, weights, biases, last_relu=False)
        grads = torch.autograd.grad(output.sum(), [*weights, *biases])
        results[:] = [output.detach(), *grads]

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    captured = list(results)
    x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    step()
    for mine, theirs in zip(captured, results, strict=True):
        assert torch.equal(mine, theirs)
