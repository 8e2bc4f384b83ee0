"""How far a run is: its steps and evaluations, the best evaluation so far, and why it ended."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trainmark import metrics
from trainmark.config import Run, filled
from trainmark.errors import InputError
from trainmark.run.result import Best, Evaluation

Watch = Callable[[Sequence[Evaluation]], None]
"""Called with all evaluations so far after each evaluation in training. To end the run, it raises
an exception."""


@dataclass(kw_only=True)
class Progress:
    """What a run remembers besides its weights and clocks. Every checkpoint keeps it."""

    step: int = 0
    skipped: int = 0
    evaluations: list[Evaluation] = field(default_factory=list)
    evaluated_at_s: list[float] = field(default_factory=list)
    """End-to-end time of each evaluation."""
    best: Best | None = None
    """With patience, the best evaluation so far; its checkpoint is kept."""
    first_loss: float | None = None
    last_loss: float | None = None

    @property
    def is_best(self) -> bool:
        """Whether the weights after the last step are the best ones so far."""
        return self.best is not None and self.best.step == self.step


def why_ended(progress: Progress, cfg: Run, total_steps: int) -> str | None:
    """Why there is no step left to do; None while there is one."""
    if progress.step >= total_steps:
        return "max_steps" if progress.step == cfg.max_steps else "epochs"
    trained = (e for e in progress.evaluations if e.at_sample > 0)  # not what it began with
    if cfg.stop_at_target and any(reaches_target(e, cfg) for e in trained):
        return "target"
    best, patience = progress.best, cfg.patience
    return "patience" if best and patience is not None and best.since >= patience else None


def reaches_target(evaluation: Evaluation, cfg: Run) -> bool:
    """Whether an evaluation is on the quality split and as good as the target."""
    value = evaluation.metrics[cfg.metric]
    on_quality_split = evaluation.split == cfg.quality_split
    return on_quality_split and bool(metrics.reached(value, cfg.target, cfg.better))


# --- patience: the best weights, not the last ones


def watched_split(cfg: Run, held_out: Sequence[str]) -> str:
    """The split that is evaluated while the run trains.

    With patience, this split chooses the weights. A split that chose them can no longer judge them,
    so validation is preferred to test.
    """
    if cfg.patience is None:
        return cfg.quality_split
    if not held_out:
        raise InputError(
            f"patience needs held-out data, and {cfg.data} has none. Hold some out, or leave "
            "--patience out."
        )
    return "validation" if "validation" in held_out else held_out[0]


def best_after(best: Best | None, evaluation: Evaluation, step: int, cfg: Run) -> Best | None:
    """The best evaluation so far, after one more at `step`.

    Of two equal evaluations the later one is the best, because its weights have learned more; but
    it does not reset the count that patience waits for. None while the metric is undefined.
    """
    value = evaluation.metrics[cfg.metric]
    if best is not None and value == best.value:
        return dataclasses.replace(
            best, step=step, at_sample=evaluation.at_sample, since=best.since + 1
        )
    if metrics.improves(value, best.value if best else None, cfg.better):
        return Best(
            step=step,
            at_sample=evaluation.at_sample,
            split=evaluation.split,
            metric=cfg.metric,
            value=filled(value),
        )
    return best and dataclasses.replace(best, since=best.since + 1)
