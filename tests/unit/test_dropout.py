"""Dropout: what share it drops, and that nothing but seed, layer and sample decides which."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, linear

from tests.small import config, copies, newest, same_bits, saved, train, trainer
from tests.unit.refusals import refused
from trainmark.cli import main
from trainmark.errors import InputError
from trainmark.kernels import compiled, fp8_mlp
from trainmark.kernels.interaction import dot_interaction
from trainmark.training.dropout import Dropout
from trainmark.workloads.dlrm.data import build_data
from trainmark.workloads.dlrm.runs import DlrmRun, Optimizer
from trainmark.workloads.dlrm.step import DlrmTrainer, predict


def dropping(**changes: Any) -> DlrmRun:
    """The small run with two hidden layers in the top MLP, and dropout everywhere."""
    network = dataclasses.replace(
        config().model, top_mlp=(16, 12, 1), dropout=0.4, interaction_dropout=0.2
    )
    return config(**{"model": network, "optimizer": Optimizer(name="sgd")} | changes)


def steps(built: DlrmTrainer, of: slice = slice(None)) -> list[float]:
    found = list(build_data(built.cfg, "train", 0, 1))[of]
    return [built.step(built.prepare(batch), 0.5)[0].item() for batch in found]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_share_that_is_dropped(share: float) -> None:
    """Of all numbers, of every sample and of every output, within 6 standard errors."""
    dropout = Dropout(share, 7, "somewhere")
    dropout.samples_B = torch.arange(4000) + 2**33
    kept = dropout.kept(501).float()
    error = (share * (1 - share)) ** 0.5
    assert kept.mean().item() == pytest.approx(1 - share, abs=6 * error / kept.numel() ** 0.5)
    for dim in (0, 1):
        others = kept.shape[dim]
        assert (kept.mean(dim) - (1 - share)).abs().max() < 6 * error / others**0.5
    # Neighbours, among samples and outputs, know nothing of each other.
    centred = kept - kept.mean()
    for a, b in ((centred[1:], centred[:-1]), (centred[:, 1:], centred[:, :-1])):
        assert abs((a * b).mean().item()) < 6 * error**2 / a.numel() ** 0.5


def test_seed_layer_and_sample_decide() -> None:
    def kept(key: tuple[int, str], layer: int, first: int) -> Tensor:
        dropout = Dropout(0.5, *key)
        dropout.samples_B = torch.arange(first, first + 100)
        return dropout.kept(30, layer)

    plain = kept((1, "top"), 0, 0)
    assert torch.equal(kept((1, "top"), 0, 0), plain)
    assert torch.equal(kept((1, "top"), 0, 40)[:60], plain[40:])
    for other in (kept((2, "top"), 0, 0), kept((1, "bottom"), 0, 0), kept((1, "top"), 1, 0)):
        assert 0.4 < (other == plain).float().mean() < 0.6


@pytest.mark.skipif(not compiled.INSTALLED, reason="needs numba (extra `fast`)")
@pytest.mark.parametrize("share", [0.1, 0.75])
@pytest.mark.parametrize("width", [1, 2, 37, 256])
def test_the_cpu_kernel_drops_what_plain_torch_does(
    share: float, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, also for samples whose numbers need 64 bits."""
    own = Dropout(share, 3, "somewhere")
    own.samples_B = torch.cat([torch.arange(300), torch.arange(300) + 2**31 - 150 + 2**40])
    x = torch.randn(600, width)
    by_kernel = own(x.requires_grad_(), 2)
    monkeypatch.setattr("trainmark.training.dropout.has_compiled", lambda *tensors: False)
    assert torch.equal(by_kernel, own(x, 2))
    assert torch.equal(by_kernel != 0, own.kept(width, 2))


def by_autograd(built: DlrmTrainer, step: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the MLPs, layer by layer in plain torch."""
    batch = list(build_data(built.cfg, "train", 0, 1))[step]
    model, samples = built.model, torch.arange(batch.samples) + 512 * step
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}

    def dropped(x: Tensor, dropout: Dropout, share: float, layer: int) -> Tensor:
        dropout.samples_B = samples
        return x * dropout.kept(x.shape[1], layer) / (1 - share)

    def layers(x: Tensor, name: str, count: int, dropout: Dropout) -> Tensor:
        for layer in range(count):
            own = f"{name}.{2 * layer}"
            x = linear(x, weights[f"{own}.weight"], weights[f"{own}.bias"])
            x = x.relu() if name == "bottom" or layer < count - 1 else x
            x = dropped(x, dropout, 0.4, layer) if layer < count - 1 else x
        return x

    (lookup,) = [micro.lookup for micro in built.prepare(batch).micro_batches]
    with torch.no_grad():
        rows = model.tables.lookup(lookup)
    x = layers(batch.numerical.float(), "bottom", 2, model.bottom.dropout)
    x = dropped(dot_interaction(x, rows), model.interaction_dropout, 0.2, 0)
    logits = layers(x, "top", 3, model.top.dropout).squeeze(1)
    loss = binary_cross_entropy_with_logits(logits, batch.labels.float())
    loss.backward()
    return loss, {name: weight.grad for name, weight in weights.items() if weight.grad is not None}


@pytest.mark.parametrize("fused", [torch.float32, None])
def test_a_step_is_plain_torchs(fused: torch.dtype | None) -> None:
    """With our kernels and without them; the second step has other masks than the first."""
    built = trainer(dropping())
    built.model.bottom.fused_dtype = built.model.top.fused_dtype = fused
    for step in range(2):
        expected, gradients = by_autograd(built, step)
        before = copies({name: p.detach() for name, p in built.model.named_parameters()})
        (loss,) = steps(built, slice(step, step + 1))
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        assert len(gradients) == 10
        for name, gradient in gradients.items():
            after = before[name] - 0.5 * gradient
            torch.testing.assert_close(built.weights()[name], after, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("changes", [{"precision": "bf16"}, {"precision": "fp16"}], ids=str)
def test_low_precision_follows_fp32(changes: dict[str, Any]) -> None:
    found, expected = (steps(trainer(dropping(**c)), slice(3)) for c in (changes, {}))
    assert found == pytest.approx(expected, abs=0.02)


def test_fp8_follows_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_mlp, "SMALL_LAYER", 100)
    network = dataclasses.replace(dropping().model, top_mlp=(32, 48, 16, 1))
    low, plain = dropping(model=network, precision="fp8"), dropping(model=network)
    assert steps(trainer(low), slice(3)) == pytest.approx(steps(trainer(plain), slice(3)), abs=0.05)


def test_micro_batches_drop_the_same() -> None:
    whole, parts = trainer(dropping()), trainer(dropping(micro_batch=128))
    assert steps(parts) == pytest.approx(steps(whole), rel=1e-5)
    for key, tensor in whole.weights().items():
        torch.testing.assert_close(parts.weights()[key], tensor, rtol=1e-4, atol=1e-5)


def test_predictions_drop_nothing() -> None:
    cfg = dropping()
    with_dropout = trainer(cfg)
    without = trainer(dropping(model=dataclasses.replace(cfg.model, dropout=0.0)))
    held_out = build_data(cfg, "test", 0, 1)
    assert same_bits(with_dropout.weights(), without.weights())
    assert torch.equal(predict(with_dropout, held_out).logits, predict(without, held_out).logits)


def test_a_continued_run_has_the_same_bits(tmp_path: Path) -> None:
    flags = ["--model.dropout", "0.3", "--model.interaction-dropout", "0.1"]
    assert train(tmp_path / "whole", *flags) == 0
    assert train(tmp_path / "parts", *flags, "--max-steps", "3") == 0
    assert train(tmp_path / "parts", *flags) == 0
    whole = saved(newest(tmp_path / "whole"))
    assert whole == saved(newest(tmp_path / "parts"))
    assert train(tmp_path / "none") == 0
    assert whole != saved(newest(tmp_path / "none"))


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_shares_that_are_none(share: float) -> None:
    network = dataclasses.replace(config().model, dropout=share)
    with pytest.raises(InputError, match=r"model.dropout must be (at least 0|below 1)"):
        config(model=network)


def test_dropout_without_hidden_layers_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The demo has none: it would drop nothing, and say nothing."""
    flags = ["--model.dropout", "0.2"]
    refused(capsys, ["show", "dlrm-demo", *flags], "this network has none. Give it some (--model")
    assert main(["show", "dlrm-demo", *flags, "--model.top-mlp", "64", "32", "1"]) == 0
    assert main(["show", "dlrm-demo", "--model.interaction-dropout", "0.2"]) == 0
    assert main(["show", "dlrm-demo", *flags, "--model.interaction", "projection"]) == 0
