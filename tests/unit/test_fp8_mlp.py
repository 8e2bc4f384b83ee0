"""fp8 layers against float64, and their kernel in Triton's interpreter against plain torch."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.embedding_kernels import interpreted, relative_error
from trainmark.kernels import cublaslt
from trainmark.kernels import fp8_codes as codes
from trainmark.kernels import fp8_mlp as kernel
from trainmark.workloads.dlrm.model import Mlp


def layers(widths: tuple[int, ...], device: str) -> tuple[list[Tensor], list[Tensor]]:
    pairs = list(itertools.pairwise(widths))
    weights = [torch.randn(n, m, device=device) * (2 / m) ** 0.5 for m, n in pairs]
    biases = [torch.rand(n, device=device) * 0.1 for _, n in pairs]
    return [w.requires_grad_() for w in weights], [b.requires_grad_() for b in biases]


@pytest.mark.parametrize(
    ("device", "library"),
    [
        ("cpu", False),
        pytest.param("cuda", True, marks=pytest.mark.gpu),
        pytest.param("cuda", False, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("samples", [1, 33, 5000])
@pytest.mark.parametrize("widths", [(43, 32), (32, 64, 16, 48)])
def test_near_float64(
    widths: tuple[int, ...],
    samples: int,
    device: str,
    library: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the size of the gradients: 1e-7 is a mean over ten million samples."""
    if not library:
        monkeypatch.setattr(cublaslt, "library", lambda: None)
    torch.manual_seed(0)
    weights, biases = layers(widths, device)
    x = torch.randn(samples, widths[0], device=device).relu().bfloat16().requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ours = kernel.fp8_relu_layers(x, weights, biases)
    assert ours.dtype == torch.bfloat16
    # Near zero, ReLUs behind rounded numbers open that others close: with those of the kernel.
    outputs = saved[2 : 2 + len(weights)]
    exact_of = [t.detach().double().requires_grad_() for t in (x, *weights, *biases)]
    half = 1 + len(weights)
    exact = exact_of[0]
    for w, b, output in zip(exact_of[1:half], exact_of[half:], outputs, strict=True):
        exact = torch.addmm(b, exact, w.t()) * (output.float() > 0)
    # Three bits of e4m3 are off by 3 % on average, two of e5m2 by 6 %. One sample's few outputs
    # share the errors of its inputs, which then do not average out.
    assert relative_error(ours, exact) < (0.05 if samples > 1 else 0.1) * len(weights)
    upstream = torch.randn_like(ours) * 1e-7
    got = torch.autograd.grad(ours, [x, *weights, *biases], upstream)
    wanted = torch.autograd.grad(exact, exact_of, upstream.double())
    for mine, theirs in zip(got, wanted, strict=True):
        assert relative_error(mine, theirs) < (0.08 if samples > 1 else 0.16) * len(weights)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rounding_favours_no_gradient(device: str) -> None:
    """Over many steps: in a single one, e5m2 makes 1 of 1.12 and 1.25 of 1.13."""
    torch.manual_seed(0)
    weights, biases = layers((16, 32, 32), device)
    x = torch.ones(32, 16, device=device, dtype=torch.bfloat16)
    ours = kernel.fp8_relu_layers(x, weights, biases)
    is_open = (ours > 0).float().mean(dim=0) == 1
    sizes = torch.linspace(1, 2, 32, device=device)
    total, exact = torch.zeros(32, device=device), torch.zeros(32, device=device)
    for _ in range(300):
        upstream = (sizes * (1 + 0.01 * torch.rand(32, 1, device=device))).bfloat16()
        (of_last,) = torch.autograd.grad(ours, weights[1:], upstream, retain_graph=True)
        total += of_last.sum(dim=1)
        exact += upstream.float().sum(dim=0)
    shares = (total / exact)[is_open]
    assert len(shares) > 8
    assert (shares.max() - shares.min()) / shares.mean() < 0.015


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_no_samples(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without asking a library, which on a GPU would refuse."""
    monkeypatch.delattr(kernel, "_plain_gemm")
    weights, biases = layers((32, 64, 16), device)
    x = torch.zeros(0, 32, dtype=torch.bfloat16, device=device, requires_grad=True)
    ours = kernel.fp8_relu_layers(x, weights, biases)
    ours.sum().backward()
    assert ours.shape == (0, 16)
    for parameter in (*weights, *biases):
        assert parameter.grad is not None
        assert not parameter.grad.any()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_not_a_number_comes_out_as_such(device: str) -> None:
    """Of its own sample, and of no other: an evaluation must be able to name the row."""
    torch.manual_seed(0)
    weights, biases = layers((32, 64, 16), device)
    x = torch.randn(64, 32).bfloat16().to(device)
    x[7, 3] = float("nan")
    is_bad = kernel.fp8_relu_layers(x, weights, biases).isnan().any(dim=1)
    assert is_bad.nonzero().flatten().tolist() == [7]


def test_what_is_not_finite_reaches_the_gradients() -> None:
    """Numbers beyond the range are cut off; the step must still see that something was wrong."""
    torch.manual_seed(0)
    weights, biases = layers((32, 16), "cpu")
    x = torch.randn(64, 32).bfloat16()
    ours = kernel.fp8_relu_layers(x, weights, biases)
    upstream = torch.ones_like(ours)
    place = tuple(int(i) for i in (ours > 0).nonzero()[7])
    upstream[place] = float("inf")
    ours.backward(upstream)
    assert biases[0].grad is not None
    assert not biases[0].grad.isfinite().all()


def test_which_layers() -> None:
    shapes = [(1024, 480), (1024, 1024), (512, 1024), (256, 512), (1, 256)]
    weights = [torch.empty(shape, device="meta") for shape in shapes]
    assert kernel.fp8_layers(weights) == 4
    assert kernel.fp8_layers(weights[:3]) == 3
    assert kernel.fp8_layers([torch.empty(1024, 487, device="meta"), *weights[1:]]) == 4
    assert kernel.fp8_layers([weights[0], torch.empty(112, 1024, device="meta")]) == 1
    assert kernel.fp8_layers([torch.empty(1020, 480, device="meta"), *weights[1:]]) == 0
    assert kernel.fp8_layers([weights[-1]]) == 0


def test_a_perceptron_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its small layers in bf16 behind the large ones; weights stay fp32."""
    torch.manual_seed(0)
    monkeypatch.setattr(kernel, "SMALL_LAYER", 1000)
    calls = []
    product = kernel.gemm
    monkeypatch.setattr(kernel, "gemm", lambda *a, **k: calls.append(a) or product(*a, **k))
    mlp = Mlp([32, 64, 32, 24, 1], last_relu=False)
    mlp.fused_dtype, mlp.fp8 = torch.bfloat16, True
    x = torch.randn(512, 32)
    target = x[:, :4].sum(dim=1).tanh()
    optimizer = torch.optim.Adam(mlp.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        loss = (mlp(x).float().squeeze(-1) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert len(calls) == 60 * (2 + 1 + 2)  # forward, to the hidden layer's input, of weights
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("width", [48, 24])
def test_prediction_computes_as_training_does(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the last hidden layer is one of the large ones or not."""
    torch.manual_seed(0)
    monkeypatch.setattr(kernel, "SMALL_LAYER", 1000)
    mlp = Mlp([32, 64, width, 1], last_relu=False)
    mlp.fused_dtype, mlp.fp8 = torch.bfloat16, True
    x = torch.randn(100, 32)
    last = mlp[-1].bfloat16()
    assert torch.equal(mlp(x), last(mlp.hidden(x)))


SHAPES = [(1, 16), (130, 80), (128, 64)]


@interpreted
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel(shape: tuple[int, int]) -> None:
    """On numbers that fp8 holds, or cuts off: the interpreter does not always round to nearest."""
    torch.manual_seed(0)
    numbers = torch.randint(-4, 5, shape) * 2.0 ** torch.randint(-5, 5, shape)
    check_kernel(torch.where(torch.rand(shape) < 0.1, 1e9, numbers), torch.tensor(0.25))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_on_a_gpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check_kernel((torch.randn(shape) * 100).to(dtype).cuda(), torch.tensor(0.25, device="cuda"))


def check_kernel(x: Tensor, scale: Tensor) -> None:
    for dtype in (codes.CODES, codes.GRADIENTS):
        same(codes._quantize(x, scale, dtype), codes.quantize_reference(x, scale, dtype))
    output, gradient = torch.randint_like(x, 0, 3).bfloat16(), x.bfloat16()
    *mine, sums = codes._quantize_masked(gradient, output, scale)
    *wanted, exact = codes.quantize_masked_reference(gradient, output, scale)
    same(mine, wanted)
    torch.testing.assert_close(sums, exact)
    check_mask(wanted[0], output.to(codes.CODES), scale)


def check_mask(gradient8: Tensor, output: Tensor, scale: Tensor) -> None:
    mine, wanted = gradient8.clone(), gradient8.clone()
    flipped = codes._mask_codes(mine, output, scale)
    exact = codes.mask_codes_reference(wanted, output, scale)
    same([mine, flipped.codes_NB, flipped.output_NB], [wanted, exact.codes_NB, exact.output_NB])
    assert 0 < (wanted.float() == 0).sum() < wanted.numel() or wanted.numel() < 100
    torch.testing.assert_close(flipped.sums_N, exact.sums_N)


def same(mine: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for left, right in zip(mine, wanted, strict=True):
        assert left.dtype == right.dtype
        torch.testing.assert_close(left.float(), right.float(), rtol=0, atol=0)
