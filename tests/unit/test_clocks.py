"""The clocks, with time under control."""

from collections.abc import Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainmark.run import clocks as module
from trainmark.run import feed
from trainmark.run.clocks import Clocks
from trainmark.run.feed import Feed


class Time:
    """Stands for the `time` module: it passes when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    fake = Time()
    monkeypatch.setattr(module, "time", fake)
    return fake


def step(clocks: Clocks, time: Time, seconds: float, samples: int = 10) -> None:
    time.passes(seconds)
    clocks.step_done(samples=samples, tokens=2 * samples, partial=samples < 10)


def session(clocks: Clocks, time: Time) -> None:
    """3 s of init; two steps of warm-up with an evaluation between; three measured ones."""
    time.passes(3)
    clocks.train_starts()
    step(clocks, time, 5)
    with clocks.pause("evaluation"):
        time.passes(7)
    step(clocks, time, 4)
    step(clocks, time, 1)
    clocks.input_waited(0.25)
    with clocks.pause("checkpoint"):
        time.passes(2)
    step(clocks, time, 1)
    with clocks.pause("evaluation"):
        time.passes(6)
    step(clocks, time, 1, samples=4)
    clocks.last_step_done()


def test_one_session(time: Time) -> None:
    clocks = Clocks(time.now, warmup_steps=2)
    session(clocks, time)
    time.passes(11)  # the final evaluation
    clocks.so_far()  # a checkpoint after it must not move the end of training
    time.passes(1)
    clocks.run_ends()
    totals = clocks.totals
    assert (totals.init, totals.whole, totals.e2e) == (3, 27, 42)
    assert (totals.evaluation, totals.checkpoint, totals.warmup) == (13, 2, 9)
    assert (totals.train, totals.core) == (3, 2.75)
    assert (totals.samples, totals.samples_warmup) == (44, 20)
    assert (totals.tokens, totals.tokens_warmup) == (88, 40)
    assert (totals.steps, totals.steps_warmup, totals.steps_partial) == (5, 2, 1)


def test_seconds_between_looks_are_those_of_steps(time: Time) -> None:
    clocks = Clocks(time.now, warmup_steps=1)
    time.passes(3)
    clocks.train_starts()
    step(clocks, time, 5)
    assert clocks.looked() == 5  # the first, too
    with clocks.pause("evaluation"):
        time.passes(7)
    step(clocks, time, 1)
    step(clocks, time, 1)
    assert clocks.looked() == 2


def test_a_continued_run_adds_up(time: Time) -> None:
    first = Clocks(time.now, warmup_steps=2)
    session(first, time)
    state = asdict(first.so_far())
    time.passes(1000)  # between the sessions nothing is counted
    second = Clocks(time.now, warmup_steps=2)
    second.restore(state)
    session(second, time)
    second.run_ends()
    totals = second.totals
    assert (totals.init, totals.whole, totals.e2e) == (6, 54, 60)
    assert (totals.train, totals.core, totals.warmup) == (6, 5.5, 18)
    assert (totals.samples, totals.steps_warmup, totals.sessions) == (88, 4, 2)


def test_a_checkpoint_during_warmup_counts_it_as_warmup(time: Time) -> None:
    clocks = Clocks(time.now, warmup_steps=5)
    clocks.train_starts()
    step(clocks, time, 4)
    with clocks.pause("evaluation"):
        time.passes(2)
    step(clocks, time, 4)
    state = asdict(clocks.so_far())
    assert (state["whole"], state["evaluation"], state["warmup"]) == (10, 2, 8)


@pytest.mark.parametrize("warmup_steps", [3, 4, 100])
def test_a_run_of_warmup_only_has_no_train_time(time: Time, warmup_steps: int) -> None:
    clocks = Clocks(time.now, warmup_steps)
    clocks.train_starts()
    for _ in range(3):
        step(clocks, time, 2)
    clocks.last_step_done()
    assert (clocks.totals.whole, clocks.totals.warmup, clocks.totals.train) == (6, 6, 0)
    assert clocks.totals.samples == clocks.totals.samples_warmup


def test_an_evaluation_that_ends_the_run_is_outside_whole(time: Time) -> None:
    clocks = Clocks(time.now, 0)
    clocks.train_starts()
    step(clocks, time, 2)
    for _ in range(2):
        step(clocks, time, 2)
        with clocks.pause("evaluation"):
            time.passes(5)
    clocks.last_step_done()
    assert (clocks.totals.whole, clocks.totals.evaluation, clocks.totals.train) == (11, 5, 6)


def test_without_warmup_everything_is_measured(time: Time) -> None:
    clocks = Clocks(time.now, 0)
    clocks.train_starts()
    step(clocks, time, 2)
    clocks.last_step_done()
    assert (clocks.totals.warmup, clocks.totals.train, clocks.totals.samples_warmup) == (0, 2, 0)


def test_the_device_is_waited_for_at_every_border(time: Time) -> None:
    """Work that was launched but not done must not slip into the next interval."""

    def finish() -> None:
        time.passes(launched.pop() if launched else 0)

    launched: list[float] = []
    clocks = Clocks(time.now, 1, synchronize=finish)
    clocks.train_starts()
    launched.append(5)
    step(clocks, time, 0)  # the warm-up ends: 5 s
    launched.append(3)
    step(clocks, time, 0)
    with clocks.pause("evaluation"):
        launched.append(10)
    launched.append(2)
    step(clocks, time, 0)
    clocks.last_step_done()
    totals = clocks.totals
    assert (totals.warmup, totals.evaluation, totals.train, totals.whole) == (5, 10, 5, 20)


# --- input wait


class Trainer:
    """Notes what it was asked to prepare."""

    def __init__(self) -> None:
        self.prepared: list[int] = []

    def prepare(self, batch: int) -> SimpleNamespace:
        self.prepared.append(batch)
        return SimpleNamespace(number=batch, ready=None)


def make_feed(batches: Iterator[int], trainer: Any, clocks: Clocks, device: str) -> Feed[Any, Any]:
    return Feed(batches, trainer, clocks, torch.device(device))


def test_a_cpu_waits_for_the_reader_but_not_in_the_warmup(
    monkeypatch: pytest.MonkeyPatch, time: Time
) -> None:
    monkeypatch.setattr(feed, "time", time)

    def batches() -> Iterator[int]:
        for number, seconds in enumerate((5, 3, 2)):
            time.passes(seconds)
            yield number

    clocks = Clocks(time.now, 1)
    fed = make_feed(batches(), Trainer(), clocks, "cpu")
    next(fed)
    assert clocks.totals.input_wait == 0
    clocks.step_done(samples=1, tokens=0, partial=False)
    next(fed)
    assert clocks.totals.input_wait == 2


class Event:
    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms

    def elapsed_time(self, other: "Event") -> float:
        return other.at_ms - self.at_ms


def test_a_devices_waits_are_the_time_between_two_events(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(0.0, 0)
    fed = make_feed(iter(range(2)), Trainer(), clocks, "meta")
    stamps = iter([10.0, 30.0, 100.0, 105.0])
    monkeypatch.setattr(fed, "_event", lambda: Event(next(stamps)))
    for _ in range(2):
        next(fed)
    assert clocks.totals.input_wait == 0
    for _ in range(2):  # of which the second finds nothing new
        fed.collect_waits()
        assert clocks.totals.input_wait == pytest.approx(0.025)


def test_the_feed_prepares_one_batch_ahead() -> None:
    trainer = Trainer()
    fed = make_feed(iter(range(4)), trainer, Clocks(0.0, 0), "cpu")
    seen = [(batch.number, list(trainer.prepared)) for batch in fed]
    assert seen == [(0, [0, 1]), (1, [0, 1, 2]), (2, [0, 1, 2, 3]), (3, [0, 1, 2, 3])]
