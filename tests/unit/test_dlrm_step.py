"""One optimiser step: accumulation, precisions, loss scale, and what is never applied."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch

from tests.small import CPU, config, copies, same_bits, trainer
from trainmark.distributed.gradients import FlatGradients
from trainmark.distributed.mesh import single
from trainmark.kernels import fp8_mlp
from trainmark.kernels.compiled import INSTALLED
from trainmark.training.optimizers import LossScale, gradient_norm
from trainmark.workloads.dlrm import mlp
from trainmark.workloads.dlrm.data import ClickBatch, build_data
from trainmark.workloads.dlrm.runs import DlrmRun, Optimizer, Sharding, TableFormat
from trainmark.workloads.dlrm.step import DlrmTrainer

OptimizerName = Literal["sgd", "adagrad", "rowwise_adagrad", "adam"]
OPTIMIZERS: list[OptimizerName] = ["sgd", "adagrad", "rowwise_adagrad", "adam"]
pytestmark = pytest.mark.usefixtures("no_process_group_is_left")


def batches(cfg: DlrmRun, count: int = 3) -> Iterator[ClickBatch]:
    return itertools.islice(build_data(cfg, "train", 0, 1), count)


def steps(built: DlrmTrainer, cfg: DlrmRun, lr: float = 0.05, count: int = 3) -> list[float]:
    return [built.step(built.prepare(batch), lr)[0].item() for batch in batches(cfg, count)]


def everything(built: DlrmTrainer) -> dict[str, torch.Tensor]:
    return copies(built.weights() | built.state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("micro_batch", [256, 128])
def test_accumulation_equals_one_batch(name: OptimizerName, micro_batch: int) -> None:
    cfg = config(optimizer=Optimizer(name=name))
    split = config(optimizer=Optimizer(name=name), micro_batch=micro_batch)
    assert split.accumulate == 512 // micro_batch
    whole, parts = trainer(cfg), trainer(split)
    assert steps(whole, cfg) == pytest.approx(steps(parts, split), rel=1e-5)
    for key, tensor in whole.weights().items():
        torch.testing.assert_close(parts.weights()[key], tensor, rtol=1e-4, atol=1e-5)


def test_a_partial_batch_is_weighted_by_its_samples() -> None:
    """The loss of 416 samples in micro-batches of 200, 200 and 16 is their plain mean."""
    cfg = config(optimizer=Optimizer(name="sgd"))
    last = list(build_data(cfg, "train", 0, 1))[-1]
    assert (last.samples, last.partial) == (416, True)
    whole = trainer(cfg)
    parts = trainer(dataclasses.replace(cfg, micro_batch=200))
    expected, _ = whole.step(whole.prepare(last), 0.5)
    found, _ = parts.step(parts.prepare(last), 0.5)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for key, tensor in whole.weights().items():
        torch.testing.assert_close(parts.weights()[key], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("changes", [{}, {"precision": "fp16", "loss_scale": 1024.0}], ids=str)
def test_weight_decay(name: OptimizerName, changes: dict[str, Any]) -> None:
    """Of weights and of rows that were looked up, not of biases, whatever the loss scale."""
    decayed, plain = (
        trainer(config(optimizer=Optimizer(name=name, weight_decay=decay), **changes))
        for decay in (0.5, 0.0)
    )
    before = copies(plain.weights())
    batch = next(batches(plain.cfg))
    for built in (decayed, plain):
        built.step(built.prepare(batch), 0.1)
    (group,) = batch.groups
    for key, tensor in plain.weights().items():
        share = torch.full((len(tensor), 1), 0.1 * 0.5) if tensor.dim() > 1 else torch.zeros(1)
        if key.startswith("tables."):
            looked_up = group.ids[group.features.index(int(key.split(".")[1]))].long().unique()
            share.zero_()[looked_up] = 0.1 * 0.5
        expected = tensor - share * before[key]
        torch.testing.assert_close(decayed.weights()[key], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"table_format": TableFormat(table_precision="bf16", fp32_up_to_rows=5)},
        {"sharding": Sharding(host_tables=(0,))},
    ],
    ids=str,
)
def test_tables_begin_as_small_as_asked_for(changes: dict[str, Any]) -> None:
    """The same draws, to another size: as published, a table of 3 rows has numbers up to 0.58."""
    network = dataclasses.replace(config().model, table_init=0.01)
    published, small = trainer(config(**changes)), trainer(config(**changes, model=network))
    for table, rows in enumerate((50, 7, 3)):
        name = f"tables.{table}.weight"
        before, after = (whole(built.weights()[name]).float() for built in (published, small))
        torch.testing.assert_close(after, before * 0.01 * rows**0.5, rtol=1e-2, atol=1e-7)


def whole(tensor: Any) -> torch.Tensor:
    """What a single rank holds of a table."""
    return tensor if isinstance(tensor, torch.Tensor) else tensor.shards[0].tensor


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_low_precision_follows_fp32(precision: str, name: OptimizerName) -> None:
    plain = config(optimizer=Optimizer(name=name))
    cfg = config(optimizer=Optimizer(name=name), precision=precision, loss_scale=1024.0)
    reference, low = trainer(plain), trainer(cfg)
    expected, found = steps(reference, plain, count=6), steps(low, cfg, count=6)
    assert found == pytest.approx(expected, abs=0.02)
    assert found != expected
    assert {tensor.dtype for tensor in low.weights().values()} == {torch.float32}


def test_fp8_follows_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are encoded once a step, ahead of the layers that use them."""
    encoded, encode = [], mlp.encode_weights
    monkeypatch.setattr(fp8_mlp, "SMALL_LAYER", 100)
    monkeypatch.setattr(mlp, "encode_weights", lambda w: encoded.append(len(w)) or encode(w))
    monkeypatch.delattr(fp8_mlp, "encode_weights")
    network = dataclasses.replace(config().model, top_mlp=(32, 48, 16, 1))
    plain, cfg = config(model=network), config(model=network, precision="fp8")
    expected, found = steps(trainer(plain), plain, count=6), steps(trainer(cfg), cfg, count=6)
    assert found == pytest.approx(expected, abs=0.05)
    assert found != expected
    assert encoded == [3] * 6


@pytest.mark.parametrize("micro_batch", [512, 128])
@pytest.mark.parametrize(("precision", "scale"), [("fp32", "dynamic"), ("fp16", 1024.0)])
def test_the_loss_that_brings_its_gradients_along(
    precision: str, scale: float | str, micro_batch: int
) -> None:
    """As a GPU computes it, against autograd's way through the same layers."""
    cfg = config(precision=precision, loss_scale=scale, micro_batch=micro_batch)
    plain, fused = trainer(cfg), trainer(cfg)
    fused.model.top.fused_dtype = torch.float32
    close = 1e-5 if precision == "fp32" else 5e-3
    assert steps(fused, cfg) == pytest.approx(steps(plain, cfg), rel=close)
    for key, tensor in plain.weights().items():
        torch.testing.assert_close(fused.weights()[key], tensor, rtol=close, atol=close)


def test_what_was_copied_may_be_overwritten_before_the_step() -> None:
    """As slots do it on a GPU; whatever the types in which a batch came."""
    cfg = config()
    built, batch = trainer(cfg), next(batches(cfg))
    batch = dataclasses.replace(batch, numerical=batch.numerical.float())
    prepared = built.prepare(batch)
    batch.numerical.fill_(torch.nan)
    _, skipped = built.step(prepared, 0.1)
    assert not skipped


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": Optimizer(name="sgd")},
        {"optimizer": Optimizer(name="adagrad")},
        {"optimizer": Optimizer(name="rowwise_adagrad"), "precision": "fp16"},
    ],
    ids=str,
)
def test_steps_of_slots_and_others_take_turns(changes: dict[str, Any]) -> None:
    """A slot's gradients stay where they are made; those of a partial batch go to one buffer."""
    fused = TableFormat(table_precision="int8", fp32_up_to_rows=5)  # the engine that slots are for
    cfg = config(**changes, epochs=2, table_format=fused)
    in_turns, plain = trainer(cfg), trainer(cfg)
    partial = 0
    for batch in build_data(cfg, "train", 0, 1):
        plain.step(plain.prepare(batch), 0.25)
        prepared = in_turns.prepare(batch)
        if batch.partial:
            partial += 1
            in_turns.step(prepared, 0.25)
        else:
            in_turns._lr.fill_(0.25)
            in_turns._train_in_slot(prepared.micro_batches[0], checked=batch.position % 3 == 0)
        assert torch.equal(in_turns._outcome[:2], plain._outcome[:2])
        torch.testing.assert_close(in_turns._outcome, plain._outcome)  # a norm adds in any order
    assert partial == 2
    assert same_bits(everything(in_turns), everything(plain))


# --- the order of a step on several ranks


class _Probe(torch.autograd.Function):
    """Leaves a tensor as it is, and notes when its gradient is passed on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, events: list[str]) -> torch.Tensor:
        ctx.events = events
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.events.append("bottom's backward")
        return gradient, None


@pytest.mark.parametrize("engine", ["local", "sharded"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_tops_reduction_begins_before_the_bottoms_backward_pass(
    micro_batches: int, fused: bool, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all of the top's gradients are in it."""
    exchange = Sharding(force_exchange=engine == "sharded")
    cfg = config(micro_batch=512 // micro_batches, sharding=exchange)
    built, events = trainer(cfg), []
    built.model.bottom.fused_dtype = built.model.top.fused_dtype = torch.float32 if fused else None
    forward, start = built.model.bottom.forward, built._top.start
    reduced = torch.empty(0)

    def start_reduction() -> None:
        nonlocal reduced
        events.append("top's reduction")
        reduced = built._top.gradients.clone()
        start()

    monkeypatch.setattr(built.model.bottom, "forward", lambda x: _Probe.apply(forward(x), events))
    monkeypatch.setattr(built._top, "start", start_reduction)
    steps(built, cfg, count=1)
    before = ["bottom's backward"] * (micro_batches - 1)
    assert events == [*before, "top's reduction", "bottom's backward"]
    assert reduced.any()
    assert torch.equal(reduced, built._top.gradients)


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_the_loss_is_never_a_gradient(extra: int) -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    gradients = FlatGradients([weight], single(CPU), extra=extra)
    if extra == 0:
        with pytest.raises(IndexError):
            gradients.loss.add_(1)
    else:
        gradients.loss.add_(1)
        assert gradients.extra[-1] == 1
    assert weight.grad is not None
    assert not weight.grad.any()


# --- loss scale


def test_dynamic_scale_halves_on_overflow_and_skips() -> None:
    cfg = config(precision="fp16")
    built = trainer(cfg)
    batch = next(batches(cfg))
    assert built.state_dict()["loss_scale"] == 65536
    # A gradient of 2^40 times the loss's overflows fp16 on its way back.
    built.state_dict()["loss_scale"].fill_(2.0**24)
    before = everything(built)
    scales = []
    while (outcome := built.step(built.prepare(batch), 0.1))[1]:
        assert math.isfinite(outcome[0].item())
        scales.append(built.state_dict()["loss_scale"].item())
        after = everything(built)
        before["loss_scale"] = after["loss_scale"]
        assert same_bits(before, after)
    assert scales
    assert scales == [2.0 ** (23 - i) for i in range(len(scales))]
    assert not same_bits(before, everything(built))


def test_static_scale_stays() -> None:
    built = trainer(config(precision="fp16", loss_scale=2.0**30))
    _expect_nothing_applied(built)
    assert built.state_dict()["loss_scale"] == 2.0**30


def test_the_scale_does_not_change_the_update() -> None:
    small, large = (config(precision="fp16", loss_scale=scale) for scale in (64.0, 1024.0))
    a, b = trainer(small), trainer(large)
    steps(a, small, count=1), steps(b, large, count=1)
    for key, tensor in a.weights().items():
        torch.testing.assert_close(b.weights()[key], tensor, rtol=1e-2, atol=1e-3)


def test_scale_grows_after_good_steps_and_stays_in_bounds() -> None:
    scale = LossScale("dynamic", torch.device("cpu"))
    good, bad = torch.ones(()), torch.zeros(())
    for _ in range(LossScale.GROWTH_INTERVAL - 1):
        scale.update(good)
    assert scale.scale == 65536
    scale.update(good)
    assert (scale.scale.item(), scale.good_steps.item()) == (131072, 0)
    scale.update(bad)
    assert (scale.scale.item(), scale.good_steps.item()) == (65536, 0)
    for _ in range(300):
        scale.update(bad)
    assert scale.scale > 0  # else its inverse would turn zero gradients into NaN
    assert math.isfinite(1 / scale.scale.item())


# --- not finite


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_never_applied(name: OptimizerName, poison: float) -> None:
    cfg = config(optimizer=Optimizer(name=name), micro_batch=256)
    built = trainer(cfg)
    steps(built, cfg)
    batch = next(batches(cfg))
    batch.numerical[300, 4] = poison
    before = everything(built)
    loss, skipped = built.step(built.prepare(batch), 0.1)
    assert skipped
    assert not math.isfinite(loss.item())
    assert same_bits(before, everything(built))
    good, skipped = built.step(built.prepare(next(batches(cfg))), 0.1)
    assert not skipped
    assert math.isfinite(good.item())
    assert not same_bits(before, everything(built))


def test_a_dense_gradient_that_is_not_finite_is_never_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = DlrmTrainer._finish_gradients

    def poisoned(self: DlrmTrainer) -> tuple[torch.Tensor, torch.Tensor]:
        gradient = next(self.model.top.parameters()).grad
        assert gradient is not None
        gradient.view(-1)[3] = float("inf")
        return original(self)

    monkeypatch.setattr(DlrmTrainer, "_finish_gradients", poisoned)
    _expect_nothing_applied(trainer(config()))


@pytest.mark.parametrize("compiled", [True, False])
def test_a_row_gradient_that_is_not_finite_is_never_applied(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the product of the first two rows, which no dense parameter sees."""
    monkeypatch.setattr("trainmark.kernels.compiled.INSTALLED", compiled and INSTALLED)
    built = trainer(config())
    original = built.model.tables.lookup_and_interact

    def poisoned(lookup: Any, x_BD: torch.Tensor, plain: Any) -> torch.Tensor:
        out_BW = original(lookup, x_BD, plain)

        def poison(grad_BW: torch.Tensor) -> torch.Tensor:
            changed = grad_BW.clone()
            changed[3, x_BD.shape[1] + 2] = float("inf")
            return changed

        out_BW.register_hook(poison)
        return out_BW

    monkeypatch.setattr(built.model.tables, "lookup_and_interact", poisoned)
    _expect_nothing_applied(built)


def _expect_nothing_applied(built: DlrmTrainer) -> None:
    before = everything(built)
    loss, skipped = built.step(built.prepare(next(batches(built.cfg))), 0.1)
    assert skipped
    assert math.isfinite(loss.item())
    assert same_bits(before, everything(built))


def test_the_gate_sees_every_element() -> None:
    ones, empty = torch.ones(3), torch.empty(0)
    norm, gate = gradient_norm([ones, empty], [ones])
    assert (norm, gate) == (pytest.approx(3**0.5), 1)
    both = [float("inf"), -float("inf")]
    for bad in ([1.0, float("nan")], [1.0, float("inf")], [1.0, -float("inf")], both):
        assert gradient_norm([ones, torch.tensor(bad)], [ones])[1] == 0
        norm, gate = gradient_norm([ones], [torch.tensor(bad)])
        assert (norm, gate) == (pytest.approx(3**0.5), 0)
