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
from trainmark.kernels.relu_mlp import relu_mlp
from trainmark.workloads.dlrm.data import ClickBatch
from trainmark.workloads.dlrm.runs import score_offset
from trainmark.workloads.dlrm.sizes import has_bags

Layer = tuple[Tensor, Tensor]
"""Weight [outputs, inputs] and bias."""
Logits = Callable[[NDArray[np.float32], NDArray[np.int64]], NDArray[np.float32]]
"""([B, N] numbers, [B, F] ids) -> [B] logits."""

INTERACTIONS = ("dot", "dot_and_inputs")
FEW_PRODUCTS = 4096
"""Of a sample in its dense layers: that many are done before a GEMM has begun."""
MANY_PRODUCTS = 1 << 24
"""Of all samples: from here on GEMMs pay, which read a matrix once for many of them."""


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
    width = len(tables)

    def predict(batch: ClickBatch) -> Tensor:
        # By numpy, whose calls cost a fraction of torch's: of one sample they are most of it.
        ids_FB = np.empty((width, batch.samples), np.int64)
        for group in batch.groups:
            ids_FB[group.features] = group.ids.numpy()
        numbers_BN = batch.numerical.numpy().astype(np.float32)
        return torch.from_numpy(logits(numbers_BN, ids_FB.T))

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

    return _on_a_cpu(tables, layers("bottom"), layers("top"), config.get("logit_offset", 0.0), kind)


def _linears(mlp: nn.Sequential) -> list[Layer]:
    return [(part.weight, part.bias) for part in mlp if isinstance(part, nn.Linear)]


def _on_a_cpu(
    tables: Sequence[Tensor | None], bottom: list[Layer], top: list[Layer], offset: float, kind: str
) -> Logits | None:
    """In one pass; large layers, if there are many samples, by GEMMs around it."""
    dim = len(bottom[-1][1])
    if not INSTALLED or not all(_is_plain(table, dim) for table in tables):
        return None
    from trainmark.kernels import cpu_scores

    width, with_inputs = top[0][0].shape[1], kind == "dot_and_inputs"
    places = cpu_scores.find_tables([table for table in tables if table is not None])
    before = cpu_scores.pack_layers(bottom, bottom[0][0].shape[1])
    after = cpu_scores.pack_layers(top, width)
    none_before, none_after = (cpu_scores.pack_layers([], n) for n in (dim, width))
    products, shift = before.products + after.products, np.float32(offset)

    def logits(numbers_BN: NDArray[np.float32], ids_BF: NDArray[np.int64]) -> NDArray[np.float32]:
        if products <= FEW_PRODUCTS or len(ids_BF) * products <= MANY_PRODUCTS:
            beside = numbers_BN if with_inputs else None
            found_B1 = cpu_scores.scores(numbers_BN, ids_BF, places, dim, before, after, beside)
        else:
            found_B1 = by_gemms(numbers_BN, ids_BF)
        return found_B1[:, 0] + shift

    @torch.inference_mode()
    def by_gemms(numbers_BN: NDArray[np.float32], ids_BF: NDArray[np.int64]) -> NDArray[Any]:
        x_BD = _through(torch.from_numpy(numbers_BN), bottom, last_relu=True).numpy()
        beside = numbers_BN if with_inputs else None
        x_BW = cpu_scores.scores(x_BD, ids_BF, places, dim, none_before, none_after, beside)
        found_B1: NDArray[Any] = _through(torch.from_numpy(x_BW), top, last_relu=False).numpy()
        return found_B1

    return logits


def _is_plain(table: Tensor | None, dim: int) -> bool:
    """Whether a table has fp32 rows in host memory, as wide as the dense vector."""
    return (
        isinstance(table, Tensor)
        and table.device.type == "cpu"
        and table.dtype == torch.float32
        and table.shape[1:] == (dim,)
        and table.is_contiguous()
    )


def _through(x: Tensor, layers: list[Layer], *, last_relu: bool) -> Tensor:
    return relu_mlp(x, [weight for weight, _ in layers], [bias for _, bias in layers], last_relu)
