"""`--data synthetic` at a published run's learning rate: losses stay finite, in small.

`dlrm-small`, its rate of 24 and its kind of schedule, with small tables and MLPs; 2,048 distinct
rows that come again and again. With the labels that such rows once had, always the same, it ends
where the published sizes did: beyond all bounds.
"""

import dataclasses
from itertools import islice

import numpy as np
import pytest
from numpy.typing import NDArray

from tests import small
from trainmark import workloads
from trainmark.clickdata.planted import BLOCK_ROWS
from trainmark.config import Schedule
from trainmark.workloads.dlrm.data import build_data
from trainmark.workloads.dlrm.rows import SyntheticRows
from trainmark.workloads.dlrm.runs import DlrmRun, Model

STEPS, DISTINCT = 300, 2048


def always_the_same(
    rows: SyntheticRows, start: int, probability: NDArray[np.float32]
) -> NDArray[np.bool_]:
    block, first = divmod(rows._first + start % DISTINCT, BLOCK_ROWS)
    return rows._block(block).columns.labels[first : first + len(probability)]


def worst_loss(ids: str) -> float:
    """Of the last 50 steps, the full rate's."""
    run = dataclasses.replace(
        workloads.named_run("dlrm-small"),
        data="synthetic",
        synthetic_ids=ids,
        seed=0,
        device="cpu",
        precision="fp32",
        loss_scale=1.0,
        model=Model(
            table_rows=(1000, 300, 50, 2000) * 3,
            embedding_dim=16,
            bottom_mlp=(64, 16),
            top_mlp=(64, 32, 1),
        ),
        global_batch=512,
        synthetic_rows=512 * STEPS,
        schedule=Schedule(warmup_steps=STEPS // 4),
    )
    cfg = workloads.resolve(run, small.ONE_CPU)
    assert isinstance(cfg, DlrmRun)
    trainer, losses = small.trainer(cfg), []
    for step, batch in enumerate(islice(build_data(cfg, "train", 0, 1), STEPS)):
        rate = cfg.lr * cfg.schedule.factor(step)
        losses.append(trainer.step(trainer.prepare(batch), rate)[0])
    assert (len(losses), rate) == (STEPS, 24.0)
    return max(loss.item() for loss in losses[-50:])


@pytest.mark.parametrize("ids", ["uniform", "planted"])
def test_the_published_rate_is_stable(ids: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SyntheticRows, "DISTINCT_ROWS", DISTINCT)
    assert worst_loss(ids) < 0.3


def test_rows_that_keep_their_labels_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is why they do not: the test above can fail."""
    monkeypatch.setattr(SyntheticRows, "DISTINCT_ROWS", DISTINCT)
    monkeypatch.setattr(SyntheticRows, "_drawn", always_the_same)
    assert not worst_loss("planted") < 1000
