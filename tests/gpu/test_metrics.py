"""Metrics on a GPU are those on a CPU."""

import dataclasses
from typing import Any

import pytest
import torch

from trainmark.metrics import binary

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")


def numbers(found: Any) -> list[float]:
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, list):
        return [number for part in found for number in numbers(part)]
    return [] if found is None else [float(found)]


def test_assessments_and_differences_are_those_of_a_cpu() -> None:
    random = torch.Generator().manual_seed(0)
    logits = (torch.randn(200_000, generator=random) * 50).round() / 50
    labels = torch.rand(200_000, generator=random) < logits.sigmoid()
    groups = torch.randint(0, 5000, (200_000,), generator=random, dtype=torch.int32)
    other = logits + torch.randn(200_000, generator=random)
    found = []
    for device in (torch.device("cpu"), GPU):
        x, y, g, z = (t.to(device) for t in (logits, labels, groups, other))
        assessed = binary.assess(x, y, g)
        assert assessed is not None
        both: list[Any] = [assessed, binary.difference(x, z, y)]
        found.append([numbers(dataclasses.asdict(one)) for one in both])
    on_cpu, on_gpu = found
    assert len(on_cpu[0]) > 60
    for expected, values in zip(on_cpu, on_gpu, strict=True):
        assert values == pytest.approx(expected, rel=1e-9)
