"""Slots on a CPU, with stand-ins for streams and graphs; test_dlrm_graphs.py has them on a GPU."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trainmark.kernels import graph
from trainmark.training.transfer import Make
from trainmark.workloads.dlrm.slots import Filled, Slots


class Event:
    """How often something waited for it."""

    def __init__(self, device: Any = None) -> None:
        self.waits = 0

    def record(self) -> None:
        """Nothing: here everything has happened already."""

    def wait(self) -> None:
        self.waits += 1


class CopyStream:
    """A `Copier` that knows whether something is done on its stream."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.is_current = False
        self.waited_for: list[Event] = []

    @contextmanager
    def _current(self) -> Iterator[None]:
        self.is_current = True
        yield
        self.is_current = False

    def into(
        self, places: list[Tensor], tensors: Sequence[Tensor], make: Make | None = None
    ) -> Event:
        if make is not None:
            make(places)
        else:
            for place, tensor in zip(places, tensors, strict=True):
                place.copy_(tensor)
        return Event()

    def then(self, function: Callable[[], Any], after: Event | None = None) -> tuple[Any, Event]:
        if after is not None:
            self.waited_for.append(after)
        with self._current():
            return function(), Event()


class Trained:
    """Two slots, and what was trained on in them."""

    def __init__(self) -> None:
        self.stream = CopyStream()
        self.sums: list[float] = []
        self._slots = Slots(self.stream, self._train)  # type: ignore[arg-type]
        self._reader = torch.empty(3)

    def fill(self, number: float) -> Filled:
        """From the reader's memory, which the next batch takes."""
        filled = self._slots.fill([self._reader.fill_(number)], self._prepare)
        self._reader.fill_(torch.nan)
        return filled

    def _prepare(self, copies: list[Tensor]) -> Tensor:
        assert self.stream.is_current
        return copies[0] * 2

    def _train(self, batch: Tensor, checked: bool) -> None:
        assert not self.stream.is_current
        self.sums.append(float(batch.sum()))


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(graph, "_aside", lambda function: function())
    monkeypatch.setattr(graph, "captured", lambda function, _: SimpleNamespace(replay=function))
    return Trained()


def test_a_batch_is_filled_while_another_is_trained_on(trained: Trained) -> None:
    ahead = trained.fill(0)
    for number in range(1, 9):
        now, ahead = ahead, trained.fill(number)
        now.train(checked=False)
    assert trained.sums == [6.0 * number for number in range(8)]


def test_a_slot_is_prepared_anew_after_the_step_with_its_last_batch(trained: Trained) -> None:
    steps = []
    for number in range(6):
        filled = trained.fill(number)
        filled.train(checked=False)
        assert filled.prepared.waits == 1
        steps.append(filled._slot._trained)
    assert trained.stream.waited_for == steps[:4]


def test_a_batch_that_another_has_replaced_is_not_trained_on(trained: Trained) -> None:
    first, second, third = trained.fill(1), trained.fill(2), trained.fill(3)
    with pytest.raises(RuntimeError, match="further ahead"):
        first.train(checked=False)
    second.train(checked=False)
    third.train(checked=False)
    assert trained.sums == [12.0, 18.0]


def test_copies_lie_in_memory_of_the_copy_stream(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the compute stream's they might be overwritten by what that stream has yet to do."""
    made = []
    empty_like = torch.empty_like

    def noted(tensor: Tensor, **named: Any) -> Tensor:
        made.append(trained.stream.is_current)
        return empty_like(tensor, **named)

    monkeypatch.setattr(torch, "empty_like", noted)
    trained.fill(1)
    assert made == [True] * Slots.COUNT
