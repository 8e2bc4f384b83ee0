"""How far a run is: what it remembers besides its weights and clocks, and why it has ended."""

from dataclasses import dataclass, field

from trainmark import metrics
from trainmark.config import Run
from trainmark.contract import AnyWorkload
from trainmark.run.result import Best, Evaluation


@dataclass(kw_only=True)
class Progress:
    """Kept in a run's checkpoints."""

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


def why_ended(progress: Progress, cfg: Run, workload: AnyWorkload, total_steps: int) -> str | None:
    """Why there is no step left to do; None while there is one."""
    if progress.step >= total_steps:
        return "max_steps" if progress.step == cfg.max_steps else "epochs"
    if cfg.stop_at_target and any(
        reaches_target(evaluation, cfg, workload) for evaluation in progress.evaluations
    ):
        return "target"
    best, patience = progress.best, cfg.patience
    return "patience" if best and patience is not None and best.since >= patience else None


def reaches_target(evaluation: Evaluation, cfg: Run, workload: AnyWorkload) -> bool:
    """Whether an evaluation is on the quality split and as good as the target."""
    value = evaluation.metrics[workload.metric]
    on_quality_split = evaluation.split == cfg.quality_split
    return on_quality_split and bool(metrics.reached(value, cfg.target, workload.better))
