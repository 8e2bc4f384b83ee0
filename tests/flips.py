"""Flipped bits in weights and activations of a checked step, and whether the check finds them.

python -m tests.flips llama3 weights 100        # what is counted, for docs/reliability.md
"""

import ctypes
import dataclasses
import math
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests import small, small_distilbert
from tests.distributed import llama3_ranks
from trainmark import workloads
from trainmark.config import filled
from trainmark.contract import AnyWorkload, Trainer
from trainmark.distributed.mesh import single
from trainmark.run.loop import build_trainer
from trainmark.training import checking
from trainmark.workloads.distilbert import step as distilbert_step
from trainmark.workloads.dlrm import step as dlrm_step
from trainmark.workloads.llama3 import step as llama3_step

CPU = torch.device("cpu")
LR = 1e-2
THAT_MATTERS = 1e-4
"""Change of the loss."""
STEPS: dict[str, Any] = {
    "dlrm": dlrm_step,
    "distilbert": distilbert_step,
    "llama3": llama3_step,
}
_ONE_LAYER = dataclasses.replace(small_distilbert.MODEL, layers=1, hidden=16, feed_forward=32)
CONFIGS: dict[str, Callable[[], Any]] = {
    "dlrm": small.config,
    "distilbert": lambda: small_distilbert.config(model=_ONE_LAYER),
    "llama3": lambda: llama3_ranks.config(1, micro_batch=8),
}


def flip(tensor: Tensor, element: int, bit: int) -> None:
    """One bit in memory, as hardware does it: nobody is told."""
    address = tensor.data_ptr() + bit // 8
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        element, at = divmod(element, size)
        address += at * stride * tensor.element_size()
    ctypes.c_uint8.from_address(address).value ^= 1 << bit % 8


class Moments(TorchDispatchMode):
    """Counts operations with floating-point results; calls `then(result)` at one of them."""

    def __init__(self, at: int | None = None, then: Callable[[Tensor], None] | None = None) -> None:
        super().__init__()
        self.count, self.at, self.then, self.is_paused = 0, at, then, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        results = [t for t in tree_leaves(found) if _is_floating(t)]
        if results and not self.is_paused:
            if self.count == self.at and self.then is not None:
                self.is_paused = True
                self.then(results[0])
                self.is_paused = False
            self.count += 1
        return found


def _is_floating(found: Any) -> bool:
    return isinstance(found, Tensor) and found.is_floating_point() and found.numel() > 0


@contextmanager
def watched(workload: str, moments: Moments) -> Iterator[None]:
    """The operations of a checked step's two computations, without those that only compare."""
    sum_of_words, twice = checking._sum_of_words, checking.computed_twice

    def without_moments(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            before, moments.is_paused = moments.is_paused, True
            found = function(*arguments)
            moments.is_paused = before
            return found

        return called

    def computed_twice(compute: Any, described: Any, forget: Any, weights: Any) -> Any:
        with moments:
            return twice(compute, described, forget, without_moments(weights))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "_sum_of_words", without_moments(sum_of_words))
        patch.setattr(STEPS[workload], "computed_twice", computed_twice)
        yield


@dataclass
class Trained:
    """A small model after a few steps, which is put back there after every case."""

    name: str
    workload: AnyWorkload
    trainer: Trainer[Any, Any]
    batches: list[Any]
    kept: dict[str, Tensor]

    @staticmethod
    def of(name: str) -> "Trained":
        cfg, workload = CONFIGS[name](), workloads.load(name)
        trainer = build_trainer(cfg, workload, single(CPU))
        data = iter(workload.build_data(cfg, "train", 0, 1))
        batches = [next(data) for _ in range(5)]
        for batch in batches[:3]:
            trainer.step(trainer.prepare(batch), LR)
        made = Trained(name, workload, trainer, batches[3:], {})
        made.kept = {key: held.clone() for key, held in made.tensors().items()}
        return made

    def tensors(self) -> dict[str, Tensor]:
        return self.trainer.weights() | {
            f"state {name}": held for name, held in self.trainer.state_dict().items()
        }

    def put_back(self) -> None:
        for name, held in self.tensors().items():
            held.copy_(self.kept[name])

    def losses(self, moments: Moments) -> tuple[list[float], list[str]]:
        """Of a checked step and of the next one; and what differed."""
        self.put_back()
        checked, following = (self.trainer.prepare(batch) for batch in self.batches)
        step = filled(self.workload.checked_step)
        with watched(self.name, moments):
            loss, _, differ = step(self.trainer, checked, LR)
        after, _ = self.trainer.step(following, LR)
        return [loss.item(), after.item()], [name for name, flag in differ.items() if flag]


@dataclass
class Counts:
    tried: int = 0
    mattered: int = 0
    """Flips that change the loss of the step, or of the next one, by more than 1e-4."""
    found: int = 0
    """Of those."""


def matters(losses: list[float], clean: list[float]) -> bool:
    return any(
        not math.isfinite(a) or abs(a - b) > THAT_MATTERS
        for a, b in zip(losses, clean, strict=True)
    )


def in_activations(name: str, cases: int, seed: int = 0) -> Counts:
    """Flips in results of operations, forward and backward, that the update is made of."""
    trained, chance, counts = Trained.of(name), random.Random(seed), Counts()
    moments = Moments()
    clean, differ = trained.losses(moments)
    assert not differ
    while counts.mattered < cases:

        def at_random(result: Tensor) -> None:
            flip(result, chance.randrange(result.numel()), _high_bit(result, chance))

        counts.tried += 1
        at = chance.randrange(moments.count // 2, moments.count)  # the second computation
        losses, differ = trained.losses(Moments(at, at_random))
        if matters(losses, clean):
            _count(counts, differ)
        if differ and trained.losses(Moments())[0] != clean:
            trained = Trained.of(name)  # a batch, or a constant, has kept the flip
    return counts


def in_weights(name: str, cases: int, seed: int = 0) -> Counts:
    """Flips in weights, at any moment between the first operation and the last."""
    trained, chance, counts = Trained.of(name), random.Random(seed), Counts()
    moments = Moments()
    clean, _ = trained.losses(moments)
    weights = trained.trainer.weights()
    while counts.mattered < cases:
        counts.tried += 1
        weight = weights[chance.choice(list(weights))]
        element, bit = chance.randrange(weight.numel()), _high_bit(weight, chance)

        def at_moment(
            _: Tensor, weight: Tensor = weight, element: int = element, bit: int = bit
        ) -> None:
            flip(weight, element, bit)

        # Whether it matters: how the loss of this very batch changes, flipped from the beginning.
        if not matters(trained.losses(Moments(0, at_moment))[0][:1], clean[:1]):
            continue
        _, differ = trained.losses(Moments(chance.randrange(moments.count), at_moment))
        _count(counts, differ)
    return counts


def _high_bit(tensor: Tensor, chance: random.Random) -> int:
    """Of the highest 12, since others hardly change a loss."""
    bits = 8 * tensor.element_size()
    return chance.randrange(bits - 12, bits)


def _count(counts: Counts, differ: list[str]) -> None:
    counts.mattered += 1
    counts.found += bool(differ)


if __name__ == "__main__":
    torch.set_num_threads(1)
    chosen, where, number = sys.argv[1:]
    print(
        chosen, where, (in_weights if where == "weights" else in_activations)(chosen, int(number))
    )
