"""The probabilities of an exported model by torch: as CUDA graphs, or by its own code."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainmark.workloads.dlrm import graphed_prediction, standalone
from trainmark.workloads.dlrm.requests import Clicks


def clicks_by_torch(config: dict[str, Any], tensors: dict[str, Tensor], device: str) -> Clicks:
    """Of a model whose tensors lie on the device."""
    model, here = standalone.Dlrm(config, tensors).eval(), torch.device(device)
    if here.type != "cuda":
        return lambda numbers, ids: _on_host(
            model(torch.from_numpy(numbers).to(here), torch.from_numpy(ids).to(here))
        )
    logits = graphed_prediction.of_exported(model, here)
    return lambda numbers, ids: _on_host(
        torch.from_numpy(logits(numbers.astype(np.float32, copy=False), ids)).sigmoid()
    )


def _on_host(clicks: Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = clicks.cpu().numpy()
    return found
