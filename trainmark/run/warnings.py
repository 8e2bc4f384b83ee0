"""Why a result should not be trusted as it is: few steps, a rising loss, what the workload adds.

Notes say how a result came about; warnings say that something is probably wrong, and what to do.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainmark import metrics, workloads
from trainmark.config import Run
from trainmark.formatting import counted
from trainmark.run.curves import read_losses
from trainmark.run.result import Result

FEW_STEPS = 200


def warnings(
    cfg: Run, finished: Result, output: Path, *, began_with: Mapping[str, Any] | None = None
) -> list[str]:
    """One sentence or two for each thing to be warned about.

    Args:
        cfg: the resolved configuration.
        finished: its result.
        output: the run's folder, which holds the loss curve.
        began_with: another run's weights, as checkpoints keep it: they know the data already.
    """
    return [
        *(_lost(finished, began_with) if began_with else _few_steps(cfg, finished)),
        *_still_rising(cfg, finished),
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


def _lost(finished: Result, began_with: Mapping[str, Any]) -> list[str]:
    """Where the weights that the run began with were better than those it has made."""
    quality, best = finished.quality, finished.best
    split = best.split if best else quality.split
    values = {
        e.at_sample: e.metrics[quality.metric] for e in finished.evaluations if e.split == split
    }
    first = values.get(0)
    if best and best.at_sample == 0:
        or_more = ", or take the optimiser's state, too (--with-optimizer)"
        return [
            f"No step improved the weights that the run began with ({quality.metric} on {split} "
            f"{best.value:.5g}), which are kept. Lower --lr"
            f"{'' if began_with['with_optimizer'] else or_more}."
        ]
    if best or not metrics.improves(first, quality.value, quality.better):
        return []
    return [
        f"The weights that the run began with were better: {quality.metric} on {split} was "
        f"{first:.5g}, and is {quality.value:.5g} now. Lower --lr, or keep the best weights with "
        "--patience 8."
    ]


def _still_rising(cfg: Run, finished: Result) -> list[str]:
    """One epoch shows new rows only, so it does not tell what a second one would do."""
    best, quality = finished.best, finished.quality
    split = best.split if best else quality.split
    if finished.ended != "epochs" or cfg.epochs < 2 or quality.reached or quality.metric != "auc":
        return []
    values = [e.metrics["auc"] for e in finished.evaluations if e.split == split and e.at_sample]
    found = metrics.still_rising([value for value in values if value is not None])
    if found is None:
        return []
    early, last = found
    return [
        f"The AUC on {split} was still rising when the epochs ended: it was {early:.4f} in their "
        f"first half, {last:.4f} in the end. Train with --epochs {2 * cfg.epochs} and another "
        "--output to see how far it goes."
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
