"""Predictions of a trainer in one pass over the samples (`one_pass.py`), where that is possible.

A GPU's way is that of `graphed_prediction.py`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainmark.embeddings.tables.store import table_names
from trainmark.kernels.compiled import INSTALLED
from trainmark.workloads.dlrm import one_pass
from trainmark.workloads.dlrm.crosses import cross_features
from trainmark.workloads.dlrm.data import ClickBatch
from trainmark.workloads.dlrm.runs import score_offset


def of_trainer(trainer: Any) -> Callable[[ClickBatch], Tensor] | None:
    """A trainer's predictor; None where its own way is the fastest."""
    cfg, model = trainer.cfg, trainer.model
    kind = cfg.model.interaction
    if cfg.precision != "fp32" or kind not in one_pass.INTERACTIONS or cfg.model.has_bags:
        return None
    weights = model.tables.table_weights()
    names = [f"{name}.weight" for name in table_names(len(cfg.model.table_rows))]
    bottom, top = _linears(model.bottom), _linears(model.top)
    shapes = [(rows, len(bottom[-1][1])) for rows in cfg.model.table_rows]
    tables = [weights.get(name) for name in names]
    if not INSTALLED or not all(map(_is_plain, tables, shapes)):
        return None  # by others, or they hold the rest of them
    crosses, width = list(map(cross_features, cfg.model.crosses)), len(cfg.model.feature_rows)
    logits = one_pass.build(
        [weights[name].numpy() for name in names], bottom, top, score_offset(cfg), kind, crosses
    )

    def predict(batch: ClickBatch) -> Tensor:
        # By numpy, whose calls cost a fraction of torch's: of one sample they are most of it.
        ids_FB = np.empty((width, batch.samples), np.int64)
        for group in batch.groups:
            ids_FB[group.features] = group.ids.numpy()
        numbers_BN = batch.numerical.numpy().astype(np.float32)
        return torch.from_numpy(logits(numbers_BN, ids_FB.T))

    return predict


def _linears(mlp: nn.Sequential) -> list[one_pass.Layer]:
    return [
        (part.weight.detach().numpy(), part.bias.detach().numpy())
        for part in mlp
        if isinstance(part, nn.Linear)
    ]


def _is_plain(table: Tensor | None, shape: tuple[int, int]) -> bool:
    """Whether a table is whole, with fp32 rows in host memory, as wide as the dense vector."""
    return (
        isinstance(table, Tensor)
        and table.device.type == "cpu"
        and table.dtype == torch.float32
        and tuple(table.shape) == shape
        and table.is_contiguous()
    )
