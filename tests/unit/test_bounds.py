"""Numbers know their bounds by their type, whichever road they come by."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest
from annotated_types import BaseMetadata

from tests.unit.refusals import refused
from trainmark import workloads
from trainmark.validation import problems

RUN_KINDS = {type(workloads.named_run(name)) for name in workloads.named_runs()}


def _numbers(kind: type[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every field of a dataclass, and of those in it, that is a number or may be one."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        bare = hint.__origin__ if hasattr(hint, "__metadata__") else hint
        if dataclasses.is_dataclass(bare):
            yield from _numbers(bare, f"{prefix}{name}.")  # type: ignore[arg-type]
            continue
        for part in (hint, *get_args(hint), *(p for a in get_args(hint) for p in get_args(a))):
            if part in (int, float) or getattr(part, "__origin__", None) in (int, float):
                yield prefix + name, hint


def _is_bounded(hint: Any) -> bool:
    """Whether each number in a type carries bounds."""
    if hint in (int, float):
        return False
    if getattr(hint, "__origin__", None) in (int, float):
        return any(isinstance(bound, BaseMetadata) for bound in hint.__metadata__)
    return all(_is_bounded(part) for part in get_args(hint) if part is not NoneType)


def test_every_number_of_a_run_has_bounds() -> None:
    found = {(kind.__name__, *field) for kind in RUN_KINDS for field in _numbers(kind)}
    assert len(found) > 70
    assert [f"{kind}.{name}" for kind, name, hint in found if not _is_bounded(hint)] == []


@pytest.mark.parametrize("name", sorted(workloads.named_runs()))
def test_named_runs_are_within_bounds(name: str) -> None:
    assert problems(workloads.named_run(name)) == []


INFINITE = [
    ("llama3-demo", "optimizer.clip"),
    ("llama3-demo", "optimizer.eps"),
    ("llama3-demo", "optimizer.weight-decay"),
    ("llama3-demo", "model.norm-eps"),
    ("llama3-demo", "model.rope-theta"),
    ("llama3-demo", "model.init-std"),
    ("distilbert-demo", "model.layer-norm-eps"),
    ("distilbert-demo", "optimizer.eps"),
    ("dlrm-demo", "data-parallel-threshold"),
    ("dlrm-demo", "column-slice-threshold"),
    ("dlrm-demo", "loss-scale"),
]


@pytest.mark.parametrize(("run", "flag"), INFINITE)
def test_an_infinite_number_is_refused_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run: str, flag: str
) -> None:
    output = tmp_path / "run"
    words = ["train", run, f"--{flag}", "inf", "--output", str(output)]
    refused(capsys, words, flag.replace("-", "_"), "must be a finite number. Received: inf")
    assert not output.exists()


@pytest.mark.parametrize(("name", "text"), [
    ("a.toml", "[optimizer]\nclip = inf\n"),
    ("a.json", '{"optimizer": {"clip": Infinity}}'),
])  # fmt: skip
def test_files_are_held_to_the_same_bounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    words = ["show", "llama3-demo", "--config", str(tmp_path / name)]
    refused(capsys, words, "optimizer.clip must be a finite number. Received: inf")


@pytest.mark.parametrize(
    ("run", "flag", "value", "sentence"),
    [
        ("llama3-demo", "optimizer.beta1", "-1", "optimizer.beta1 must be at least 0"),
        ("dlrm-demo", "optimizer.beta1", "1", "optimizer.beta1 must be below 1. Received: 1.0."),
        ("distilbert-demo", "optimizer.beta2", "nan", "optimizer.beta2 must be "),
        ("llama3-demo", "seed", "-1", "seed must be at least 0. Received: -1."),
        ("llama3-demo", "seed", str(2**63), "seed must be below"),
        ("llama3-demo", "model.layers", "2147483648", "model.layers must be at most 10,000"),
        ("distilbert-demo", "model.layers", str(2**70), "model.layers must be at most 10,000"),
        ("llama3-demo", "model.hidden", str(2**64), "model.hidden must be at most"),
        ("distilbert-demo", "synthetic-sentences", "2147483648", "must be at most 10,000,000"),
        ("dlrm-demo", "loss-scale", "0", "loss_scale must be above 0. Received: 0.0."),
        ("dlrm-demo", "global-batch", str(10**30), "global_batch must be at most"),
    ],
)
def test_numbers_out_of_bounds_are_refused_in_a_sentence(
    capsys: pytest.CaptureFixture[str], run: str, flag: str, value: str, sentence: str
) -> None:
    refused(capsys, ["show", run, f"--{flag}", value], sentence)
