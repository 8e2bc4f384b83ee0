"""AdamW's update, the joined cross entropy and fp8 products against plain torch."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainmark.adamw import AdamW
from trainmark.kernels import adamw_update, linear_cross_entropy
from trainmark.kernels.fp8_linear import Fp8Linear, transpose, use_fp8

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RULE = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def one(device: str, value: float = 1.0) -> Tensor:
    return torch.tensor(value, device=device)


# --- AdamW


@pytest.mark.parametrize("device", DEVICES)
def test_adamw_is_torchs_in_fp32(device: str) -> None:
    torch.manual_seed(0)
    weights = {"a": torch.randn(33, 7, device=device), "norm": torch.randn(9, device=device)}
    theirs = {name: nn.Parameter(w.clone()) for name, w in weights.items()}
    groups = [
        {"params": [theirs["a"]], "weight_decay": 0.1},
        {"params": [theirs["norm"]], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    ours = AdamW(weights, states="fp32", seed=0, **RULE)
    for _ in range(5):
        gradients = {name: torch.randn_like(w) for name, w in weights.items()}
        for name, parameter in theirs.items():
            parameter.grad = gradients[name].clone()
        reference.step()
        ours.step(gradients, 1e-2, one(device), one(device))
    for name, weight in weights.items():
        torch.testing.assert_close(weight, theirs[name].detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("states", ["fp32", "bf16"])
def test_a_closed_gate_changes_nothing(states: str) -> None:
    weights = {"a": torch.randn(50, 3).bfloat16()}
    optimizer = AdamW(weights, states=states, seed=0, **RULE)
    optimizer.step({"a": torch.randn(50, 3).bfloat16()}, 1e-2, one("cpu"), one("cpu"))
    before = {n: t.clone() for n, t in (optimizer.weights() | optimizer.tensors()).items()}
    bad = torch.full((50, 3), torch.nan)
    optimizer.step({"a": bad}, 1e-2, one("cpu"), one("cpu", 0.0))
    after = optimizer.weights() | optimizer.tensors()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_stochastic_rounding_is_unbiased_and_repeatable() -> None:
    count = 200_000
    value = torch.full((count,), 1 + 0.3 / 128)  # 0.3 of the way between two bf16 numbers
    bits = adamw_update._hash(count, torch.tensor(7, dtype=torch.int32))
    rounded = adamw_update._round(value, bits, torch.bfloat16).float()
    assert set(rounded.tolist()) == {1.0, 1 + 1 / 128}
    assert rounded.mean().item() == pytest.approx(value[0].item(), abs=3e-5)
    again = adamw_update._hash(count, torch.tensor(7, dtype=torch.int32))
    other = adamw_update._hash(count, torch.tensor(8, dtype=torch.int32))
    assert torch.equal(bits, again)
    assert (bits != other).float().mean() > 0.999


def test_small_updates_add_up_without_masters() -> None:
    """A step of 1/2000 of a bf16 gap is always lost by rounding to nearest."""
    weights = {"a": torch.ones(20_000, 1).bfloat16()}
    optimizer = AdamW(weights, states="bf16", seed=0, **(RULE | {"weight_decay": 0.0}))
    for _ in range(50):
        optimizer.step({"a": torch.ones(20_000, 1)}, 1e-5, one("cpu"), one("cpu"))
    assert weights["a"].float().mean().item() == pytest.approx(1 - 50e-5, abs=5e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("states", ["fp32", "bf16"])
def test_the_triton_update_is_the_reference(states: str) -> None:
    torch.manual_seed(0)
    start = torch.randn(70_001).bfloat16()
    gradients = [torch.randn(70_001) for _ in range(3)]
    results = []
    for device in ("cpu", "cuda"):
        weights = {"a": start.to(device, copy=True)}
        optimizer = AdamW(weights, states=states, seed=3, **RULE)
        for gradient in gradients:
            optimizer.step({"a": gradient.to(device)}, 1e-2, one(device, 0.5), one(device))
        found = optimizer.weights() | optimizer.tensors()
        results.append({name: t.cpu().float() for name, t in found.items()})
    for name, expected in results[0].items():
        close = torch.isclose(results[1][name], expected, rtol=1e-5, atol=1e-6)
        # The last bit of fp32 may differ, and with it, rarely, the direction of rounding.
        assert close.float().mean() > 0.999, name


# --- cross entropy


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("library", [True, False])
def test_joined_cross_entropy_is_torchs(
    device: str, library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    if not library:
        monkeypatch.delattr(functional, "linear_cross_entropy", raising=False)
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", 50 * 4 * 8)
    x = torch.randn(37, 16, device=device, requires_grad=True)
    weight = torch.randn(50, 16, device=device, requires_grad=True)
    targets = torch.randint(0, 50, (37,), device=device)
    expected = functional.cross_entropy(x @ weight.t(), targets)
    wanted = torch.autograd.grad(expected * 3, [x, weight])
    loss = linear_cross_entropy.linear_cross_entropy(x, weight, targets)
    found = torch.autograd.grad(loss * 3, [x, weight])
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        alone = linear_cross_entropy.linear_cross_entropy(x, weight, targets)
    torch.testing.assert_close(alone, expected)


def test_the_loss_of_16_bits_is_fp32() -> None:
    x = torch.randn(20, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(50, 16, dtype=torch.bfloat16, requires_grad=True)
    loss = linear_cross_entropy.linear_cross_entropy(x, weight, torch.arange(20))
    assert loss.dtype == torch.float32
    loss.backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16


# --- fp8


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_products_are_near(device: str) -> None:
    torch.manual_seed(0)
    exact = nn.Linear(256, 128, bias=False, device=device, dtype=torch.bfloat16)
    rough = nn.Sequential(nn.Linear(256, 128, bias=False, device=device, dtype=torch.bfloat16))
    rough[0].weight.data.copy_(exact.weight)
    use_fp8(rough)
    assert type(rough[0]) is Fp8Linear
    x = torch.randn(4, 32, 256, device=device, dtype=torch.bfloat16)
    gradient = torch.randn(4, 32, 128, device=device, dtype=torch.bfloat16)
    outputs = []
    for layer in (exact, rough):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.backward(gradient)
        weight = layer.weight if layer is exact else rough[0].weight
        outputs.append((y.detach(), leaf.grad, weight.grad))
    for found, wanted in zip(outputs[1], outputs[0], strict=True):
        error = (found - wanted).float().norm() / wanted.float().norm()
        assert error < 0.07


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(128, 256), (1, 7), (129, 130)])
def test_transposed_bytes(device: str, shape: tuple[int, int]) -> None:
    x = torch.randint(0, 120, shape, dtype=torch.uint8, device=device)
    assert torch.equal(transpose(x), x.t())
