"""The fused perceptron against autograd in float64, and its kernels in Triton's interpreter."""

import itertools

import pytest
import torch
from torch import Tensor

from tests.embedding_kernels import interpreted
from trainmark.kernels import relu_mlp as kernel
from trainmark.kernels.relu_mlp import masked_sums_reference, relu_mlp_reference

WIDTHS = [(13, 8, 4), (5, 1), (7, 16, 16, 3, 1), (1, 1), (0, 8, 4)]


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
    monkeypatch.setattr(kernel, "weight_gradient", lambda g, x: g.t() @ x)
    parameters = [x, *weights, *biases]
    expected = relu_mlp_reference(x, weights, biases, last_relu)
    ours = kernel._ReluMlp.apply(x, last_relu, False, *weights, *biases)
    torch.testing.assert_close(ours, expected)
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, parameters, upstream)
    got = torch.autograd.grad(ours, parameters, upstream)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("samples", [1, kernel.MIN_ONEDNN - 1, kernel.MIN_ONEDNN])
def test_few_samples_on_a_cpu(samples: int) -> None:
    """By another product than many."""
    torch.manual_seed(0)
    weights, biases = layers((13, 32, 8, 1), torch.float64)
    x = torch.randn(samples, 13, dtype=torch.float64)
    narrow = [[tensor.float() for tensor in tensors] for tensors in (weights, biases)]
    ours = kernel.relu_mlp(x.float(), narrow[0], narrow[1], last_relu=False)
    expected = relu_mlp_reference(x, weights, biases, last_relu=False)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)


def test_no_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's product with a ReLU, of nothing, gives the bias, with its negative numbers."""
    product = torch._addmm_activation

    def as_on_a_gpu(b_N: Tensor, x_BM: Tensor, w_MN: Tensor) -> Tensor:
        return product(b_N, x_BM, w_MN) if x_BM.shape[1] else torch.addmm(b_N, x_BM, w_MN)

    monkeypatch.setattr(torch, "_addmm_activation", as_on_a_gpu)
    monkeypatch.setattr(kernel, "has_compiled", lambda *tensors: False)
    bias = torch.tensor([1.0, -2.0])
    ours = kernel._ReluMlp.apply(torch.empty(3, 0), True, False, torch.empty(2, 0), bias)
    assert torch.equal(ours, bias.relu().expand(3, 2))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (65, 129), (64, 128), (500, 3)])
def test_masked_sums(
    shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few programs, so that each takes several tiles, and one fewer than the others."""
    monkeypatch.setattr(kernel, "SUM_PROGRAMS", 3)
    torch.manual_seed(0)
    gradient, output = torch.randn(shape).to(dtype), torch.randn(shape).relu().to(dtype)
    masked, sums = kernel._masked_sums(gradient, output)
    expected, expected_sums = masked_sums_reference(gradient, output)
    assert torch.equal(masked, expected)
    torch.testing.assert_close(sums, expected_sums, rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (300, 129), (64, 32), (150, 3)])
def test_column_sums(
    shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one stage and in two."""
    monkeypatch.setattr(kernel, "SUM_PROGRAMS", 3)
    monkeypatch.setattr(kernel, "FEW_ROWS", 100)
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    torch.testing.assert_close(
        kernel.column_sums(x), x.double().sum(dim=0).float(), rtol=1e-5, atol=1e-5
    )


@interpreted
@pytest.mark.parametrize("shape", [(1, 64, 64), (600, 72, 304), (512, 128, 256), (5, 8, 8)])
def test_masked_gemm(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    samples, outputs, inputs = shape
    gradient = torch.randn(samples, outputs).half()
    weight, x = torch.randn(outputs, inputs).half(), torch.randn(samples, inputs).half().relu()
    result, sums = kernel._masked_gemm(gradient, weight, x)
    exact, exact_sums = masked_sums_reference(gradient.double() @ weight.double(), x)
    torch.testing.assert_close(result.double(), exact, rtol=2e-3, atol=2e-2)
    torch.testing.assert_close(sums, exact_sums, rtol=1e-3, atol=1e-2)


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
    gradient = upstream.double()
    weight_grads: list[Tensor] = []
    bias_grads: list[Tensor] = []
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
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("samples", [0, 9, 1000, 4097])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "widths", [(13, 512, 256, 128), (480, 1024, 1024, 512, 256, 1), (8, 72, 3)]
)
def test_on_a_gpu(
    widths: tuple[int, ...],
    dtype: torch.dtype,
    samples: int,
    fused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every hidden layer by our product, where its rows allow that, and none."""
    monkeypatch.setattr(kernel, "SMALLEST_FUSED", 0 if fused else 2**62)
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
@pytest.mark.parametrize("shape", [(1, 64, 64), (999, 72, 1024), (40000, 256, 512)])
def test_masked_gemm_on_a_gpu(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    samples, outputs, inputs = shape
    gradient = torch.randn(samples, outputs, device="cuda", dtype=dtype)
    weight = torch.randn(outputs, inputs, device="cuda", dtype=dtype) / outputs**0.5
    x = torch.randn(samples, inputs, device="cuda", dtype=dtype).relu()
    result, sums = kernel._masked_gemm(gradient, weight, x)
    exact, exact_sums = masked_sums_reference(gradient.double() @ weight.double(), x)
    near(result, exact, dtype, products=1)
    assert not result[x == 0].any()
    near(sums, exact_sums.double(), torch.float32, products=8)
    again = kernel._masked_gemm(gradient, weight, x)
    assert torch.equal(again[0], result)
    assert torch.equal(again[1], sums)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("samples", [0, 5, 9, 4096, 4097, 65543])
def test_weight_gradient_on_a_gpu(samples: int, dtype: torch.dtype) -> None:
    """Of 16-bit factors, summed in fp32: no sample may be missing."""
    torch.manual_seed(0)
    gradient = torch.randn(samples, 128, device="cuda", dtype=dtype)
    x = torch.randn(samples, 264, device="cuda", dtype=dtype).relu()
    ours = kernel.weight_gradient(gradient, x)
    exact = gradient.double().t() @ x.double()
    assert ours.dtype == torch.float32
    assert (ours.double() - exact).norm() <= 1e-4 * exact.norm()


@pytest.mark.gpu
def test_rows_that_cannot_be_copied_in_bulk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "SMALLEST_FUSED", 0)
    shifted = torch.randn(64 * 24 + 1, device="cuda").half()[1:].view(64, 24)
    gradient = torch.randn(64, 24, device="cuda").half()
    weight, x = torch.randn(24, 16, device="cuda").half(), torch.randn(64, 16, device="cuda").half()
    assert kernel._worth_fusing(gradient, weight, x)
    assert not kernel._worth_fusing(shifted, weight, x)  # an odd address
    assert not kernel._worth_fusing(gradient[:0], weight, x[:0])
    assert not kernel._worth_fusing(gradient.float(), weight.float(), x.float())
    odd = weight[:, :15].contiguous(), x[:, :15].contiguous()
    assert not kernel._worth_fusing(gradient, *odd)  # rows of 30 bytes


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
