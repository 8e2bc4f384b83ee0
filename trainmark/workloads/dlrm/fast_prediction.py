"""Predictions by another way than layer after layer, where there is a faster one.

On a CPU with numba that is one pass over the samples (`kernels/cpu_scores.py`), for `infer` as for
`serve`. A GPU's way is that of `graphed_prediction.py`.

Shapes: B samples, N numerical features, F tables.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainmark.embeddings.tables.store import table_names
from trainmark.kernels.compiled import INSTALLED
from trainmark.workloads.dlrm.crosses import crossed
from trainmark.workloads.dlrm.data import ClickBatch
from trainmark.workloads.dlrm.runs import score_offset
from trainmark.workloads.dlrm.sizes import cross_features, feature_rows, has_bags

Layer = tuple[Tensor, Tensor]
"""Weight [outputs, inputs] and bias."""
Logits = Callable[[NDArray[np.float32], NDArray[np.int64]], NDArray[np.float32]]
"""([B, N] numbers, [B, F] ids) -> [B] logits."""

INTERACTIONS = ("dot", "dot_and_inputs")


def of_trainer(trainer: Any) -> Callable[[ClickBatch], Tensor] | None:
    """A trainer's predictor; None where its own way is the fastest."""
    cfg, model = trainer.cfg, trainer.model
    kind = cfg.model.interaction
    if cfg.precision != "fp32" or kind not in INTERACTIONS or has_bags(cfg.model):
        return None
    weights = model.tables.table_weights()
    tables = [weights.get(f"{name}.weight") for name in table_names(len(cfg.model.table_rows))]
    held = [len(table) if isinstance(table, Tensor) else 0 for table in tables]
    if held != list(cfg.model.table_rows):
        return None  # others hold the rest of them
    logits = _on_a_cpu(tables, _linears(model.bottom), _linears(model.top), score_offset(cfg), kind)
    if logits is None:
        return None
    crosses, width = list(map(cross_features, cfg.model.crosses)), len(feature_rows(cfg.model))

    def predict(batch: ClickBatch) -> Tensor:
        # By numpy, whose calls cost a fraction of torch's: of one sample they are most of it.
        ids_FB = np.empty((width, batch.samples), np.int64)
        for group in batch.groups:
            ids_FB[group.features] = group.ids.numpy()
        numbers_BN = batch.numerical.numpy().astype(np.float32)
        return torch.from_numpy(logits(numbers_BN, _with_crosses(ids_FB, crosses).T))

    return predict


def of_exported(model: Any) -> Logits | None:
    """The same of an exported model (`standalone.Dlrm`)."""
    config = model.config
    kind = config.get("interaction", "dot")
    if kind not in INTERACTIONS or "pooling" in config:
        return None
    buffers = dict(model.named_buffers())
    tables = [buffers.get(f"tables_{i}_weight") for i in range(len(config["table_rows"]))]

    def layers(name: str) -> list[Layer]:
        numbers = range(0, 2 * len(config[f"{name}_mlp"]), 2)
        return [(buffers[f"{name}_{n}_weight"], buffers[f"{name}_{n}_bias"]) for n in numbers]

    offset, crosses = config.get("logit_offset", 0.0), config.get("crosses", [])
    logits = _on_a_cpu(tables, layers("bottom"), layers("top"), offset, kind)
    if logits is None or not crosses:
        return logits
    return lambda numbers_BN, ids_BF: logits(numbers_BN, _with_crosses(ids_BF.T, crosses).T)


def _with_crosses(ids_FB: NDArray[np.int64], crosses: Sequence[Sequence[int]]) -> NDArray[Any]:
    """The ids of all tables."""
    if not crosses:
        return ids_FB
    return np.concatenate([ids_FB, [crossed([ids_FB[f] for f in cross]) for cross in crosses]])


def _linears(mlp: nn.Sequential) -> list[Layer]:
    return [(part.weight, part.bias) for part in mlp if isinstance(part, nn.Linear)]


def _on_a_cpu(
    tables: Sequence[Tensor | None], bottom: list[Layer], top: list[Layer], offset: float, kind: str
) -> Logits | None:
    dim = len(bottom[-1][1])
    if not INSTALLED or not all(_is_plain(table, dim) for table in tables):
        return None
    from trainmark.kernels import cpu_scores

    places = cpu_scores.find_tables([table for table in tables if table is not None])
    before = cpu_scores.pack_layers(bottom, bottom[0][0].shape[1])
    after = cpu_scores.pack_layers(top, top[0][0].shape[1])
    shift, with_inputs = np.float32(offset), kind == "dot_and_inputs"
    return lambda numbers_BN, ids_BF: (
        cpu_scores.scores(numbers_BN, ids_BF, places, dim, before, after, with_inputs=with_inputs)
        + shift
    )


def _is_plain(table: Tensor | None, dim: int) -> bool:
    """Whether a table has fp32 rows in host memory, as wide as the dense vector."""
    return (
        isinstance(table, Tensor)
        and table.device.type == "cpu"
        and table.dtype == torch.float32
        and table.shape[1:] == (dim,)
        and table.is_contiguous()
    )
