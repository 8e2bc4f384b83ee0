"""Best, not last: the split that a run watches while it trains, and its best evaluation so far."""

import dataclasses
from collections.abc import Callable, Sequence

from trainmark import metrics
from trainmark.config import Run, filled
from trainmark.contract import AnyWorkload
from trainmark.errors import InputError
from trainmark.run.result import Best, Evaluation

Watch = Callable[[Sequence[Evaluation]], None]
"""Sees a run's evaluations so far after each one during training; what it raises ends the run."""


def watched_split(cfg: Run, workload: AnyWorkload) -> str:
    """The split that is evaluated while the run trains.

    With patience it chooses the weights; better one that does not judge them, too.
    """
    if cfg.patience is None:
        return cfg.quality_split
    held_out = workload.held_out_splits(cfg)
    if not held_out:
        raise InputError(
            f"patience needs held-out data, and {cfg.data} has none. Hold some out, or leave "
            "--patience out."
        )
    return "validation" if "validation" in held_out else held_out[0]


def best_after(
    best: Best | None, evaluation: Evaluation, step: int, workload: AnyWorkload
) -> Best | None:
    """The best evaluation once `evaluation`, at `step`, has followed the others.

    Of equal ones it is the last, whose weights have learned more; yet they are no reason to wait
    any longer. None as long as the metric is undefined.
    """
    value = evaluation.metrics[workload.metric]
    if best is not None and value == best.value:
        return dataclasses.replace(
            best, step=step, at_sample=evaluation.at_sample, since=best.since + 1
        )
    if metrics.improves(value, best.value if best else None, workload.better):
        return Best(
            step=step,
            at_sample=evaluation.at_sample,
            split=evaluation.split,
            metric=workload.metric,
            value=filled(value),
        )
    return best and dataclasses.replace(best, since=best.since + 1)
