"""The clocks of a run and its sample counter. `docs/metrics.md` defines what each measures.

    e2e    |------------------------------------------------------------------------|
    init   |------|
    whole         |-----------------------------------------------------------|
                  warm-up | step step step | evaluation | step | checkpoint | step
    train = whole - evaluation - checkpoint - warmup;  core = train - input_wait

`checkpoint` is how long training stood still for it, `checkpoint_background` how long a thread
wrote beside it.

Samples and tokens are counted from the batches that were trained on, never from a product.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from trainmark.distributed.mesh import Mesh
from trainmark.validation import parse

COUNTS = ("samples", "samples_warmup", "tokens", "tokens_warmup")
ENERGY = ("joules", "train_joules")


@dataclass(kw_only=True)
class Totals:
    """Seconds and counts of one rank, over all the sessions of a run that was continued."""

    e2e: float = 0.0
    init: float = 0.0
    whole: float = 0.0
    evaluation: float = 0.0
    checkpoint: float = 0.0
    checkpoint_background: float = 0.0
    input_wait: float = 0.0
    warmup: float = 0.0
    samples: int = 0
    samples_warmup: int = 0
    tokens: int = 0
    tokens_warmup: int = 0
    steps: int = 0
    steps_warmup: int = 0
    steps_partial: int = 0
    sessions: int = 1
    joules: float | None = 0.0
    """Energy of all sessions; None if any of them could not count."""
    train_joules: float | None = 0.0
    """Energy in the time of `train`."""
    slowest_tokens_s: float = 0.0
    fastest_tokens_s: float = 0.0

    @property
    def train(self) -> float:
        return self.whole - self.evaluation - self.checkpoint - self.warmup

    @property
    def core(self) -> float:
        return self.train - self.input_wait


class Clocks:
    """Measures one rank.

    Args:
        started: `time.perf_counter()` when the process began its work.
        warmup_steps: first steps of each session that p_train and p_core leave out.
        synchronize: waits for the device, so that no launched work is left untimed.
        joules: the energy that the device has used so far; None where it does not count.
    """

    def __init__(
        self,
        started: float,
        warmup_steps: int,
        synchronize: Callable[[], None] = lambda: None,
        joules: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.totals = Totals()
        self._earlier = Totals()  # what the sessions before this one measured
        self._started = started
        self._train_started = started
        self._warmup_left = warmup_steps
        self._training = False  # between the first batch and the last step
        self._paused = 0.0
        self._last_look = (started, 0, True)  # time without pauses, tokens, in warm-up
        self._pauses_since_step: list[tuple[str, float]] = []
        self._synchronize = synchronize
        self._joules = joules
        self._metered = False  # whether energy counts as that of training now
        self._last_joules: float | None = None

    # --- the course of a session

    def train_starts(self) -> None:
        """The first batch is about to be asked for."""
        self._train_started = time.perf_counter()
        self._training = True
        self._last_look = (self._train_started, self.totals.tokens, True)
        self.totals.init = self._earlier.init + self._train_started - self._started
        if self._warmup_left == 0:
            self._end_warmup()

    def step_done(self, *, samples: int, tokens: int, partial: bool) -> None:
        """Count a batch that was handed to the model."""
        totals = self.totals
        totals.steps += 1
        totals.samples += samples
        totals.tokens += tokens
        totals.steps_partial += partial
        self._pauses_since_step.clear()
        if self._warmup_left:
            totals.steps_warmup += 1
            totals.samples_warmup += samples
            totals.tokens_warmup += tokens
            self._warmup_left -= 1
            if self._warmup_left == 0:
                self._end_warmup()

    def looked(self) -> float:
        """The losses so far were read: the device is done with all steps up to here.

        Returns the seconds since the last look, without pauses.
        """
        now, tokens = time.perf_counter() - self._paused, self.totals.tokens
        then, before, began_in_warmup = self._last_look
        self._last_look = (now, tokens, self.in_warmup)
        # In the spread, a stretch that began in the warm-up does not count.
        if tokens > before and not began_in_warmup:
            rate, totals = (tokens - before) / (now - then), self.totals
            totals.slowest_tokens_s = min(totals.slowest_tokens_s or rate, rate)
            totals.fastest_tokens_s = max(totals.fastest_tokens_s, rate)
        return now - then

    @property
    def in_warmup(self) -> bool:
        return self._warmup_left > 0

    def input_waited(self, seconds: float) -> None:
        """The compute stream (on a CPU: the loop) stood still for a batch."""
        self.totals.input_wait += seconds

    def saved(self, seconds: float) -> None:
        """A thread took so long to write a checkpoint."""
        self.totals.checkpoint_background += seconds

    @contextmanager
    def pause(self, kind: Literal["evaluation", "checkpoint"]) -> Iterator[None]:
        """Time an interruption of training."""
        self._synchronize()
        began, metered = time.perf_counter(), self._metered
        self._meter(on=False)
        try:
            yield
        finally:
            self._synchronize()
            self._meter(on=metered)
            seconds = time.perf_counter() - began
            self._add_pause(kind, seconds)
            self._pauses_since_step.append((kind, seconds))

    def last_step_done(self) -> None:
        """Wait for the device: the last step has ended, and `whole` with it."""
        self._synchronize()
        if self._warmup_left:
            self._end_warmup()
        self._meter(on=False)
        self._update_whole()
        self._training = False
        # An evaluation that ended the run by reaching the target came after the last step.
        for kind, seconds in self._pauses_since_step:
            self._add_pause(kind, -seconds)
            self.totals.whole -= seconds

    def _add_pause(self, kind: str, seconds: float) -> None:
        setattr(self.totals, kind, getattr(self.totals, kind) + seconds)
        self._paused += seconds

    def run_ends(self) -> None:
        self.totals.e2e = self.e2e_so_far
        self.totals.joules = _sum(self._earlier.joules, self._joules())

    @property
    def e2e_so_far(self) -> float:
        return self._earlier.e2e + time.perf_counter() - self._started

    def _update_whole(self) -> None:
        if self._training:
            session = time.perf_counter() - self._train_started
            self.totals.whole = self._earlier.whole + session

    def _end_warmup(self) -> None:
        self._warmup_left = 0
        self._synchronize()
        session = time.perf_counter() - self._train_started - self._paused
        self.totals.warmup = self._earlier.warmup + session
        self._meter(on=True)

    def _meter(self, *, on: bool) -> None:
        """Add the energy since the last call, if that was training; then go on, or pause."""
        now = self._joules()
        if self._metered:
            used = None if now is None or self._last_joules is None else now - self._last_joules
            self.totals.train_joules = _sum(self.totals.train_joules, used)
        self._metered, self._last_joules = on, now

    # --- continuing a run

    def so_far(self) -> Totals:
        """The totals as if the session ended here."""
        self._update_whole()
        self._meter(on=self._metered)
        joules = _sum(self._earlier.joules, self._joules())
        totals = replace(self.totals, e2e=self.e2e_so_far, joules=joules)
        if self._warmup_left:
            totals.warmup = self._earlier.warmup + totals.whole - self._earlier.whole - self._paused
        return totals

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from where a checkpoint of the same run stopped counting."""
        unknown = dict.fromkeys(ENERGY)  # where a checkpoint does not say
        self._earlier = parse(Totals, unknown | state, "clocks in the checkpoint")
        self.totals = replace(self._earlier, sessions=self._earlier.sessions + 1)


def _sum(a: float | None, b: float | None) -> float | None:
    """a + b; None where one is not known."""
    return None if a is None or b is None else a + b


# --- of all ranks


def global_counts(totals: Totals, mesh: Mesh) -> dict[str, int]:
    """Samples and tokens of all data-parallel ranks."""
    local = [getattr(totals, name) for name in COUNTS]
    return dict(zip(COUNTS, mesh.sum_over_dp(local), strict=True))


def global_energy(totals: Totals, mesh: Mesh) -> dict[str, float | None]:
    """Joules of all ranks; None where one of them does not know."""
    local = [getattr(totals, name) for name in ENERGY]
    summed = mesh.sum_over_ranks([math.nan if joules is None else joules for joules in local])
    known = [None if math.isnan(joules) else joules for joules in summed]
    return dict(zip(ENERGY, known, strict=True))


def global_state(clocks: Clocks, mesh: Mesh) -> dict[str, Any]:
    """What a checkpoint keeps: times of this rank, counts of all."""
    so_far = clocks.so_far()
    return asdict(so_far) | global_counts(so_far, mesh) | global_energy(so_far, mesh)
