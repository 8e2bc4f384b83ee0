"""Predictions of a trainer in one pass over the samples (`one_pass.py`), where that is possible.

A GPU's way is that of `graphed_prediction.py`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainmark.workloads.dlrm import one_pass
from trainmark.workloads.dlrm.data import ClickBatch
from trainmark.workloads.dlrm.description import description


def of_trainer(trainer: Any) -> Callable[[ClickBatch], Tensor] | None:
    """A trainer's predictor; None where its own way is the fastest."""
    cfg, weights = trainer.cfg, trainer.weights()
    if cfg.precision != "fp32" or not all(map(_is_plain, weights.values())):
        return None
    config = description(cfg)
    kinds = {name: ("F32", tuple(weight.shape)) for name, weight in weights.items()}
    if not one_pass.suits(config, kinds):
        return None
    arrays = {name: weight.numpy() for name, weight in weights.items()}
    logits, width = one_pass.logits_of(config, arrays), len(cfg.model.feature_rows)

    def predict(batch: ClickBatch) -> Tensor:
        # By numpy, whose calls cost a fraction of torch's: of one sample they are most of it.
        ids_FB = np.empty((width, batch.samples), np.int64)
        for group in batch.groups:
            ids_FB[group.features] = group.ids.numpy()
        numbers_BN = batch.numerical.numpy().astype(np.float32)
        return torch.from_numpy(logits(numbers_BN, ids_FB.T))

    return predict


def _is_plain(weight: Any) -> bool:
    """Whether a weight is whole, and fp32 in host memory."""
    return (
        isinstance(weight, Tensor)
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.is_contiguous()
    )
