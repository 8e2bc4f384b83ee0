"""`dlrm-demo` trains alike wherever it does, to its end: rounding does not grow."""

import dataclasses
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from statistics import mean

import pytest
import torch

from tests import small
from tests.distributed.launching import on_ranks
from trainmark import workloads
from trainmark.cli import main
from trainmark.workloads.dlrm.data import build_data

NEAR = 1e-5
"""Relative, of AUCs and of the mean losses of so many steps:"""
STEPS = 50


def means(losses: list[float]) -> list[float]:
    return [mean(losses[i : i + STEPS]) for i in range(0, len(losses), STEPS)]


@pytest.mark.parametrize("seed", [0, 7])
def test_a_disturbance_does_not_grow(seed: int) -> None:
    """A hundred times rounding, and another order of additions, through warm-up and peak rate."""
    run = dataclasses.replace(workloads.named_run("dlrm-demo"), device="cpu", seed=seed)
    cfg = workloads.resolve(run, small.ONE_CPU)
    one, other = small.trainer(cfg), small.trainer(cfg)
    random = torch.Generator().manual_seed(1)
    for weight in other.weights().values():
        weight.mul_(1 + 1e-5 * torch.randn(weight.shape, generator=random))
    losses: list[tuple[float, float]] = []
    for step, batch in enumerate(islice(build_data(cfg, "train", 0, 1), 3 * STEPS)):
        lr = cfg.lr * cfg.schedule.factor(step)
        a, _ = one.step(one.prepare(batch), lr)
        b, _ = other.step(other.prepare(batch, 512), lr)
        losses.append((a.item(), b.item()))
    assert lr == pytest.approx(cfg.lr)
    alone, disturbed = (means(list(of)) for of in zip(*losses, strict=True))
    assert disturbed == pytest.approx(alone, rel=NEAR)
    assert disturbed != alone
    assert alone[-1] < 0.92 * alone[0]


def trained(output: Path, *flags: str, ranks: int = 1) -> tuple[list[float], float]:
    """(mean losses, AUC) of the demo on so many ranks."""
    rest = ["--device", "cpu", "--evals-per-epoch", "0", "--checkpoint-every", "never"]
    words = ["train", "dlrm-demo", *rest, *flags, "--output", str(output)]
    if ranks == 1:
        assert main(words) == 0
    else:
        on_ranks(output.parent, words, world=ranks)
    assert small.result(output)["parallel"]["dp"] == ranks
    losses = [loss for _, _, loss in small.curve(output)]
    return means(losses), small.result(output)["quality"]["value"]


def test_two_ranks_train_the_demo_like_one(tmp_path: Path) -> None:
    flags = ("--seed", "2", "--synthetic-rows", str(2 * STEPS * 2048))
    (losses, auc), (others, other_auc) = (
        trained(tmp_path / str(ranks), *flags, ranks=ranks) for ranks in (1, 2)
    )
    assert len(losses) == 2
    assert others == pytest.approx(losses, rel=NEAR)
    assert other_auc == pytest.approx(auc, rel=NEAR)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2, 7])
def test_the_whole_demo_on_1_2_and_4_ranks_and_by_both_engines(seed: int, tmp_path: Path) -> None:
    seeded = ("--seed", str(seed))
    losses, auc = trained(tmp_path / "1", *seeded)
    assert len(losses) == 16
    assert small.result(tmp_path / "1")["quality"]["reached"]
    cases: dict[str, tuple[tuple[str, ...], int]] = {"2": ((), 2), "4": ((), 4)}
    cases["micro-batches"] = (("--micro-batch", "512"), 1)
    if find_spec("torchrec"):
        cases["torchrec"] = (("--engine", "torchrec"), 2)
    for name, (flags, ranks) in cases.items():
        others, other_auc = trained(tmp_path / name, *seeded, *flags, ranks=ranks)
        assert others == pytest.approx(losses, rel=NEAR), name
        assert other_auc == pytest.approx(auc, rel=NEAR), name
