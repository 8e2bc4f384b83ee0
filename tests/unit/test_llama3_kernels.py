"""AdamW's update, the joined cross entropy and fp8 products against plain torch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainmark.kernels import adamw_update, linear_cross_entropy
from trainmark.kernels.fp8_linear import Fp8Linear, transpose, use_fp8
from trainmark.training.adamw import AdamW

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


def bits(count: int, key: int = 7) -> Tensor:
    return adamw_update._hash(count, torch.tensor(key, dtype=torch.int32))


def precise(optimizer: AdamW, name: str) -> Tensor:
    """What a weight and its remainder stand for."""
    rest = optimizer.remainders[name]
    return adamw_update._joined(optimizer.parameters[name], rest).double()


def test_random_bits_are_repeatable_and_differ() -> None:
    assert torch.equal(bits(10_000), bits(10_000))
    assert (bits(10_000) != bits(10_000, 8)).float().mean() > 0.999
    # A weight is rounded with the lowest byte, its second moment with the upper half.
    drawn = bits(100_000)
    halves = torch.stack([drawn & 0xFF, (drawn >> 16) & 0xFFFF]).double()
    assert abs(torch.corrcoef(halves)[0, 1].item()) < 5 / 100_000**0.5


@pytest.mark.parametrize("value", [1 + 0.3 / 2**15, -(0.02 + 1e-7), 1.9999, 255.49, 3e-5])
def test_weights_are_the_nearest_and_remainders_unbiased(value: float) -> None:
    values = torch.full((200_000,), value)
    nearest, rest = adamw_update._divided(values, bits(200_000))
    weight, remainder = nearest.bfloat16(), rest.to(torch.int8)
    assert torch.equal(weight, values.bfloat16())
    assert torch.equal(remainder.int(), rest)
    joined = adamw_update._joined(weight, remainder).double()
    exact = values[0].double().item()
    assert (joined - exact).abs().max().item() < abs(exact) * 2**-15
    assert joined.mean().item() == pytest.approx(exact, rel=2e-7)


def test_updates_far_below_a_weights_type_follow_the_exact_ones() -> None:
    """Each step is 1/400 of a bf16 gap: nearest loses them, and bf16 alone is noisy."""
    start = torch.linspace(1, 2, 1001)[:-1, None].bfloat16()
    weights = {"a": start.clone()}
    optimizer = AdamW(weights, states="bf16", seed=0, **(RULE | {"weight_decay": 0.0}))
    for _ in range(300):
        optimizer.step({"a": torch.ones(1000, 1)}, 2e-5, one("cpu"), one("cpu"))
    expected = start.double() - 300 * 2e-5
    # Six standard deviations of 300 steps' rounding; of bf16 alone they would be 0.04.
    assert (precise(optimizer, "a") - expected).abs().max() < 1.5e-3
    assert (weights["a"].double() - expected).abs().max() < 2**-8 + 1.5e-3


def test_without_masters_is_torchs_adamw_too() -> None:
    torch.manual_seed(0)
    weights = {"a": torch.randn(33, 7).bfloat16()}
    theirs = nn.Parameter(weights["a"].double())
    reference = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    ours = AdamW(weights, states="bf16", seed=0, **RULE)
    for _ in range(20):
        theirs.grad = torch.randn_like(theirs).bfloat16().double()
        reference.step()
        ours.step({"a": theirs.grad.bfloat16()}, 1e-2, one("cpu"), one("cpu"))
    # Off by what bf16 moments are: some thousandths of a step each.
    torch.testing.assert_close(precise(ours, "a"), theirs.detach(), rtol=0, atol=1e-3)


@pytest.mark.skipif(adamw_update.triton is None, reason="no Triton here")
@pytest.mark.parametrize("gate", [1.0, 0.0])
@pytest.mark.parametrize("states", ["fp32", "bf16"])
def test_the_triton_update_is_the_reference(states: str, gate: float) -> None:
    """On a GPU, else in Triton's interpreter."""
    torch.manual_seed(0)
    count = 7_001
    kind = torch.float32 if states == "fp32" else torch.bfloat16
    beside: dict[str, Tensor | None] = {
        "master": torch.randn(count) if states == "fp32" else None,
        "remainder": None if states == "fp32" else torch.randint(-128, 128, (count,)).char(),
    }
    state: dict[str, Any] = beside | {
        "param": torch.randn(count).bfloat16(),
        "exp_avg": torch.randn(count).to(kind),
        "exp_avg_sq": torch.rand(count).to(kind),
    }
    grad, key = torch.randn(count), torch.tensor(5, dtype=torch.int32)
    scalars = torch.tensor([1e-2, 0.5, gate, 0.271, 0.143])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = []
    for where, step in (("cpu", adamw_update.reference), (device, adamw_update.launch)):
        copies: dict[str, Any] = {
            n: None if t is None else t.to(where, copy=True) for n, t in state.items()
        }
        held, constants = adamw_update.Held(**copies), (0.9, 0.95, 1e-8, 0.1)
        step(held, grad.to(where), key.to(where), scalars.to(where), constants)
        results.append({n: t.cpu().float() for n, t in copies.items() if t is not None})
    # Where a GPU takes the nearest bf16 number, the interpreter cuts off.
    nearest = "param" if states == "fp32" else "exp_avg"
    for name, expected in results[0].items():
        rtol = 2**-7 if name == nearest else 1e-5
        close = torch.isclose(results[1][name], expected, rtol=rtol, atol=1e-6)
        # The last bit of fp32 may differ, and with it, rarely, the direction of rounding.
        assert close.float().mean() > (0.98 if name == "remainder" else 0.999), name


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
    rough.load_state_dict({"0.weight": exact.weight})
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
