"""Cross layers with GEMMs in fp8, against float64; their kernels in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from tests.embedding_kernels import interpreted, relative_error
from trainmark.kernels import cross_layers as cross
from trainmark.kernels import cublaslt, fp8_cross, fp8_mlp
from trainmark.kernels.fp8_codes import CODES, GRADIENTS, Codes
from trainmark.kernels.fp8_mlp import encode_weights
from trainmark.workloads.dlrm.interactions import CrossNetwork

WIDTH, RANK = 144, 32


def parameters(layers: int, device: str) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    ups = [torch.randn(WIDTH, RANK, device=device) * RANK**-0.5 for _ in range(layers)]
    downs = [torch.randn(RANK, WIDTH, device=device) * WIDTH**-0.5 for _ in range(layers)]
    biases = [torch.rand(WIDTH, device=device) * 0.1 for _ in range(layers)]
    for tensor in (*ups, *downs, *biases):
        tensor.requires_grad_()
    return ups, downs, biases


@pytest.mark.parametrize(
    ("device", "library"),
    [
        ("cpu", False),
        pytest.param("cuda", True, marks=pytest.mark.gpu),
        pytest.param("cuda", False, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("samples", [1, 33, 3000])
@pytest.mark.parametrize(("layers", "size"), [(1, 1.0), (3, 1e-7)])
def test_near_float64(
    layers: int,
    size: float,
    samples: int,
    device: str,
    library: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the size of the gradients: 1e-7 is a mean over ten million samples."""
    if not library:
        monkeypatch.setattr(cublaslt, "library", lambda: None)
    torch.manual_seed(0)
    ups, downs, biases = parameters(layers, device)
    first = torch.randn(samples, WIDTH, device=device).bfloat16().requires_grad_()
    used = [first, *biases, *ups, *downs]
    given = (torch.randn(samples, WIDTH, device=device) * size).bfloat16()
    ours = fp8_cross.fp8_cross_layers(first, biases, encode_weights([*ups, *downs]), *ups, *downs)
    found = torch.autograd.grad(ours, used, given)
    exact = [tensor.detach().double().requires_grad_() for tensor in used]
    parts = [exact[1 + i * layers : 1 + (i + 1) * layers] for i in range(3)]
    plain = cross.cross_layers_reference(exact[0], parts[2], parts[1], parts[0])
    wanted = torch.autograd.grad(plain, exact, given.double())
    assert ours.dtype == torch.bfloat16
    assert relative_error(ours, plain) < 0.08
    for one, other in zip(found, wanted, strict=True):
        assert relative_error(one, other) < 0.12


def test_a_sample_that_is_not_finite_does_not_spoil_others() -> None:
    torch.manual_seed(1)
    ups, downs, biases = parameters(2, "cpu")
    first = torch.randn(9, WIDTH).bfloat16()
    first[3, 5] = torch.nan
    encoded = encode_weights([*ups, *downs])
    ours = fp8_cross.fp8_cross_layers(first, biases, encoded, *ups, *downs)
    assert ours.isnan().any(1).tolist() == [row == 3 for row in range(9)]


def test_without_samples_there_is_nothing_to_compute() -> None:
    ups, downs, biases = parameters(2, "cpu")
    first = torch.empty(0, WIDTH, dtype=torch.bfloat16).requires_grad_()
    encoded = encode_weights([*ups, *downs])
    ours = fp8_cross.fp8_cross_layers(first, biases, encoded, *ups, *downs)
    ours.sum().backward()
    assert ours.shape == first.shape
    assert all(not tensor.grad.any() for tensor in (*ups, *downs, *biases))  # type: ignore[union-attr]


def test_only_large_layers_of_low_rank_in_whole_steps() -> None:
    def has_fp8(*shape: int) -> bool:
        return fp8_cross.has_fp8([torch.empty(*shape, device="meta")] * 2)

    assert has_fp8(512, 3456)
    assert not has_fp8(512, 3450)
    assert not has_fp8(500, 3456)
    assert not has_fp8(16, 144)
    assert not fp8_cross.has_fp8([])


class Beside:
    """Tables whose rows are given."""

    def lookup_beside(self, rows_BN: Tensor, x_BD: Tensor) -> Tensor:
        return torch.cat([x_BD, rows_BN.to(x_BD.dtype)], dim=1)

    def lookup(self, rows_BN: Tensor) -> Tensor:
        return rows_BN.unflatten(1, (-1, 16))


def test_a_network_trains_in_fp8_and_predicts_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_mlp, "SMALL_LAYER", WIDTH * RANK)
    torch.manual_seed(2)
    network = CrossNetwork(WIDTH, 3, RANK)
    x, rows = torch.randn(40, 16).bfloat16(), torch.randn(40, WIDTH - 16)

    def outcome() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: Tensor = network(Beside(), rows, x)
        return found

    plain = outcome()
    network.fp8 = True
    assert not torch.equal(outcome(), plain)
    assert relative_error(outcome(), plain.double()) < 0.05
    with torch.no_grad():
        assert torch.equal(outcome(), plain)
    outcome().float().sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


@interpreted
@pytest.mark.parametrize("layer", [0, 1])
def test_kernels_write_codes_beside_numbers(layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of numbers that fp8 holds: the interpreter does not always round to nearest."""
    torch.manual_seed(3)
    x, first, up, *gradients = (torch.randint(-2, 3, (70, 131)).float() for _ in range(5))

    def filled(kernel: bool) -> tuple[list[Codes], list[Tensor]]:
        monkeypatch.setattr(cross, "has_kernel", lambda x: kernel)
        codes = [
            Codes(torch.zeros_like(x, dtype=kind), torch.tensor(scale))
            for kind, scale in ((CODES, 0.5), (GRADIENTS, 0.25))
        ]
        result = cross.crossed(x, first, up, codes[0])
        found = cross.gradients_of_layer(layer, gradients, first, [up, up], codes[1])
        return codes, [result, found.of_up_BN, found.of_x_BN, found.of_bias_N]

    (ours, numbers), (wanted, plain) = filled(True), filled(False)
    for one, other in zip(numbers, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(ours, wanted, strict=True):
        assert torch.equal(mine.codes.float(), theirs.codes.float())
    assert torch.equal(ours[0].codes.float() * 0.5, numbers[0])
    assert torch.equal(ours[1].codes.float() * 0.25, numbers[1])
