"""Why a result should not be trusted as it is: few steps, a rising loss, what the workload adds.

Notes say how a result came about; warnings say that something is probably wrong, and what to do.
"""

import math
from pathlib import Path

from trainmark import metrics, workloads
from trainmark.config import Run
from trainmark.formatting import counted
from trainmark.run.curves import read_losses
from trainmark.run.result import Result

FEW_STEPS = 200


def warnings(cfg: Run, finished: Result, output: Path, *, from_another: bool = False) -> list[str]:
    """One sentence or two for each thing to be warned about.

    Args:
        cfg: the resolved configuration.
        finished: its result.
        output: the run's folder, which holds the loss curve.
        from_another: whether it started from another run's weights, which know the data already.
    """
    return [
        *([] if from_another else _few_steps(cfg, finished)),
        *_risen_loss(cfg, output / finished.loss.curve),
        *_optimistic_choice(finished),
        *workloads.load(cfg.workload).warnings(cfg, finished.final_metrics()),
    ]


def _few_steps(cfg: Run, finished: Result) -> list[str]:
    steps = finished.steps.all - finished.steps.skipped
    if steps >= FEW_STEPS or finished.quality.reached:  # what it was for was reached
        return []
    limited = cfg.max_steps is not None and finished.steps.all >= cfg.max_steps
    advice = "raise --max-steps" if limited else "lower --global-batch, or raise --epochs"
    if finished.ended == "patience":
        advice = "lower --global-batch or --lr, or raise --patience"
    elif not limited and {"global_batch", "epochs"} <= workloads.definition(cfg).closed(cfg):
        return []  # nobody chose them: they follow from the rows, and there are enough
    return [
        f"The weights were updated in {counted(steps, 'step')} only; fewer than {FEW_STEPS} seldom "
        f"teach a model what is in the data. To train one, {advice}."
    ]


def _risen_loss(cfg: Run, curve: Path) -> list[str]:
    found = metrics.risen_loss([loss for loss in read_losses(curve) if math.isfinite(loss)])
    if found is None:
        return []
    lowest, last = found
    return [
        f"The training loss rose: its mean was {lowest:.4g} in the best tenth of the steps, and "
        f"{last:.4g} in the last one. Lower --lr (now {cfg.lr:g})."
    ]


def _optimistic_choice(finished: Result) -> list[str]:
    best, quality = finished.best, finished.quality
    if best is None or best.split != quality.split:
        return []
    return [
        f"The {quality.split} split chose the checkpoint (--patience), so that its {best.metric} "
        "is better than new data will show. Hold out a validation split, too, to choose by."
    ]
