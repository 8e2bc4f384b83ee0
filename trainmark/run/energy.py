"""The energy that a run used, and its price where one was given."""

from typing import Any

from trainmark import metrics
from trainmark.run.clocks import Totals, global_energy
from trainmark.run.loop import Training
from trainmark.run.result import Energy, Times

TOLERANCE = 0.05
"""A larger difference between sampled power and the counter becomes a note."""
SHORT_S = 10
"""Seconds; the power samples of a shorter run say nothing about the counter."""


def make_energy(
    training: Training, totals: Totals, times: Times, monitor: dict[str, Any]
) -> Energy:
    """All ranks must call this: energy is added up over them."""
    counter, cfg = monitor["energy"], training.cfg
    used = global_energy(training.clocks.totals, training.mesh)
    joules, train_joules = used["joules"], used["train_joules"]
    [peak] = training.mesh.max_over_ranks([monitor["power_w"]["max"] or 0.0])
    epochs = totals.steps / training.data.steps_per_epoch
    cost = None if cfg.price_per_hour is None else metrics.cost(times.e2e, cfg.price_per_hour)
    co2 = None
    if joules is not None and cfg.grams_co2_per_kwh is not None:
        co2 = metrics.grams_co2(joules, cfg.grams_co2_per_kwh)
    samples = totals.samples - totals.samples_warmup
    tokens = totals.tokens - totals.tokens_warmup
    mean_power = metrics.ratio(train_joules, times.train)
    return Energy(
        source=counter["source"] if joules is not None else None,
        joules=joules,
        train_joules=train_joules,
        joules_per_sample=metrics.ratio(train_joules, samples),
        joules_per_token=metrics.ratio(train_joules, tokens),
        samples_per_joule=metrics.ratio(samples, train_joules),
        mean_power_w=mean_power,
        # A driver's samples lag by a second: of a short run they may all lie below the mean.
        peak_power_w=max(peak, mean_power or 0.0) or None,
        reason=_reason(joules, counter["reason"], totals.sessions),
        cost=cost,
        cost_per_epoch=metrics.ratio(cost, epochs),
        grams_co2=co2,
        grams_co2_per_epoch=metrics.ratio(co2, epochs),
    )


def _reason(joules: float | None, reason: str | None, sessions: int) -> str | None:
    if joules is not None:
        return None
    if reason is None and sessions > 1:
        return "an earlier session of this run did not count its energy"
    return reason or "a device of another rank has no energy counter that can be read"


def energy_note(monitor: dict[str, Any]) -> list[str]:
    """A sentence where a device's counter and its sampled power disagree."""
    found, seconds = monitor["energy"], monitor["samples"] * monitor["interval_s"]
    counted, sampled = found["joules"], found["sampled_joules"]
    if not counted or not sampled or seconds < SHORT_S:
        return []
    difference = sampled / counted - 1
    if abs(difference) <= TOLERANCE:
        return []
    return [
        f"Energy is in doubt: {found['source']} says {counted:,.0f} J, and power sampled every "
        f"{monitor['interval_s']:g} s adds up to {sampled:,.0f} J ({difference:+.1%})."
    ]
