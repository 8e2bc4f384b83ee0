"""`dlrm-auto`: the settings of a run on one's own log, where the user chose none.

Settings for every log stand in the named run (`dlrm_auto` in runs.py); those that depend on a log's
rows and clicks stand here. Their numbers come from thirty-odd datasets of 400 to 1 M rows, trained
with a grid of settings. Chosen were the settings with which the fewest datasets fell behind, not
those that were best for one. `benchmarks/own_data.py` compares the outcome with logistic regression
and gradient boosting, also on twenty datasets that had no part in the choice.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from trainmark.config import Schedule, filled
from trainmark.errors import InputError
from trainmark.workloads.dlrm.runs import DlrmRun, dlrm_auto, with_model

NAME = "dlrm-auto"
Interaction = Literal["dot", "dot_and_inputs"]
MIN_BATCH, MAX_BATCH = 64, 2048
BATCHES_PER_EPOCH = 100
EPOCHS_OF_ONE_ROW, MAX_EPOCHS, TWICE_UP_TO = 1000, 40, 2_000_000
LR_OF_ONE_CLICK, MIN_LR, MAX_LR = 2e-5, 0.02, 0.05
SHARE_OF_ONE_ROW = 0.1
DROPOUT, DROPOUT_UP_TO = 0.1, 50_000
TRIED_UP_TO = 100_000
WARM_UP = 0.05


@dataclass(frozen=True, kw_only=True)
class Log:
    """What is known of a log before training. The defaults are those of a common log."""

    rows: int = 1_000_000
    """To train on."""
    clicks: int = 200_000
    """Rows of the rarer label, which is usually that of the clicks."""


def batch(rows: int) -> int:
    """A power of 2, such that an epoch has some hundred steps.

    Noisy gradients of small batches keep small logs from being learned by heart; beyond 2,048 rows
    a CPU computes no more of them in a second, and large logs have steps enough.
    """
    nearest = 2 ** round(math.log2(max(rows / BATCHES_PER_EPOCH, 1)))
    return min(max(nearest, MIN_BATCH), MAX_BATCH)


def epochs(rows: int) -> int:
    """The most epochs, since patience ends a run: 12 for 7,000 rows, 3 for 100,000, 1 for 5 M.

    The fewer rows, the more often each must be seen, but not in proportion, or they are memorised.
    A learning rate that has fallen to 0 is worth more than more epochs, so the end must be near
    enough. Two cores have no time for a large log's second epoch.
    """
    fewest = 2 if rows <= TWICE_UP_TO else 1
    return min(max(round(EPOCHS_OF_ONE_ROW / math.sqrt(rows)), fewest), MAX_EPOCHS)


def lr(clicks: int) -> float:
    """The peak learning rate of Adagrad: 0.02 for up to 1,000 clicks, 0.05 for 2,500 and more.

    Ids are memorised after so many epochs, whatever the size of the steps; so what all rows have in
    common should be learned in large steps. But few clicks do not say where to go.
    """
    return min(max(LR_OF_ONE_CLICK * clicks, MIN_LR), MAX_LR)


def dropout(rows: int) -> float:
    """A tenth for up to 50,000 rows: a fifth did as well, a half cost logs of numbers, and larger
    logs gain from none."""
    return DROPOUT if rows <= DROPOUT_UP_TO else 0.0


def candidates(cfg: DlrmRun, resolved: DlrmRun) -> dict[str, DlrmRun]:
    """The runs to try where the user chose no interaction: what the top MLP reads, and crosses if
    the log has some.

    A dot product says how two vectors go together, not what one of them says by itself, and the
    bottom MLP passes all numbers on as one vector. So most small logs gain from a top MLP that also
    reads the rows and the numbers. Other logs learn pairs worse then, and neither rows nor ids tell
    which. Large logs have enough rows to learn pairs, and two cores have no time to try. Crosses
    that surely say something are sometimes still memorised.
    """
    if resolved.auto_clicks == 0:
        raise InputError(
            f"All training rows of {resolved.data} have the same label, so there is nothing to "
            "learn from them. Check the label in --columns of 'trainmark prepare', and --positive."
        )
    if cfg.model.interaction != "auto" or filled(resolved.auto_rows) > TRIED_UP_TO:
        return {}
    if resolved.patience is None:  # without it no evaluation is kept to choose by
        return {}
    from trainmark.workloads.dlrm import cross_choice  # and torch, which other verbs do without

    kinds: tuple[Interaction, ...] = ("dot", "dot_and_inputs")
    found = {f"--model.interaction {kind}": with_model(cfg, interaction=kind) for kind in kinds}
    if crosses := cross_choice.of_run(resolved) if _may_add_tables(cfg) else ():
        flags = f"--model.interaction dot_and_inputs --model.crosses {' '.join(crosses)}"
        found[flags] = with_model(cfg, interaction="dot_and_inputs", crosses=crosses)
    return found


def _may_add_tables(cfg: DlrmRun) -> bool:
    """Whether nobody chose crosses, nor said of each table how wide it is or where it lies."""
    of_each = isinstance(cfg.model.table_widths, tuple) or cfg.sharding.placement.endswith(".json")
    return not cfg.model.crosses and not of_each


def eps(global_batch: int) -> float:
    """Adagrad's eps, in units of what one row contributes to a batch's gradient.

    Adagrad takes the largest step when an id occurs for the first time, so the many rare ids of a
    log would be memorised. With this eps, rare ids move in proportion to their rows, and only
    frequent ones at Adagrad's own pace.
    """
    return SHARE_OF_ONE_ROW / global_batch


def schedule(steps: int) -> Schedule:
    """Up over the first twentieth of the steps, then linearly down to 0, so that the last weights
    are no longer noisy, whatever the length of the run."""
    start = round(WARM_UP * steps)
    return Schedule(
        warmup_steps=start, decay_start=start, decay_steps=max(steps - start, 1), decay_power=1.0
    )


def fit(cfg: DlrmRun, log: Log) -> DlrmRun:
    """The run with everything that the user did not choose, for a log."""
    named, cfg, rows = dlrm_auto(), _without(cfg, unchosen(cfg)), log.rows
    if cfg.global_batch is None and cfg.micro_batch is None:
        cfg = dataclasses.replace(cfg, global_batch=batch(rows))
    if cfg.epochs == named.epochs:
        cfg = dataclasses.replace(cfg, epochs=epochs(rows))
    if cfg.lr == named.lr:
        cfg = dataclasses.replace(cfg, lr=lr(log.clicks))
    if cfg.model.dropout is None:
        cfg = with_model(cfg, dropout=dropout(rows))
    if cfg.model.interaction == "auto":  # and was not tried
        cfg = with_model(cfg, interaction="dot")
    size = cfg.global_batch or filled(cfg.micro_batch) * (cfg.accumulate or 1)
    if cfg.optimizer.eps is None:
        optimizer = dataclasses.replace(cfg.optimizer, eps=eps(size))
        cfg = dataclasses.replace(cfg, optimizer=optimizer)
    if cfg.schedule == named.schedule:
        whole = cfg.epochs * -(-rows // size)
        steps = min(whole, cfg.max_steps or whole)
        cfg = dataclasses.replace(cfg, schedule=schedule(steps), schedule_steps=steps)
    return dataclasses.replace(cfg, auto_rows=rows, auto_clicks=log.clicks)


def like_the_earlier(cfg: DlrmRun, earlier: DlrmRun) -> DlrmRun:
    """The run with the network of the run that its weights come from, unless another was chosen."""
    if cfg.model.interaction != "auto":
        return cfg
    names = ("interaction", "cross_layers", "cross_rank", "branch1_mlp", "branch2_mlp")
    network = {name: getattr(earlier.model, name) for name in names}
    return with_model(cfg, **network, crosses=cfg.model.crosses or earlier.model.crosses)


def unfit(cfg: DlrmRun) -> DlrmRun:
    """The run without what `fit` took from its log, for use with another log."""
    fitted = unchosen(cfg)
    if "global_batch" in fitted:  # which the others divide
        fitted |= {"micro_batch", "accumulate"}
    return _without(cfg, fitted)


def unchosen(cfg: DlrmRun) -> frozenset[str]:
    """Top-level fields that are as `fit` left them; of `model`, only the dropout may be."""
    rows, clicks, named = cfg.auto_rows, cfg.auto_clicks, dlrm_auto()
    if cfg.name != NAME or rows is None or clicks is None:
        return frozenset()
    fitted: dict[str, Any] = {
        "global_batch": batch(rows),
        "epochs": epochs(rows),
        "lr": lr(clicks),
        "model": dataclasses.replace(cfg.model, dropout=dropout(rows)),
        "auto_rows": rows,
        "auto_clicks": clicks,
    }
    if cfg.global_batch is not None:
        fitted["optimizer"] = dataclasses.replace(named.optimizer, eps=eps(cfg.global_batch))
    if cfg.schedule_steps is not None and cfg.schedule == schedule(cfg.schedule_steps):
        fitted |= {"schedule": cfg.schedule, "schedule_steps": cfg.schedule_steps}
    return frozenset(name for name, value in fitted.items() if getattr(cfg, name) == value)


def _without(cfg: DlrmRun, fields: frozenset[str]) -> DlrmRun:
    """The run with these fields as in the named run; of `model`, only the dropout."""
    named = dlrm_auto()
    replaced = {name: getattr(named, name) for name in fields}
    if "model" in fields:
        replaced["model"] = dataclasses.replace(cfg.model, dropout=named.model.dropout)
    return dataclasses.replace(cfg, **replaced)
