"""A DLRM's predictions in one pass over the samples, on a CPU with numba (`kernels/cpu_scores.py`).

It takes arrays, and no torch, which takes longer to import than a server to start without it.

Shapes: B samples, N numerical features, F tables.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainmark.kernels.compiled import INSTALLED
from trainmark.workloads.dlrm.crosses import crossed

Logits = Callable[[NDArray[np.float32], NDArray[np.int64]], NDArray[np.float32]]
"""([B, N] numbers, [B, F] ids) -> [B] logits."""

INTERACTIONS = ("dot", "dot_and_inputs")


Kind = tuple[str, tuple[int, ...]]
"""Of a tensor: its type, as safetensors calls it, and its shape."""


def suits(config: Mapping[str, Any], kinds: Mapping[str, Kind]) -> bool:
    """Whether a model can be computed in this way.

    Args:
        config: as `description` gives it.
        kinds: of its weights, by name.
    """
    dim, tables = config["bottom_mlp"][-1], enumerate(config["table_rows"])
    return (
        INSTALLED
        and config.get("interaction", "dot") in INTERACTIONS
        and "pooling" not in config
        and all(kind == "F32" for kind, _ in kinds.values())
        and all(kinds.get(f"tables.{t}.weight") == ("F32", (rows, dim)) for t, rows in tables)
    )


def logits_of(config: Mapping[str, Any], weights: Mapping[str, NDArray[np.float32]]) -> Logits:
    """Of a model that it suits, and its weights by name; from ids of the features alone, which
    those of crosses follow."""
    from trainmark.kernels import cpu_scores

    def packed(mlp: str) -> Any:
        numbers = range(0, 2 * len(config[f"{mlp}_mlp"]), 2)
        layers = [(weights[f"{mlp}.{n}.weight"], weights[f"{mlp}.{n}.bias"]) for n in numbers]
        return cpu_scores.pack_layers(layers, layers[0][0].shape[1])

    tables = [weights[f"tables.{table}.weight"] for table in range(len(config["table_rows"]))]
    places, before, after = cpu_scores.find_tables(tables), packed("bottom"), packed("top")
    dim, crosses = config["bottom_mlp"][-1], config.get("crosses", [])
    shift = np.float32(config.get("logit_offset", 0.0))
    kinds = {
        "relu_before": config.get("bottom_output", "relu") == "relu",
        "with_inputs": config.get("interaction", "dot") == "dot_and_inputs",
    }

    def logits(numbers_BN: NDArray[np.float32], ids_BF: NDArray[np.int64]) -> NDArray[np.float32]:
        if crosses:
            of_crosses = [crossed([ids_BF[:, f] for f in cross]) for cross in crosses]
            ids_BF = np.concatenate([ids_BF.T, of_crosses]).T
        return cpu_scores.scores(numbers_BN, ids_BF, places, dim, before, after, **kinds) + shift

    return logits


def clicks(logits_B: NDArray[np.float32]) -> NDArray[np.float32]:
    """Probabilities; NaN of an infinite logit, which would look like a certain one."""
    with np.errstate(over="ignore"):  # of a click that is as good as impossible
        found = np.float32(1) / (np.float32(1) + np.exp(-logits_B))
    found[np.isinf(logits_B)] = np.nan
    return found
